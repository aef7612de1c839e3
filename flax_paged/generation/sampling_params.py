"""`SamplingParams`: how one request is sampled and when it stops."""

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

# Below this temperature the division would overflow float32; it is greedy sampling in all but name.
GREEDY_BELOW = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it stops. Names and meanings are vLLM's.

    Logits pass, in this order: temperature, min-p, top-k, top-p; then one token is drawn. Tokens that tie with the last
    one kept are kept too.

    Args:
        temperature: Logits are divided by it. 0 (or below 1e-5) is greedy: the most likely token, the lowest id of a
            tie.
        top_p: Keep the smallest set of most likely tokens whose probabilities sum to at least this; in (0, 1].
        top_k: Keep this many most likely tokens; 0 or -1 keeps all.
        min_p: Keep tokens at least this likely relative to the most likely one; in [0, 1].
        seed: Makes the request reproducible: its tokens then depend on the seed, the prompt and the weights, and not
            on the batch it runs in. Two requests with one seed draw the same random numbers, so equal prompts give
            equal answers. None draws a fresh seed for every request.
        max_tokens: Most tokens to generate, at least 1; None for as many as fit `max_model_len`.
        stop_token_ids: Token ids that end the answer, beside the end-of-sequence ids. The id itself is part of
            `token_ids`, and not of the text.
        ignore_eos: Go on past end-of-sequence ids.
        skip_special_tokens: Leave special tokens out of the text.
        n: Answers to the prompt. Not available yet; must be 1.
        presence_penalty: Not available yet; must be 0.
        frequency_penalty: Not available yet; must be 0.
        repetition_penalty: Not available yet; must be 1.
        stop: Not available yet; must be empty.
        bad_words: Not available yet; must be empty.
        min_tokens: Not available yet; must be 0.
        logprobs: Not available yet; must be None.
        prompt_logprobs: Not available yet; must be None.
        logit_bias: Not available yet; must be None.
        allowed_token_ids: Not available yet; must be None.
        include_stop_str_in_output: Not available yet; must be False.

    Raises:
        ValueError: A value is out of its range.
        TypeError: A value has the wrong type.
        NotImplementedError: A field is set that is not available yet.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | Sequence[str] = ()
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False

    def __post_init__(self):
        self._check_numbers()
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids or ()))
        for name, off in _NOT_AVAILABLE_YET.items():
            value = getattr(self, name)
            if value != off and not (off == () and not value):
                raise NotImplementedError(f"SamplingParams({name}={value!r}) is not available yet; leave it {off!r}.")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without drawing."""
        return self.temperature < GREEDY_BELOW

    def _check_numbers(self) -> None:
        self._check_range("temperature", self.temperature, 0.0, math.inf, "0 (greedy) or more")
        self._check_range("min_p", self.min_p, 0.0, 1.0, "a probability in [0, 1]")
        self._check_range("top_p", self.top_p, 0.0, 1.0, "a probability in (0, 1]; 1 turns it off")
        if self.top_p == 0:
            raise ValueError("SamplingParams(top_p=0): expected a probability in (0, 1]; 1 turns it off.")
        self._check_integer("top_k", self.top_k, -1, "0 or -1 (all tokens), or a positive count")
        if self.max_tokens is not None:
            self._check_integer("max_tokens", self.max_tokens, 1, "at least 1, or None for as many as fit")
        if self.seed is not None:
            self._check_integer("seed", self.seed, -(2**63), "a 64-bit integer, or None")
            if self.seed >= 2**64:
                raise ValueError(f"SamplingParams(seed={self.seed}): expected a 64-bit integer, or None.")

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


# Fields of later versions, with the value that means "off".
_NOT_AVAILABLE_YET: Mapping[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop": (),
    "bad_words": (),
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "include_stop_str_in_output": False,
}


def _token_ids(name: str, values: Sequence[int]) -> tuple[int, ...]:
    if isinstance(values, str) or not all(isinstance(v, numbers.Integral) for v in values):
        raise TypeError(f"SamplingParams({name}={values!r}): expected a list of token ids.")
    return tuple(int(v) for v in values)
