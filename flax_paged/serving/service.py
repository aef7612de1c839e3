"""`Service`: the model behind the routes. It admits calls, turns text into tokens, and asks the engine."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flax_paged.generation.async_engine import (
    AsyncEngine,
    EngineClosedError,
    QueueTimeoutError,
    RequestTimeoutError,
)
from flax_paged.generation.engine import Engine
from flax_paged.generation.outputs import RequestOutput
from flax_paged.generation.sampling_params import SamplingParams
from flax_paged.generation.text import Tokenizer
from flax_paged.serving.errors import ApiError, internal_error
from flax_paged.serving.metrics import Metrics
from flax_paged.serving.options import ServerOptions

_LOGGER = logging.getLogger(__name__)


class Service:
    """Admits calls and answers them with the engine, once there is one.

    Args:
        options: What is allowed.

    Attributes:
        status: Why calls are refused now; None when the model is ready.
        metrics: The server's numbers.
    """

    def __init__(self, options: ServerOptions):
        self.options = options
        self.status: str | None = "The model is being loaded."
        self.metrics = Metrics(lambda: self._engine and self._engine.engine.stats())
        self._engine: AsyncEngine | None = None
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")  # long texts must not hold up the event loop

    def start(self, engine: Engine) -> None:
        """Serve an engine, which is warm."""
        if engine.tokenizer is None:
            raise ValueError("The server needs an engine with a tokenizer.")
        self._engine = AsyncEngine(engine)
        self.status = None

    def refuse(self, status: str) -> None:
        """Refuse new calls from now on; running ones go on."""
        self.status = status

    def close(self, timeout: float | None = None) -> None:
        """End every call that runs, and wait for the engine's running step, for so many seconds at most."""
        if self._engine is not None:
            self._engine.close(timeout)

    @property
    def engine(self) -> Engine:
        """The engine: its constants.

        Raises:
            ApiError: It is not ready (503).
        """
        if self.status is None and not self._engine.is_running:
            self.status = "The engine has stopped."
        if self.status is not None:
            raise ApiError(503, self.status, headers={"Retry-After": "5"})
        return self._engine.engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def check_model(self, name: str | None) -> int:
        """Return the adapter that answers to a model's name, 0 for none; refuse a name that is not served (404)."""
        names = (self.options.model_name, *self.options.adapter_names)
        if name is not None and name not in names:
            raise ApiError(404, f"The model `{name}` does not exist.", param="model", code="model_not_found")
        return 0 if name is None else names.index(name)

    async def in_thread(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call something of the tokenizer without holding up the event loop; its ValueError is the client's fault."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, lambda: function(*args, **kwargs))
        except (ValueError, TypeError, OverflowError) as error:
            raise ApiError(400, str(error)) from None

    async def compile_schema(self, params: SamplingParams) -> None:
        """Compile a call's JSON schema, if it has one, before the engine's steps would have to wait for it.

        Raises:
            ApiError: The schema cannot be followed (400).
        """
        if params.json_schema is not None:
            try:
                await self.in_thread(self.engine.compile_json_schema, params.json_schema)
            except ApiError as error:
                error.param = "response_format"
                raise

    def answer(
        self, prompts: Sequence[list[int]], params: SamplingParams, *, priority: int = 0, cache_salt: str | None = None
    ) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Answer prompts, after checking that there is room for them.

        Args:
            prompts: Token ids of each.
            params: For all of them.
            priority: Lower goes first.
            cache_salt: Only calls of the same salt share cached prefixes.

        Returns:
            What is new, piece by piece, with the number of its prompt. Errors on the way are ApiErrors. Closing it
            aborts what runs.

        Raises:
            ApiError: The call is refused (400 or 429).
        """
        engine = self.engine
        self._check_limits(engine, prompts, params)
        deadline = time.monotonic() + self.options.request_timeout
        streams = [
            self._answer_one(index, prompt, params, deadline, priority=priority, cache_salt=cache_salt)
            for index, prompt in enumerate(prompts)
        ]
        return streams[0] if len(streams) == 1 else _merge(streams)

    def _check_limits(self, engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        limit = self.options.max_num_answers
        if len(prompts) * params.n > limit:
            raise ApiError(400, f"{len(prompts)} prompts times {params.n} answers are more than {limit} a call.")
        for prompt in prompts:
            if not prompt:
                raise ApiError(400, "The prompt has no tokens; expected at least one.", param="prompt")
            num_wanted = len(prompt) + (params.max_tokens or 1)
            if num_wanted > engine.max_model_len:
                raise ApiError(
                    400,
                    f"This model's maximum context length is {engine.max_model_len} tokens. However, you requested"
                    f" {num_wanted} tokens ({len(prompt)} in the prompt, {params.max_tokens or 'at least 1'} in the"
                    " answer). Please reduce the length of the prompt or max_tokens.",
                    code="context_length_exceeded",
                )
        if self._engine.num_waiting + len(prompts) > self.options.max_num_waiting:
            raise ApiError(
                429,
                f"{self._engine.num_waiting} prompts are waiting already, of at most {self.options.max_num_waiting};"
                " try again later.",
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )

    async def _answer_one(
        self, index: int, prompt: list[int], params: SamplingParams, deadline: float, **options: Any
    ) -> AsyncIterator[tuple[int, RequestOutput]]:
        num_tokens, reasons = [0] * params.n, [""] * params.n
        pieces = self._engine.generate(
            prompt,
            params,
            queue_timeout=self.options.queue_timeout,
            timeout=max(deadline - time.monotonic(), 0.0),
            **options,
        )
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    for output in piece.outputs:
                        num_tokens[output.index] += len(output.token_ids)
                        reasons[output.index] = output.finish_reason
                        if output.finish_reason == "error":
                            raise ValueError("response_format: the schema became too complex to follow to the end.")
                    if piece.finished:
                        self.metrics.count_prompt(len(prompt), num_tokens, reasons, piece.metrics)
                    yield index, piece
        except (asyncio.CancelledError, GeneratorExit):
            if not all(reasons):
                self.metrics.count_unfinished("disconnect")
            raise
        except Exception as error:
            refusal = self._refusal_of(error)
            self.metrics.count_unfinished(f"error {refusal.status}")
            raise refusal from error

    def _refusal_of(self, error: Exception) -> ApiError:
        """Return what the client is told about an exception of the engine's."""
        match error:
            case QueueTimeoutError():
                seconds = self.options.queue_timeout
                message = f"The request waited {seconds:g} s without getting a turn; try again later."
                return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "5"})
            case RequestTimeoutError():
                message = f"The answer was not finished within {self.options.request_timeout:g} s."
                return ApiError(504, message, code="timeout")
            case EngineClosedError():
                return ApiError(503, "The server is shutting down.", headers={"Retry-After": "5"})
            case ValueError():
                return ApiError(400, str(error))
            case _:
                _LOGGER.error("A step of the engine failed", exc_info=error)
                return internal_error()


async def _merge(streams: list[AsyncIterator]) -> AsyncIterator:
    """Yield from all streams as items come. An error of one ends all."""
    items: asyncio.Queue = asyncio.Queue()
    done = object()

    async def forward(stream: AsyncIterator) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    items.put_nowait(item)
            items.put_nowait(done)
        except Exception as error:
            items.put_nowait(error)

    tasks = [asyncio.create_task(forward(stream)) for stream in streams]
    try:
        num_left = len(tasks)
        while num_left:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is done:
                num_left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
