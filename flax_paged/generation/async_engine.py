"""`AsyncEngine`: the engine behind asyncio, its steps on a thread of their own."""

import asyncio
import dataclasses
import functools
import queue
import threading
from collections.abc import AsyncIterator, Callable

from flax_paged.generation.engine import Engine, Prompt
from flax_paged.generation.outputs import RequestOutput
from flax_paged.generation.sampling_params import SamplingParams


@dataclasses.dataclass(eq=False)
class _Client:
    """A coroutine that waits for a request's pieces."""

    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue
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
        self._lock = threading.Lock()  # of the next two, and of the order in which commands enter
        self._is_closed = False
        self._is_running = True
        self._thread = threading.Thread(target=self._run, name="flax_paged engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *exc) -> None:
        await asyncio.to_thread(self.close)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a prompt piece by piece, as `Engine.stream` does.

        Args:
            prompt: A text or a list of token ids.
            sampling_params: None for the defaults.
            request_id: Its name; None for a number.
            priority: Requests of a lower value go first.
            cache_salt: Only requests of the same salt share cached prefixes.

        Yields:
            RequestOutput with what is new; the last has `finished` set.

        Raises:
            ValueError: The request cannot be run.
            RuntimeError: The engine is closed.
            Exception: What a failed step raised; every request that was running gets it.
        """
        client = _Client(asyncio.get_running_loop(), asyncio.Queue())
        options = {"request_id": request_id, "priority": priority, "cache_salt": cache_salt}
        if not self._submit(functools.partial(self._add, client, prompt, sampling_params, options)):
            raise RuntimeError("This AsyncEngine is closed.")
        try:
            while True:
                piece = await client.pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.finished:
                    return
        finally:
            self._submit(functools.partial(self._abort, client))

    def close(self) -> None:
        """Stop after the running step; requests that are left end with a RuntimeError."""
        self._submit(self._stop)
        with self._lock:
            self._is_closed = True
        self._thread.join()

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
        self._end_all(RuntimeError("The AsyncEngine was closed."))

    def _deliver(self, piece: RequestOutput) -> None:
        client = self._clients.get(piece.request_id)
        if client is not None:
            client.put(piece)
        if piece.finished:
            self._clients.pop(piece.request_id, None)

    def _end_all(self, error: Exception) -> None:
        for name, client in self._clients.items():
            self._engine.abort(name)
            client.put(error)
        self._clients.clear()
