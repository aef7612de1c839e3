"""POST /v1/completions."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from flax_paged.generation.outputs import CompletionOutput, LogprobsOfToken, RequestOutput
from flax_paged.generation.text import Tokenizer
from flax_paged.serving.answers import respond
from flax_paged.serving.protocol import CompletionRequest
from flax_paged.serving.responses import Usage, envelope, finite
from flax_paged.serving.sampling import completion_params
from flax_paged.serving.service import Service


async def complete(service: Service, body: CompletionRequest, request: Request, call_id: str) -> Response:
    """Answer a call of POST /v1/completions.

    Raises:
        ApiError: The call is refused.
    """
    adapter_id = service.check_model(body.model)
    prompts = _prompts(body)
    params = dataclasses.replace(completion_params(body, service.engine), adapter_id=adapter_id)
    await service.compile_schema(params)
    token_ids = await service.in_thread(_encode, service.tokenizer, prompts, body.add_special_tokens)
    pieces = service.answer(token_ids, params, priority=body.priority, cache_salt=body.cache_salt)
    writer = _Writer(service, body, call_id, prompts)
    includes_usage = body.stream_options is not None and body.stream_options.include_usage
    return await respond(service, request, pieces, writer, streams=bool(body.stream), includes_usage=includes_usage)


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts of a call one by one."""
    prompt = body.prompt
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)


def _encode(tokenizer: Tokenizer, prompts: list[str | list[int]], add_special_tokens: bool) -> list[list[int]]:
    return [tokenizer.encode(p, add_special_tokens) if isinstance(p, str) else p for p in prompts]


class _Writer:
    """Writes completions. See `Writer`."""

    def __init__(self, service: Service, body: CompletionRequest, call_id: str, prompts: list[str | list[int]]):
        self.usage = Usage()
        self._tokenizer = service.tokenizer
        self._body = body
        self._prompts = prompts
        self._n = body.n or 1
        self._is_about_the_prompt = body.max_tokens == 0
        self._envelope = envelope("text_completion", call_id, body.model or service.options.model_name)
        self._num_chars: dict[int, int] = {}  # of the text that each choice has got, in tokens' texts
        self._includes_usage = body.stream_options is not None and body.stream_options.include_usage

    def chunks(self, prompt_index: int, piece: RequestOutput) -> list[dict[str, Any]]:
        choices = (self._choice(prompt_index, piece, output) for output in piece.outputs)
        usage = {"usage": None} if self._includes_usage else {}
        return [
            {**self._envelope, "choices": [choice], **usage}
            for choice in choices
            if choice["text"] or choice["finish_reason"] or choice["logprobs"]
        ]

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._envelope, "choices": [], "usage": self._usage()}

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = []
        for prompt_index, whole in enumerate(outputs):
            if self._body.best_of is not None:
                whole.outputs = _best(whole.outputs, self._n)
            choices += [self._choice(prompt_index, whole, output) for output in whole.outputs]
        return {**self._envelope, "choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        return self.usage.as_dict(counts_answers=not self._is_about_the_prompt)

    def _choice(self, prompt_index: int, piece: RequestOutput, output: CompletionOutput) -> dict[str, Any]:
        """Return a choice, or what is new of it: the first time, with the prompt if it is to be echoed."""
        index = prompt_index * self._n + output.index
        is_first = index not in self._num_chars
        self._num_chars.setdefault(index, 0)
        text, entries = output.text, zip(output.token_ids, output.logprobs or (), strict=False)
        reason = output.finish_reason
        if self._is_about_the_prompt:
            text, entries, reason = "", (), "length"
        entries = list(entries)
        if is_first and self._body.echo:
            text = self._prompt_text(prompt_index) + text
            entries = [*zip(piece.prompt_token_ids, piece.prompt_logprobs or (), strict=False), *entries]
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, entries) if self._body.logprobs is not None and entries else None,
            "finish_reason": reason,
            "stop_reason": output.stop_reason,
        }

    def _prompt_text(self, prompt_index: int) -> str:
        prompt = self._prompts[prompt_index]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, self._body.skip_special_tokens)

    def _logprobs(self, index: int, entries: Iterable[tuple[int, LogprobsOfToken | None]]) -> dict[str, list]:
        """Return OpenAI's four lists; the prompt's first token has no log-probability."""
        found: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, logprobs in entries:
            token = self._tokenizer.decode([token_id], False)
            found["text_offset"].append(self._num_chars[index])
            self._num_chars[index] += len(token)
            found["tokens"].append(token)
            found["token_logprobs"].append(None if logprobs is None else finite(logprobs[token_id]))
            top = None
            if logprobs is not None:
                top = {entry.decoded_token: finite(entry) for entry in logprobs.values()}
            found["top_logprobs"].append(top)
        return found


def _best(outputs: list[CompletionOutput], n: int) -> list[CompletionOutput]:
    """Return the n answers of the highest log-probability a token, the best first."""
    outputs = sorted(outputs, key=lambda o: o.cumulative_logprob / max(len(o.token_ids), 1), reverse=True)[:n]
    for index, output in enumerate(outputs):
        output.index = index
    return outputs
