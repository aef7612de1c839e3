"""Answers as OpenAI's responses: names of fields, usage, and server-sent events."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from flax_paged.generation.outputs import Logprob, RequestOutput
from flax_paged.serving.errors import ApiError, internal_error

_LOGGER = logging.getLogger(__name__)

# What an event costs is paid for each token, hence no spaces and one encoder.
_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_DONE = b"data: [DONE]\n\n"


class ClientDisconnectedError(Exception):
    """The client went away; nobody reads what is answered."""


class Usage:
    """Counts the tokens of a call, by prompt and answer."""

    def __init__(self):
        self._prompts: dict[int, tuple[int, int]] = {}
        self._num_answer_tokens = 0

    def add(self, prompt_index: int, piece: RequestOutput) -> None:
        """Count a piece."""
        self._prompts[prompt_index] = (len(piece.prompt_token_ids), piece.num_cached_tokens)
        self._num_answer_tokens += sum(len(output.token_ids) for output in piece.outputs)

    def as_dict(self, *, counts_answers: bool = True) -> dict[str, Any]:
        """Return OpenAI's `usage`."""
        num_prompt_tokens = sum(count for count, _ in self._prompts.values())
        num_answer_tokens = self._num_answer_tokens if counts_answers else 0
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_answer_tokens,
            "total_tokens": num_prompt_tokens + num_answer_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self._prompts.values())},
        }


def envelope(kind: str, call_id: str, model: str) -> dict[str, Any]:
    """Return the fields that every response begins with."""
    return {"id": call_id, "object": kind, "created": int(time.time()), "model": model}


def json_response(body: Mapping[str, Any]) -> Response:
    """Return a response of plain JSON; faster than FastAPI's, which looks at every value."""
    return Response(_ENCODE(body), media_type="application/json")


def finite(logprob: Logprob) -> float:
    """Return a log-probability that JSON can hold: what is impossible is -9999, as OpenAI writes it."""
    return max(logprob.logprob, -9999.0)


def event(body: Mapping[str, Any]) -> bytes:
    """Return a server-sent event."""
    return f"data: {_ENCODE(body)}\n\n".encode()


class EventStream(Response):
    """Streams server-sent events until they end, fail, or the client goes away.

    An error on the way is an event `{"error": ...}`, and the stream still ends with `[DONE]`.

    Args:
        events: The events; closed in any case.
        timeout: Seconds after which the connection is closed even if the client does not read.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], *, timeout: float):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as an ASGI application."""
        await unless_disconnected(receive, self._send(send), timeout=self._timeout)

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for data in self._events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except ApiError as error:
                await send({"type": "http.response.body", "body": _error_event(error), "more_body": True})
            except Exception:
                _LOGGER.exception("A stream failed")
                await send({"type": "http.response.body", "body": _error_event(internal_error()), "more_body": True})
            await send({"type": "http.response.body", "body": _DONE, "more_body": False})


async def unless_disconnected(receive: Receive, work: Coroutine, *, timeout: float | None = None) -> Any:
    """Await work, but cancel it when the client goes away or time is up.

    Raises:
        ClientDisconnectedError: The work was cancelled.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        for future in (task, watch):
            future.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error_event(error: ApiError) -> bytes:
    return f"data: {error.body()}\n\n".encode()
