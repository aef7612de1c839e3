"""POST /v1/chat/completions with OpenAI's client against a real server."""

import asyncio

import openai
import pytest

from flax_paged import SamplingParams

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "a page?"}]},
]
PLAIN = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a page?"}]


@pytest.fixture
def prompt(engine):
    return engine.tokenizer.apply_chat_template(PLAIN)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0, "max_tokens": 12},
        {"seed": 5, "n": 2, "max_completion_tokens": 12},
        {"seed": 5, "max_tokens": 12, "user": "me", "metadata": {"a": "b"}, "response_format": {"type": "text"}},
    ],
)
def test_whole_and_streamed_are_the_engines(client, engine, prompt, options):
    names = ("temperature", "seed", "n")
    params = SamplingParams(max_tokens=12, **{name: options[name] for name in names if name in options})
    outputs = engine.generate([prompt], params)[0].outputs
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, **options)
    assert [choice.message.content for choice in whole.choices] == [output.text for output in outputs]
    assert whole.choices[0].message.role == "assistant" and whole.object == "chat.completion"
    assert whole.usage.prompt_tokens == len(prompt)

    texts, roles, reasons = ([None] * len(outputs) for _ in range(3))
    for chunk in client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **options
    ):
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            texts[choice.index] = (texts[choice.index] or "") + (choice.delta.content or "")
            roles[choice.index] = roles[choice.index] or choice.delta.role
            reasons[choice.index] = choice.finish_reason
    assert texts == [output.text for output in outputs]
    assert roles == ["assistant"] * len(outputs)
    assert reasons == [output.finish_reason for output in outputs]
    assert chunk.usage == whole.usage or chunk.usage.total_tokens == whole.usage.total_tokens


@pytest.mark.parametrize("streams", [False, True])
def test_logprobs(client, engine, prompt, streams):
    output = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=12, logprobs=3))[0].outputs[0]
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3, stream=streams
    )
    chunks = list(answer) if streams else [answer]
    tokens = [token for c in chunks if c.choices[0].logprobs for token in c.choices[0].logprobs.content]
    expected = [entry[token_id] for token_id, entry in zip(output.token_ids, output.logprobs, strict=True)]
    assert [token.token for token in tokens] == [entry.decoded_token for entry in expected]
    assert [token.logprob for token in tokens] == pytest.approx([entry.logprob for entry in expected], abs=1e-4)
    assert [len(token.top_logprobs) for token in tokens] == [3] * len(tokens)
    assert all(token.top_logprobs[0].logprob == token.logprob for token in tokens)  # greedy
    # The bytes joined are the text, also where a character is of several tokens.
    said = b"".join(bytes(token.bytes) for token in tokens).decode(errors="replace")
    assert said.startswith(output.text)


def test_max_tokens_is_what_fits(client, prompt):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 256 and answer.choices[0].finish_reason == "length"


def test_an_answer_can_be_sent_back(client, engine):
    first = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=5)
    message = first.choices[0].message
    messages = [*PLAIN, {"role": "assistant", "content": message.content}, {"role": "user", "content": "And?"}]
    second = client.chat.completions.create(
        model="tiny", messages=[*PLAIN, message, messages[-1]], temperature=0, max_tokens=5
    )
    assert second.usage.prompt_tokens == len(engine.tokenizer.apply_chat_template(messages))


def test_async_stream_helper(server):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            options = {"model": "tiny", "messages": MESSAGES, "seed": 1, "max_tokens": 12}
            async with client.chat.completions.stream(**options) as stream:
                text = "".join([event.delta async for event in stream if event.type == "content.delta"])
                final = stream.current_completion_snapshot
            whole = await client.chat.completions.create(**options)
            return text, final.choices[0].message.content, whole.choices[0].message.content

    text, final, whole = asyncio.run(main())
    assert text == final == whole


def test_tools_are_refused(client):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, tools=tools)
