"""POST /v1/completions with OpenAI's client against a real server; texts are those of the engine in this process."""

import asyncio

import httpx
import openai
import pytest

from flax_paged import SamplingParams

PROMPT = "Redistribution and use in source"
# Each as OpenAI's client sends it, and as the engine takes it.
OPTIONS = {
    "greedy": ({"temperature": 0}, {}),
    "seed": ({"seed": 7}, {}),
    "top_p": ({"seed": 7, "top_p": 0.5, "temperature": 1.5}, {}),
    "n": ({"seed": 7, "n": 3}, {}),
    "penalties": ({"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 1.0}, {}),
    "logit_bias": ({"temperature": 0, "logit_bias": {"70": 30, "71": -100}}, {"logit_bias": {70: 30.0, 71: -100.0}}),
    "vllm": (
        {
            "seed": 3,
            "extra_body": {
                "top_k": 5,
                "min_p": 0.01,
                "repetition_penalty": 1.3,
                "min_tokens": 4,
                "ignore_eos": True,
                "bad_words": ["the"],
                "stop_token_ids": [100, 101],
                "skip_special_tokens": False,
                "priority": 3,
                "cache_salt": "mine",
            },
        },
        {
            "top_k": 5,
            "min_p": 0.01,
            "repetition_penalty": 1.3,
            "min_tokens": 4,
            "ignore_eos": True,
            "bad_words": ["the"],
            "stop_token_ids": [100, 101],
            "skip_special_tokens": False,
        },
    ),
}


def in_process(engine, prompts, client_options, engine_options, max_tokens=12):
    """The engine's outputs for the same request."""
    same = {name: value for name, value in client_options.items() if name not in ("extra_body", "logit_bias")}
    return engine.generate(prompts, SamplingParams(max_tokens=max_tokens, **{**same, **engine_options}))


@pytest.mark.parametrize("name", OPTIONS)
def test_whole_and_streamed_are_the_engines(client, engine, name):
    options, engine_options = OPTIONS[name]
    outputs = in_process(engine, [PROMPT], options, engine_options)[0].outputs
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, **options)
    assert [choice.text for choice in whole.choices] == [output.text for output in outputs]
    assert [choice.finish_reason for choice in whole.choices] == [output.finish_reason for output in outputs]
    assert whole.object == "text_completion" and whole.id.startswith("cmpl-") and whole.model == "tiny"
    assert whole.usage.completion_tokens == sum(len(output.token_ids) for output in outputs)

    texts, reasons = [""] * len(outputs), [None] * len(outputs)
    usage = None
    for chunk in client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=12, stream=True, stream_options={"include_usage": True}, **options
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
        usage = chunk.usage
    assert texts == [output.text for output in outputs]
    assert reasons == [output.finish_reason for output in outputs]
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens == len(engine.tokenizer.encode(PROMPT))


def test_stop(client, engine):
    text = in_process(engine, [PROMPT], {"temperature": 0}, {}, max_tokens=30)[0].outputs[0].text
    stop = text[10:13]
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stop": [stop, "never said"]}
    choice = client.completions.create(**options).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop" and choice.stop_reason == stop
    assert "".join(c.choices[0].text for c in client.completions.create(stream=True, **options)) == choice.text
    kept = client.completions.create(**options, extra_body={"include_stop_str_in_output": True}).choices[0].text
    assert kept == choice.text + stop


@pytest.mark.parametrize("streams", [False, True])
def test_several_prompts(client, engine, streams):
    token_ids = engine.tokenizer.encode("source and binary forms")
    prompts = [[token_ids, [5, 6, 7]], [PROMPT, "Licence"]]
    for prompt in prompts:
        expected = [
            output.text for one in in_process(engine, prompt, {"seed": 1, "n": 2}, {}) for output in one.outputs
        ]
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, seed=1, n=2, stream=streams)
        texts = [""] * 4
        for chunk in answer if streams else [answer]:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == expected


def test_logprobs_and_echo(client, engine):
    output = in_process(engine, [PROMPT], {"temperature": 0}, {"logprobs": 2, "prompt_logprobs": 2})[0]
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 2, "echo": True}
    choice = client.completions.create(**options).choices[0]
    assert choice.text == PROMPT + output.outputs[0].text
    token_ids = output.prompt_token_ids + output.outputs[0].token_ids
    entries = output.prompt_logprobs + output.outputs[0].logprobs
    logprobs = choice.logprobs
    assert logprobs.tokens == [engine.tokenizer.decode([token_id], False) for token_id in token_ids]
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    expected = [entry[token_id].logprob for token_id, entry in zip(token_ids[1:], entries[1:], strict=True)]
    assert logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert all(max(top.values()) >= said - 1e-4 for top, said in zip(logprobs.top_logprobs[1:], expected, strict=True))
    assert PROMPT[logprobs.text_offset[2] :].startswith(logprobs.tokens[2])

    chunks = [chunk.choices[0] for chunk in client.completions.create(stream=True, **options)]
    assert "".join(chunk.text for chunk in chunks) == choice.text
    for name in ("tokens", "token_logprobs", "text_offset"):
        streamed = [item for chunk in chunks if chunk.logprobs for item in getattr(chunk.logprobs, name)]
        assert streamed == pytest.approx(getattr(logprobs, name), abs=1e-4) if name != "tokens" else logprobs.tokens


def test_the_prompt_alone(client):
    """What evaluation harnesses ask: how likely is this text?"""
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == PROMPT and answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.prompt_tokens
    assert answer.usage.completion_tokens == 0


def test_best_of(client, engine):
    outputs = in_process(engine, [PROMPT], {"seed": 5, "n": 4}, {"logprobs": 0})[0].outputs
    ranked = sorted(outputs, key=lambda output: -output.cumulative_logprob / len(output.token_ids))
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, seed=5, n=2, best_of=4)
    assert [choice.text for choice in answer.choices] == [output.text for output in ranked[:2]]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].logprobs is None


def test_async_client(server, engine):
    prompts = [f"{PROMPT} {i}" for i in range(8)]

    async def ask(client, prompt, streams):
        answer = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=12, temperature=0, stream=streams
        )
        return "".join([c.choices[0].text async for c in answer]) if streams else answer.choices[0].text

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt, i % 2 == 0) for i, prompt in enumerate(prompts)))

    expected = [output.outputs[0].text for output in in_process(engine, prompts, {"temperature": 0}, {})]
    assert asyncio.run(main()) == expected


def test_a_vanished_client_frees_its_pages(client, server):
    before = server.wait_until_idle()
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    for _ in range(3):
        with client.completions.create(stream=True, n=2, **options) as stream:
            next(iter(stream))
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(n=4, timeout=0.05, **options)
    after = server.wait_until_idle()
    name = 'flax_paged_answers_total{finish_reason="disconnect"}'
    assert after.get(name, 0) > before.get(name, 0)
    total = ("flax_paged_free_pages", "flax_paged_cached_pages")
    assert sum(after[n] for n in total) == sum(before[n] for n in total) == 64


def test_models_and_tokens(client, server, engine):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 256
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")
    text = "naïve 🙂"
    answer = httpx.post(f"{server.url}/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == engine.tokenizer.encode(text) and answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 256 and len(answer["token_strs"]) == answer["count"]
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "Hi"}]
    answer = httpx.post(f"{server.url}/tokenize", json={"messages": messages}).json()
    assert answer["tokens"] == engine.tokenizer.apply_chat_template(messages)
