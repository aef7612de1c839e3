"""`serve`: the process around the application. Port, loading, signals, end."""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from flax_paged.generation.engine import Engine
from flax_paged.serving.app import create_app
from flax_paged.serving.service import Service

_LOGGER = logging.getLogger(__name__)

# Further connections are refused with 503, before they use up the process's files.
_MAX_CONNECTIONS = 900
# After their grace, calls get so many seconds to say that they end.
_SECONDS_TO_END = 5


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: Address or name; `127.0.0.1` is reached from this machine only.
        port: Port; 0 for any that is free.

    Raises:
        OSError: The port is in use, or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise OSError(f"host {host!r} is unknown: {error.strerror}.") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"port {port} of {host} is in use; choose another with --port.") from None
        raise OSError(f"cannot listen on port {port} of {host}: {error.strerror}.") from None
    return listener


def serve(service: Service, load: Callable[[], Engine], listener: socket.socket) -> None:
    """Serve until a SIGTERM or SIGINT, from the main thread.

    The socket answers at once; /health says 503 until `load` has returned. At the first signal, new calls are refused
    and running ones have `shutdown_grace` seconds to finish; what is left, or a second signal, ends with an error.

    Args:
        service: What answers.
        load: Returns the engine, warm; runs on a thread of its own.
        listener: Where to listen; closed at the end.

    Raises:
        Exception: What `load` raised.
    """
    server = _Server(service, create_app(service))
    server.start_loading(load)
    server.run(sockets=[listener])
    if server.load_error is not None:
        raise server.load_error


class _Protocol(H11Protocol):
    """HTTP/1.1 that closes connections whose next request's headers do not arrive in time."""

    header_timeout = 30.0

    def connection_made(self, transport):
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(self.header_timeout, self._close_if_idle)

    def on_response_complete(self):
        super().on_response_complete()
        self._header_timer.cancel()
        self._header_timer = self.loop.call_later(self.header_timeout, self._close_if_idle)

    def connection_lost(self, exc):
        self._header_timer.cancel()
        super().connection_lost(exc)

    def _close_if_idle(self):
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn, with a bounded end and an exit status of 0 after a signal.

    Attributes:
        load_error: What loading raised.
    """

    def __init__(self, service: Service, app):
        grace = service.options.shutdown_grace
        protocol = type("_TimedProtocol", (_Protocol,), {"header_timeout": service.options.body_timeout})
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=_MAX_CONNECTIONS,
            # Longer than clients keep idle connections (httpx, and so OpenAI's: 5 s, as uvicorn's default), or a call
            # may be sent on one that is just being closed.
            timeout_keep_alive=service.options.body_timeout,
            timeout_graceful_shutdown=grace + _SECONDS_TO_END,
        )
        super().__init__(config)
        self.load_error: Exception | None = None
        self._service = service
        self._grace = grace
        self._tasks: set[asyncio.Task] = set()

    def start_loading(self, load: Callable[[], Engine]) -> None:
        """Load the engine on a thread; a failure ends the server."""

        def run() -> None:
            try:
                engine = load()
                if not self.should_exit:
                    self._service.start(engine)
            except Exception as error:
                self.load_error = error
                self.should_exit = True

        threading.Thread(target=run, name="loading", daemon=True).start()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals; unlike uvicorn, do not raise them again at the end, so that the exit status is 0."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        yield
        self._service.close(_SECONDS_TO_END)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.should_exit:
            _LOGGER.info("%s again: ending what runs", name)
            self._end_calls()
            return
        _LOGGER.info("%s: refusing new calls; running ones have %g s to finish", name, self._grace)
        self._service.refuse("The server is shutting down.")
        self.should_exit = True
        asyncio.get_running_loop().call_later(self._grace, self._end_calls)

    def _end_calls(self) -> None:
        task = asyncio.ensure_future(asyncio.to_thread(self._service.close, _SECONDS_TO_END))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
