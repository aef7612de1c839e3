"""`response_format` with OpenAI's client against a real server; jsonschema and pydantic judge the answers."""

import asyncio
import json
from typing import Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from flax_paged import SamplingParams

MESSAGES = [{"role": "user", "content": "Describe a page as JSON."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "colour": {"enum": ["grün", "rot 😀", None]},
        "sizes": {
            "type": "array",
            "items": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
                      "required": ["n"], "additionalProperties": False},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "colour", "sizes"],
    "additionalProperties": False,
}  # fmt: skip


def schema_format(schema=SCHEMA):
    return {"type": "json_schema", "json_schema": {"name": "page", "schema": schema, "strict": True}}


def ask(client, form, **options):
    return client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format=form, **{"max_tokens": 150, "seed": 1, **options}
    )


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 4, "n": 3}, {"seed": 5, "top_p": 0.8}])
def test_whole_and_streamed_are_the_engines(client, engine, options):
    params = SamplingParams(**{"seed": 1, "max_tokens": 150, "json_schema": SCHEMA, **options})
    outputs = engine.generate([engine.tokenizer.apply_chat_template(MESSAGES)], params)[0].outputs
    whole = ask(client, schema_format(), **options)
    assert [choice.message.content for choice in whole.choices] == [output.text for output in outputs]
    texts = [""] * len(outputs)
    for chunk in ask(client, schema_format(), stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [output.text for output in outputs]
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_an_object_of_any_kind(client):
    answers = ask(client, {"type": "json_object"}, n=16, max_tokens=200).choices
    ended = [json.loads(answer.message.content) for answer in answers if answer.finish_reason == "stop"]
    assert ended and all(isinstance(value, dict) for value in ended)
    assert {answer.finish_reason for answer in answers} <= {"stop", "length"}


def test_parsed_into_a_class(client):
    class Page(pydantic.BaseModel):
        kind: Literal["key", "value"]
        is_free: bool

    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Page, max_tokens=150, seed=2
    )
    assert isinstance(answer.choices[0].message.parsed, Page)


def test_completions_take_it_too(client):
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3}
    answer = client.completions.create(
        model="tiny",
        prompt=["JSON:", "Page:"],
        max_tokens=150,
        seed=3,
        extra_body={"response_format": schema_format(schema)},
    )
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.text), schema)


def test_an_answer_that_is_cut_says_so(client):
    choice = ask(client, schema_format(), max_tokens=4).choices[0]
    assert choice.finish_reason == "length"


def test_among_others_nobody_changes(server, client):
    """Calls of both kinds at once: each answer is the one it gets alone."""
    calls = [{"seed": seed, **({} if seed % 2 else {"response_format": schema_format()})} for seed in range(8)]
    alone = [
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=60, **call)
        .choices[0]
        .message.content
        for call in calls
    ]

    async def together():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as many:
            create = many.chat.completions.create
            answers = [create(model="tiny", messages=MESSAGES, max_tokens=60, **call) for call in calls]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*answers)]

    assert asyncio.run(together()) == alone


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (schema_format({"type": "text"}), "Invalid type: text"),
        (schema_format({"type": "array", "uniqueItems": True}), 'Unimplemented keys: ["uniqueItems"]'),
        (schema_format({"$ref": "#/nowhere"}), "'/nowhere' does not exist"),
        ({"type": "json_schema"}, "needs a json_schema with a schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "needs a json_schema with a schema"),
        ({"type": "grammar"}, "Input should be 'text', 'json_object' or 'json_schema'"),
    ],
)
def test_what_cannot_be_followed_is_refused(client, form, message):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, form, stream=stream)
        assert message in caught.value.message and caught.value.param.startswith("response_format")


def test_contradictions_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="ignore_eos"):
        ask(client, schema_format(), extra_body={"ignore_eos": True})


def test_a_schema_of_any_size_does_no_harm(server):
    nested = {"type": "string", "pattern": "(a?b?c?d?){500}e{300}(x|y){400}"}
    many = {"enum": [f"value {i:08}" * 20 for i in range(5000)]}
    wide = {"type": "object", "properties": {f"p{i}": {"anyOf": [nested, {"type": "integer"}]} for i in range(400)}}
    for schema in (nested, many, wide):
        body = {"messages": MESSAGES, "max_tokens": 4, "response_format": schema_format(schema)}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
        assert response.status_code in (200, 400)
    assert httpx.get(f"{server.url}/health").status_code == 200
