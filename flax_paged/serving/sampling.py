"""From a request's fields to the engine's `SamplingParams`."""

from flax_paged.generation.engine import Engine
from flax_paged.generation.sampling_params import SamplingParams
from flax_paged.serving.errors import ApiError
from flax_paged.serving.protocol import ChatRequest, CompletionRequest, SamplingFields

_DEFAULT_MAX_TOKENS = 16  # of OpenAI's completions; a chat's answer may be as long as the context


def completion_params(body: CompletionRequest, engine: Engine) -> SamplingParams:
    """Return the parameters of a completion.

    `max_tokens=0`, which asks about the prompt alone, samples one token, for the caller to drop. `best_of` answers are
    sampled with their log-probabilities, to choose by.

    Raises:
        ApiError: The engine cannot do what is asked (400).
    """
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompt_logprobs = body.logprobs if body.echo else None
    logprobs = body.logprobs
    if logprobs is None and body.best_of is not None:
        logprobs = 0
    return _params(
        body,
        engine,
        n=body.best_of or body.n or 1,
        max_tokens=max(max_tokens, 1),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def chat_params(body: ChatRequest, engine: Engine) -> SamplingParams:
    """Return the parameters of a chat's answer.

    Raises:
        ApiError: The engine cannot do what is asked (400).
    """
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _params(body, engine, n=body.n or 1, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=None)


def _params(body: SamplingFields, engine: Engine, **fields) -> SamplingParams:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    try:
        return SamplingParams(
            **given,
            **fields,
            seed=body.seed,
            stop=body.stop or (),
            logit_bias=_logit_bias(body.logit_bias, engine),
            min_tokens=body.min_tokens,
            stop_token_ids=body.stop_token_ids or (),
            include_stop_str_in_output=body.include_stop_str_in_output,
            ignore_eos=body.ignore_eos,
            skip_special_tokens=body.skip_special_tokens,
            bad_words=body.bad_words or (),
            allowed_token_ids=body.allowed_token_ids,
            json_schema=body.response_format and body.response_format.schema_of_answer(),
        )
    except (ValueError, TypeError) as error:
        raise ApiError(400, str(error)) from None


def _logit_bias(bias: dict[str, float] | None, engine: Engine) -> dict[int, float] | None:
    """Return the biases by token id; JSON has texts for keys."""
    if not bias:
        return None
    if not all(key.isascii() and key.isdigit() and int(key[:20]) < engine.vocab_size for key in bias):
        raise ApiError(400, f"logit_bias: expected token ids below {engine.vocab_size} as keys.", param="logit_bias")
    return {int(key): value for key, value in bias.items()}
