"""POST /v1/chat/completions."""

import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from flax_paged.generation.outputs import CompletionOutput, Logprob, LogprobsOfToken, RequestOutput
from flax_paged.serving.answers import respond
from flax_paged.serving.protocol import ChatMessage, ChatRequest
from flax_paged.serving.responses import Usage, envelope, finite
from flax_paged.serving.sampling import chat_params
from flax_paged.serving.service import Service


async def chat(service: Service, body: ChatRequest, request: Request, call_id: str) -> Response:
    """Answer a call of POST /v1/chat/completions.

    Raises:
        ApiError: The call is refused.
    """
    adapter_id = service.check_model(body.model)
    params = dataclasses.replace(chat_params(body, service.engine), adapter_id=adapter_id)
    await service.compile_schema(params)
    prompt = await encode_chat(service, body.messages, body.add_generation_prompt, body.chat_template_kwargs)
    pieces = service.answer([prompt], params, priority=body.priority, cache_salt=body.cache_salt)
    writer = _Writer(service, body, call_id)
    includes_usage = body.stream_options is not None and body.stream_options.include_usage
    return await respond(service, request, pieces, writer, streams=bool(body.stream), includes_usage=includes_usage)


async def encode_chat(
    service: Service, messages: list[ChatMessage], add_generation_prompt: bool, variables: dict[str, Any] | None
) -> list[int]:
    """Return a conversation as the token ids that the model was trained on.

    Raises:
        ApiError: The chat template refuses it (400).
    """
    own = {"messages", "add_generation_prompt", "tokenize", "chat_template"}  # arguments, which variables are not
    variables = {name: value for name, value in (variables or {}).items() if name not in own}
    conversation = [message.for_template() for message in messages]
    return await service.in_thread(
        service.tokenizer.apply_chat_template, conversation, add_generation_prompt, **variables
    )


class _Writer:
    """Writes a chat's answers. See `Writer`."""

    def __init__(self, service: Service, body: ChatRequest, call_id: str):
        self.usage = Usage()
        self._tokenizer = service.tokenizer
        self._num_top = (body.top_logprobs or 0) if body.logprobs else None
        model = body.model or service.options.model_name
        self._chunk = envelope("chat.completion.chunk", call_id, model)
        self._whole = envelope("chat.completion", call_id, model)
        self._begun: set[int] = set()
        self._includes_usage = body.stream_options is not None and body.stream_options.include_usage

    def chunks(self, prompt_index: int, piece: RequestOutput) -> list[dict[str, Any]]:
        chunks = []
        for output in piece.outputs:
            if output.index not in self._begun:
                self._begun.add(output.index)
                chunks.append(self._chunk_of(output.index, {"role": "assistant", "content": ""}))
            logprobs = self._logprobs(output)
            if output.text or output.finish_reason or logprobs:
                delta = {"content": output.text} if output.text else {}
                chunks.append(self._chunk_of(output.index, delta, logprobs, output))
        return chunks

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._chunk, "choices": [], "usage": self.usage.as_dict()}

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = [
            {
                "index": output.index,
                "message": {"role": "assistant", "content": output.text, "refusal": None},
                "logprobs": self._logprobs(output),
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
            }
            for output in outputs[0].outputs
        ]
        return {**self._whole, "choices": choices, "usage": self.usage.as_dict()}

    def _chunk_of(
        self, index: int, delta: dict[str, str], logprobs: dict | None = None, output: CompletionOutput | None = None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": output and output.finish_reason,
        }
        if output is not None and output.stop_reason is not None:
            choice["stop_reason"] = output.stop_reason
        usage = {"usage": None} if self._includes_usage else {}
        return {**self._chunk, "choices": [choice], **usage}

    def _logprobs(self, output: CompletionOutput) -> dict[str, list] | None:
        if self._num_top is None or not output.logprobs:
            return None
        entries = zip(output.token_ids, output.logprobs, strict=True)
        return {"content": [self._token_logprobs(token_id, logprobs) for token_id, logprobs in entries]}

    def _token_logprobs(self, token_id: int, logprobs: LogprobsOfToken) -> dict[str, Any]:
        ranked = sorted(logprobs.items(), key=lambda item: item[1].rank)
        top = [self._entry(index, logprob) for index, logprob in ranked[: self._num_top]]
        return {**self._entry(token_id, logprobs[token_id]), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        text = logprob.decoded_token or ""
        return {"token": text, "logprob": finite(logprob), "bytes": list(self._bytes(token_id, text))}

    def _bytes(self, token_id: int, text: str) -> bytes:
        # A part of a character has bytes, but no text of its own.
        own = self._tokenizer.token_bytes(token_id)
        return text.encode() if own is None else own
