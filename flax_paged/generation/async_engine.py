"""`AsyncEngine`: the engine behind asyncio, its steps on a thread of their own."""

import asyncio
import dataclasses
import functools
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable

from flax_paged.generation.engine import Engine, Prompt
from flax_paged.generation.outputs import RequestOutput
from flax_paged.generation.sampling_params import SamplingParams


class EngineClosedError(RuntimeError):
    """The AsyncEngine was closed before the request was finished."""


class QueueTimeoutError(TimeoutError):
    """No step had a place for the request within its `queue_timeout`."""


class RequestTimeoutError(TimeoutError):
    """The request was not finished within its `timeout`."""


@dataclasses.dataclass(eq=False)
class _Client:
    """A coroutine that waits for a request's pieces.

    Fields:
        start_deadline: When the request must be part of a step, in seconds of `time.monotonic()`.
        deadline: When it must be finished.
        request_id: Its name; None until the engine has it.
    """

    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue
    start_deadline: float
    deadline: float
    request_id: str | None = None

    def put(self, piece: RequestOutput | Exception) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)


class AsyncEngine:
    """Serves an engine to coroutines.

        async with AsyncEngine(engine) as server:
            async for piece in server.generate("Once upon a time", SamplingParams(max_tokens=100)):
                print(piece.outputs[0].text, end="")

    One thread owns the engine: between steps it takes what coroutines ask for, and it sleeps while there are no
    requests. Leaving an iteration early, or cancelling its task, aborts the request. While it is served, use the engine
    through this object only.

    Args:
        engine: The engine, idle.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._clients: dict[str, _Client] = {}
        self._waiting: set[_Client] = set()  # whose requests have not been part of a step
        self._lock = threading.Lock()  # of the next two, and of the order in which commands enter
        self._is_closed = False
        self._is_running = True
        self._thread = threading.Thread(target=self._run, name="flax_paged engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *exc) -> None:
        await asyncio.to_thread(self.close)

    @property
    def engine(self) -> Engine:
        """The engine that is served; from other threads, read its constants and `stats()` only."""
        return self._engine

    @property
    def num_waiting(self) -> int:
        """Requests that have not been part of any step yet."""
        return len(self._waiting)

    @property
    def is_running(self) -> bool:
        """Whether requests are served: False once closed."""
        return self._thread.is_alive() and not self._is_closed

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        queue_timeout: float | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a prompt piece by piece, as `Engine.stream` does.

        Args:
            prompt: A text or a list of token ids.
            sampling_params: None for the defaults.
            request_id: Its name; None for a number.
            priority: Requests of a lower value go first.
            cache_salt: Only requests of the same salt share cached prefixes.
            queue_timeout: Most seconds until the request is part of a step; None for no limit.
            timeout: Most seconds until it is finished; None for no limit. Both are looked at between steps.

        Yields:
            RequestOutput with what is new; the last has `finished` set.

        Raises:
            ValueError: The request cannot be run.
            QueueTimeoutError: The request waited for longer than `queue_timeout`.
            RequestTimeoutError: The request took longer than `timeout`.
            EngineClosedError: The engine is closed.
            Exception: What a failed step raised; every request that was running gets it.
        """
        now = time.monotonic()
        client = _Client(
            asyncio.get_running_loop(),
            asyncio.Queue(),
            start_deadline=math.inf if queue_timeout is None else now + queue_timeout,
            deadline=math.inf if timeout is None else now + timeout,
        )
        options = {"request_id": request_id, "priority": priority, "cache_salt": cache_salt}
        self._waiting.add(client)
        try:
            if not self._submit(functools.partial(self._add, client, prompt, sampling_params, options)):
                raise EngineClosedError("This AsyncEngine is closed.")
            while True:
                piece = await client.pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.finished:
                    return
        finally:
            self._waiting.discard(client)
            self._submit(functools.partial(self._abort, client))

    def close(self, timeout: float | None = None) -> None:
        """Stop; requests that are left end with an EngineClosedError at once, whatever the running step takes.

        Args:
            timeout: Most seconds to wait for the running step; None for no limit.
        """
        self._submit(self._stop)
        with self._lock:
            self._is_closed = True
        for client in {*list(self._waiting), *list(self._clients.values())}:
            client.put(EngineClosedError("The AsyncEngine was closed."))
        self._thread.join(timeout)

    def _submit(self, command: Callable[[], None]) -> bool:
        """Have the thread run something between steps; False if it no longer does."""
        with self._lock:
            if not self._is_closed:
                self._commands.put(command)
            return not self._is_closed

    # On the thread

    def _run(self) -> None:
        while self._is_running:
            try:
                self._commands.get(block=not self._engine.has_unfinished_requests)()
                continue  # all of them, before the next step
            except queue.Empty:
                pass
            try:
                for piece in self._engine.step():
                    self._deliver(piece)
            except Exception as error:
                self._end_all(error)
            self._look_at_the_clock()

    def _add(self, client: _Client, prompt: Prompt, sampling_params: SamplingParams | None, options: dict) -> None:
        try:
            client.request_id = self._engine.add_request(prompt, sampling_params, **options)
        except Exception as error:
            client.put(error)
        else:
            self._clients[client.request_id] = client

    def _abort(self, client: _Client) -> None:
        if self._clients.get(client.request_id) is client:
            del self._clients[client.request_id]
            self._engine.abort(client.request_id)

    def _stop(self) -> None:
        self._is_running = False
        self._end_all(EngineClosedError("The AsyncEngine was closed."))

    def _deliver(self, piece: RequestOutput) -> None:
        client = self._clients.get(piece.request_id)
        if client is not None:
            client.put(piece)
        if piece.finished:
            self._clients.pop(piece.request_id, None)

    def _look_at_the_clock(self) -> None:
        """Note which requests have started, and end those that are late."""
        now = time.monotonic()
        for name, client in list(self._clients.items()):
            if client in self._waiting and not self._engine.is_waiting(name):
                self._waiting.discard(client)
            if now >= client.deadline:
                self._end(client, RequestTimeoutError("The request took too long."))
            elif now >= client.start_deadline and client in self._waiting:
                self._end(client, QueueTimeoutError("The request waited for too long."))

    def _end(self, client: _Client, error: Exception) -> None:
        self._abort(client)
        client.put(error)

    def _end_all(self, error: Exception) -> None:
        for client in list(self._clients.values()):
            self._end(client, error)
