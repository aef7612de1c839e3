"""What completions and chat share: whole answers from pieces, and the response in one piece or as events."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from flax_paged.generation.outputs import CompletionOutput, RequestOutput
from flax_paged.serving.responses import EventStream, Usage, event, json_response, unless_disconnected
from flax_paged.serving.service import Service

# A stream that has ended may take so much longer, in seconds, to reach a client that reads slowly.
_SECONDS_TO_READ = 10

Pieces = AsyncIterator[tuple[int, RequestOutput]]


class Writer(Protocol):
    """Writes answers in the form of one route. It is told the pieces in their order, or the whole at once."""

    usage: Usage

    def chunks(self, prompt_index: int, piece: RequestOutput) -> list[dict[str, Any]]:
        """Return what a stream says about a piece."""

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream, which has the usage and no choices."""

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the response of a call that is not streamed, given each prompt's whole output."""


async def respond(
    service: Service, request: Request, pieces: Pieces, writer: Writer, *, streams: bool, includes_usage: bool
) -> Response:
    """Answer a call. A stream begins with the first piece, so that a refusal still has its status.

    Raises:
        ApiError: The call ended before there was anything to send.
        ClientDisconnectedError: The client went away; what ran is aborted.
    """
    if not streams:
        outputs = await unless_disconnected(request.receive, _collect(pieces, writer.usage))
        return json_response(writer.whole(outputs))
    first = await unless_disconnected(request.receive, anext(pieces))
    events = _events(first, pieces, writer, includes_usage)
    return EventStream(events, timeout=service.options.request_timeout + _SECONDS_TO_READ)


async def _events(first: tuple[int, RequestOutput], pieces: Pieces, writer: Writer, includes_usage: bool):
    async with contextlib.aclosing(pieces):
        async for prompt_index, piece in _chain(first, pieces):
            writer.usage.add(prompt_index, piece)
            if chunks := writer.chunks(prompt_index, piece):
                yield b"".join(map(event, chunks))
    if includes_usage:
        yield event(writer.usage_chunk())


async def _chain(first: tuple[int, RequestOutput], pieces: Pieces) -> Pieces:
    yield first
    async for item in pieces:
        yield item


async def _collect(pieces: Pieces, usage: Usage) -> list[RequestOutput]:
    """Join the pieces of each prompt, in the prompts' order."""
    wholes: dict[int, RequestOutput] = {}
    answers: dict[int, dict[int, CompletionOutput]] = {}
    async with contextlib.aclosing(pieces):
        async for prompt_index, piece in pieces:
            usage.add(prompt_index, piece)
            wholes[prompt_index] = piece
            known = answers.setdefault(prompt_index, {})
            for output in piece.outputs:
                _join(known.setdefault(output.index, output), output)
    for prompt_index, whole in wholes.items():
        whole.outputs = [answers[prompt_index][index] for index in sorted(answers[prompt_index])]
    return [wholes[index] for index in sorted(wholes)]


def _join(whole: CompletionOutput, piece: CompletionOutput) -> None:
    if whole is piece:
        return
    whole.text += piece.text
    whole.token_ids += piece.token_ids
    whole.finish_reason, whole.stop_reason = piece.finish_reason, piece.stop_reason
    if piece.logprobs is not None:
        whole.logprobs += piece.logprobs
        whole.cumulative_logprob += piece.cumulative_logprob
