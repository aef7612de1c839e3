"""`SamplingParams`: how one request is sampled and when it stops."""

import dataclasses
import functools
import json
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

# Below this temperature the division would overflow float32; it is greedy sampling in all but name.
GREEDY_BELOW = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it stops. Names and meanings are vLLM's.

    Logits pass, in this order: allowed tokens, bad words, min_tokens and logit bias; the JSON schema; repetition,
    frequency and presence penalty; temperature; min-p, top-k, top-p; then one token is drawn. Tokens that tie with the
    last one kept are kept too.

    Args:
        n: Answers to the prompt; they share its pages.
        temperature: Logits are divided by it. 0 (or below 1e-5) is greedy: the most likely token, the lowest id of a
            tie.
        top_p: Keep the smallest set of most likely tokens whose probabilities sum to at least this; in (0, 1].
        top_k: Keep this many most likely tokens; 0 or -1 keeps all.
        min_p: Keep tokens at least this likely relative to the most likely one; in [0, 1].
        repetition_penalty: Positive logits of tokens in prompt or answer are divided by it, negative ones multiplied;
            above 0, 1 is off.
        frequency_penalty: Subtracted from a token's logit for each time it is in the answer; in [-2, 2].
        presence_penalty: Subtracted from the logits of tokens in the answer; in [-2, 2].
        seed: Makes the request reproducible: its tokens then depend on the seed, the prompt and the weights, and not
            on the batch it runs in. Two requests with one seed draw the same random numbers, so equal prompts give
            equal answers; answer i of `n` uses seed + i. None draws a fresh seed for every request.
        max_tokens: Most tokens to generate, at least 1; None for as many as fit `max_model_len`.
        min_tokens: No end-of-sequence or stop token before this many.
        stop: Text, or texts, that end the answer. The answer's text ends just before.
        include_stop_str_in_output: Keep the stop text, or the text of the stop token, at the end of the answer's text.
        stop_token_ids: Token ids that end the answer, beside the end-of-sequence ids. The id itself is part of
            `token_ids`, and not of the text.
        ignore_eos: Go on past end-of-sequence ids.
        bad_words: Texts that must not appear in the answer: the last token of each, with and without a space before
            it, is banned where the tokens before it have been said.
        logit_bias: Token id -> what is added to its logit.
        allowed_token_ids: The only tokens that may be said.
        json_schema: The answer is JSON of this schema (a mapping, or JSON); {"type": "object"} is any object. Only
            `max_tokens` or a stop of your own can cut it short; and where other rules leave no token that the schema
            allows, they give way. Needs the package llguidance; see docs/generation.md.
        logprobs: Report the log-probability of each token said, and of this many most likely ones.
        prompt_logprobs: Report the log-probability of each prompt token, and of this many most likely ones. Such a
            prompt is computed in full, whatever the prefix cache holds.
        skip_special_tokens: Leave special tokens out of the text.
        adapter_id: Which of the model's stacked LoRA adapters answers, from 1; 0 is the model alone.

    Raises:
        ValueError: A value is out of its range.
        TypeError: A value has the wrong type.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    bad_words: Sequence[str] = ()
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    json_schema: Mapping[str, Any] | str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    adapter_id: int = 0

    def __post_init__(self):
        self._check_numbers()
        self._check_collections()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without drawing."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty depends on the tokens before."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    def _check_numbers(self) -> None:
        self._check_range("temperature", self.temperature, 0.0, math.inf, "0 (greedy) or more")
        self._check_range("min_p", self.min_p, 0.0, 1.0, "a probability in [0, 1]")
        self._check_range("top_p", self.top_p, 0.0, 1.0, "a probability in (0, 1]; 1 turns it off")
        if self.top_p == 0:
            raise ValueError("SamplingParams(top_p=0): expected a probability in (0, 1]; 1 turns it off.")
        self._check_range("repetition_penalty", self.repetition_penalty, 0.0, math.inf, "above 0; 1 turns it off")
        if self.repetition_penalty == 0:
            raise ValueError("SamplingParams(repetition_penalty=0): expected above 0; 1 turns it off.")
        self._check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "a number in [-2, 2]")
        self._check_range("presence_penalty", self.presence_penalty, -2.0, 2.0, "a number in [-2, 2]")
        self._check_integer("n", self.n, 1, "at least 1")
        if self.n > 1 and self.is_greedy:
            raise ValueError(
                f"SamplingParams(n={self.n}, temperature={self.temperature}): greedy answers are all equal."
            )
        self._check_integer("min_tokens", self.min_tokens, 0, "0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"SamplingParams(min_tokens={self.min_tokens}, max_tokens={self.max_tokens}): expected min_tokens to be"
                " at most max_tokens."
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_integer(name, getattr(self, name), 0, "0 or more, or None")
        self._check_integer("top_k", self.top_k, -1, "0 or -1 (all tokens), or a positive count")
        self._check_integer("adapter_id", self.adapter_id, 0, "0 for the model alone, or an adapter's number")
        if self.max_tokens is not None:
            self._check_integer("max_tokens", self.max_tokens, 1, "at least 1, or None for as many as fit")
        if self.seed is not None:
            self._check_integer("seed", self.seed, -(2**63), "a 64-bit integer, or None")
            if self.seed >= 2**64:
                raise ValueError(f"SamplingParams(seed={self.seed}): expected a 64-bit integer, or None.")

    def _check_collections(self) -> None:
        """Check the fields that are not numbers, and bring each into one form."""
        set_field = functools.partial(object.__setattr__, self)
        set_field("stop", _texts("stop", self.stop))
        set_field("bad_words", _texts("bad_words", self.bad_words))
        set_field("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids or ()))
        if self.allowed_token_ids is not None:
            set_field("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ValueError("SamplingParams(allowed_token_ids=[]): expected at least one id, or None for all.")
        if self.json_schema is not None:
            set_field("json_schema", _json_of_schema(self.json_schema))
            if self.ignore_eos:
                raise ValueError("SamplingParams(json_schema=..., ignore_eos=True): expected one; JSON has an end.")
        if self.logit_bias is not None:
            _token_ids("logit_bias", list(self.logit_bias))
            set_field("logit_bias", {int(token): float(value) for token, value in self.logit_bias.items()})
            for value in self.logit_bias.values():
                if math.isnan(value) or value == math.inf:
                    raise ValueError(f"SamplingParams(logit_bias=... {value}): expected numbers below infinity.")

    def _check_range(self, name: str, value: Any, low: float, high: float, expected: str) -> None:
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise TypeError(f"SamplingParams({name}={value!r}): expected a number, {expected}.")
        if not low <= value <= high or math.isinf(value):
            raise ValueError(f"SamplingParams({name}={value}): expected {expected}.")

    def _check_integer(self, name: str, value: Any, low: int, expected: str) -> None:
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise TypeError(f"SamplingParams({name}={value!r}): expected an integer, {expected}.")
        if value < low:
            raise ValueError(f"SamplingParams({name}={value}): expected {expected}.")


def _token_ids(name: str, values: Sequence[int]) -> tuple[int, ...]:
    if isinstance(values, str) or not all(isinstance(v, numbers.Integral) for v in values):
        raise TypeError(f"SamplingParams({name}={values!r}): expected token ids.")
    if any(v < 0 for v in values):
        raise ValueError(f"SamplingParams({name}={values!r}): expected token ids, 0 or more.")
    return tuple(int(v) for v in values)


def _json_of_schema(schema: Mapping[str, Any] | str) -> str:
    if not isinstance(schema, Mapping | str):
        raise TypeError(f"SamplingParams(json_schema={schema!r}): expected a mapping, or JSON.")
    try:
        schema = json.loads(schema) if isinstance(schema, str) else dict(schema)
        text = json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"SamplingParams(json_schema=...): expected JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"SamplingParams(json_schema={text[:80]!r}): expected an object.")
    return text


def _texts(name: str, values: str | Sequence[str] | None) -> tuple[str, ...]:
    values = (values,) if isinstance(values, str) else tuple(values or ())
    if not all(isinstance(value, str) for value in values):
        raise TypeError(f"SamplingParams({name}={values!r}): expected texts.")
    if not all(values):
        raise ValueError(f"SamplingParams({name}={values!r}): expected texts that are not empty.")
    return values
