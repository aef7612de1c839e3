"""What the engine gives back: `RequestOutput` with one `CompletionOutput` for each answer. Field names are vLLM's."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Logprob:
    """How likely the model found a token.

    Fields:
        logprob: Log-probability, from the model's own logits.
        rank: 1 for the most likely token.
        decoded_token: The token as text; None if the engine has no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


# The token that was said or is in the prompt, and the most likely ones, by id.
LogprobsOfToken = dict[int, Logprob]


@dataclasses.dataclass
class CompletionOutput:
    """One answer to a prompt.

    Fields:
        index: Number of the answer, from 0 to n - 1.
        text: The answer's text, without the end-of-sequence or stop token; empty if the engine has no tokenizer.
        token_ids: The answer's tokens, with the one that ended it.
        finish_reason: "stop" (an end-of-sequence or stop token, or a stop text), "length" (max_tokens or
            max_model_len), "abort", "error" (a JSON schema's grammar became too complex), or None while it runs.
        stop_reason: The id of the stop token or the stop text that ended it; None for an end-of-sequence id.
        logprobs: For each token, its log-probability and those of the most likely tokens; None if not asked for.
        cumulative_logprob: Sum of the log-probabilities of `token_ids`; None if not asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[LogprobsOfToken] | None = None
    cumulative_logprob: float | None = None


@dataclasses.dataclass
class RequestMetrics:
    """When a request got how far, in seconds of `time.monotonic()`; None for what has not happened.

    Fields:
        arrival_time: The engine took the request.
        first_scheduled_time: The first step with the request was launched.
        first_token_time: Its first token arrived.
        finished_time: Its last token arrived.
        num_preemptions: How often it lost its pages and was computed again.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclasses.dataclass
class RequestOutput:
    """The answers to one prompt, whole (`generate`) or what is new since the last output (`stream`).

    Fields:
        request_id: The request's name.
        prompt: Its text, or None if it was given as token ids.
        prompt_token_ids: Its tokens.
        outputs: The answers.
        finished: Whether every answer is complete.
        num_cached_tokens: Prompt tokens that were found in the prefix cache.
        metrics: Times of the request.
        prompt_logprobs: For each prompt token, as in `CompletionOutput.logprobs`; None for the first, which nothing
            predicts, and as a whole if not asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: list[LogprobsOfToken | None] | None = None
