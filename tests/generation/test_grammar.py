"""Answers in JSON: `SamplingParams(json_schema=...)`, with the library jsonschema as the judge."""

import json
import sys

import jsonschema
import numpy as np
import pytest
from compilations import counted_compilations
from toy import ToyModel, byte_tokenizer

from flax_paged.generation.engine import Engine
from flax_paged.generation.grammar import Grammar, JsonGrammars
from flax_paged.generation.sampling_params import SamplingParams

VOCAB_SIZE = 300  # more than the tokenizer's 273
# Prompts take two steps, and four answers of full length would not fit the pool. Few shapes: each is compiled.
SIZES = {
    "num_pages": 40,
    "page_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 256,
    "max_logprobs": 0,
}


def an_object(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT = {"type": "string", "maxLength": 12}
SCHEMAS = {
    "nested": an_object(a=an_object(b=an_object(c={"type": "boolean"}), d={"type": "null"}), e=TEXT),
    "enum": an_object(colour={"enum": ["red", "grün", "blå 😀", 3, None]}, size={"const": "XL"}),
    "array": {"type": "array", "items": an_object(x={"type": "integer", "minimum": -9, "maximum": 120}), "maxItems": 3},
    "number": an_object(n={"type": "number", "minimum": 0, "exclusiveMaximum": 1}, i={"type": "integer"}),
    "text": {"type": "string", "pattern": "^[a-zé😀]{2,8}$"},
    "choice": {"anyOf": [an_object(kind={"const": 1}, n={"type": "integer"}), an_object(kind={"const": 2}, s=TEXT)]},
    "referred": {"$ref": "#/$defs/tree", "$defs": {"tree": an_object(v={"enum": [1, 2]}, of={"$ref": "#/$defs/list"}),
                 "list": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}}},
    "any object": {"type": "object"},
}  # fmt: skip
PROMPT = list(range(65, 85))
PLAIN = SamplingParams(seed=3, max_tokens=30, ignore_eos=True)


def params_for(schema, *, seed=0, **options):
    return SamplingParams(**{"json_schema": schema, "seed": seed, "max_tokens": 200, **options})


def check(output, schema):
    """Judge an answer; returns whether it came to its end."""
    if output.finish_reason == "length":
        return False
    assert output.finish_reason == "stop" and output.stop_reason is None
    jsonschema.validate(json.loads(output.text), schema)
    return True


@pytest.fixture(scope="module")
def model():
    return ToyModel(vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def engine(model):
    engine = Engine(model, byte_tokenizer(), **SIZES)
    engine.warmup(progress=False)
    return engine


@pytest.fixture(scope="module")
def alone(engine):
    """Tokens of each schema's answer to the prompt, one request at a time: drawn, and greedy ones."""
    return {
        name: [
            engine.generate([PROMPT], params_for(schema, **options))[0].outputs[0].token_ids
            for options in ({}, {"temperature": 0})
        ]
        for name, schema in SCHEMAS.items()
    }


def all_requests():
    params = [params_for(schema, **options) for schema in SCHEMAS.values() for options in ({}, {"temperature": 0})]
    return [*params, PLAIN]


def allowed_ids(grammar):
    words = grammar.allowed.view(np.uint32)
    return {i for i in range(len(words) * 32) if words[i // 32] >> np.uint32(i % 32) & 1}


def test_a_grammar_allows_exactly_what_can_go_on():
    """Against every text that fits. Where these leave one next byte, only the tokenizer's own next token is allowed."""
    values = ["ab", "aé", "é😀", 12, 1.5, True, None]
    texts = {json.dumps(value, ensure_ascii=False).encode() for value in values}
    tokenizer = byte_tokenizer()
    tokens = {i: tokenizer.token_bytes(i) for i in range(VOCAB_SIZE) if i not in tokenizer.special_token_ids}
    eos = {tokenizer.eos_token_ids[0], 5}
    grammars = JsonGrammars(tokenizer, VOCAB_SIZE, eos)
    schema = json.dumps({"enum": values})

    def check_allowed(grammar, said):
        going_on = [text[len(said) :] for text in texts if text.startswith(said)]
        expected = {
            i for i, token in tokens.items() if token and any(rest.startswith(token) for rest in going_on)
        } - eos
        expected |= eos if said in texts else set()
        if len({rest[:1] for rest in going_on}) > 1 or said in texts:
            assert allowed_ids(grammar) == expected, said
        else:
            (own,) = {tokenizer.encode(rest.decode(errors="ignore") or "?", False)[0] for rest in going_on[:1]}
            assert allowed_ids(grammar) == ({own} & expected or {going_on[0][0]}), said

    for text in texts:
        for longest in (False, True):
            grammar, said = grammars.compile(schema), b""
            while said != text:
                check_allowed(grammar, said)
                fitting = [i for i in allowed_ids(grammar) - eos if text.startswith(said + tokens[i])]
                token_id = (max if longest else min)(fitting, key=lambda i: len(tokens[i]))
                grammar.advance(token_id)
                said += tokens[token_id]
            check_allowed(grammar, said)


def test_answers_fit_their_schema_alone_and_batched(engine, alone):
    plain = engine.generate([PROMPT], PLAIN)[0].outputs[0].token_ids
    with counted_compilations() as compiled:
        outputs = [output.outputs[0] for output in engine.generate([PROMPT] * (2 * len(SCHEMAS) + 1), all_requests())]
    assert not compiled and engine.stats().num_preemptions > 0
    assert outputs.pop().token_ids == plain
    assert [output.token_ids for output in outputs] == [ids for pair in alone.values() for ids in pair]
    whole = [check(output, schema) for output, schema in zip(outputs, np.repeat([*SCHEMAS.values()], 2), strict=True)]
    assert sum(whole) > 0.7 * len(whole)


@pytest.mark.parametrize("options", [{"num_speculative_tokens": 3}, {"decode_steps_per_call": 4}])
def test_no_engine_option_changes_an_answer(model, engine, alone, options):
    other = Engine(model, byte_tokenizer(), **{**SIZES, **options})
    plain = engine.generate([PROMPT], PLAIN)[0].outputs[0].token_ids
    outputs = [output.outputs[0] for output in other.generate([PROMPT] * (2 * len(SCHEMAS) + 1), all_requests())]
    assert outputs.pop().token_ids == plain
    assert [output.token_ids for output in outputs] == [ids for pair in alone.values() for ids in pair]


def test_many_seeds_and_several_answers(engine):
    schema = SCHEMAS["choice"]
    params = [params_for(schema, n=3, seed=7 * seed, top_p=0.9, top_k=50, temperature=1.5) for seed in range(4)]
    outputs = [
        output for request in engine.generate(["One", "Two", "Three", "Four"], params) for output in request.outputs
    ]
    assert sum(check(output, schema) for output in outputs) > 8 and len({output.text for output in outputs}) > 6


def test_streamed_is_whole(engine):
    params = [params_for(schema) for schema in SCHEMAS.values()]
    whole = [output.outputs[0].text for output in engine.generate([PROMPT] * len(params), params)]
    streamed = {}
    for piece in engine.stream([PROMPT] * len(params), params):
        for output in piece.outputs:
            streamed[int(piece.request_id)] = streamed.get(int(piece.request_id), "") + output.text
    assert [text for _, text in sorted(streamed.items())] == whole


def test_what_cuts_an_answer_short(engine, alone):
    schema = SCHEMAS["nested"]
    cut = engine.generate([PROMPT], params_for(schema, max_tokens=5))[0].outputs[0]
    assert cut.finish_reason == "length" and cut.token_ids == alone["nested"][0][:5]
    stopped = engine.generate([PROMPT], params_for(schema, stop=['"b"']))[0].outputs[0]
    assert stopped.stop_reason == '"b"' and '"b"' not in stopped.text


def test_other_rules_give_way_where_they_leave_nothing(engine):
    schema = {"enum": ["ab"]}
    options = {
        "min_tokens": 50,
        "max_tokens": 60,
        "allowed_token_ids": [5],
        "bad_words": ["b"],
        "logit_bias": {34: -100},
    }
    output = engine.generate([PROMPT], params_for(schema, **options))[0].outputs[0]
    assert output.text == '"ab"' and output.finish_reason == "stop"
    # And hold where they do not: of two ways to say it, the one that is left.
    schema = {"enum": ["ab", "cd"]}
    texts = {
        engine.generate([PROMPT], params_for(schema, bad_words=[word], seed=seed))[0].outputs[0].text
        for word in ("a", "c")
        for seed in range(4)
    }
    assert texts == {'"ab"', '"cd"'}


def test_a_preempted_answer_goes_on(engine, alone):
    engine.add_request(PROMPT, params_for(SCHEMAS["nested"]))
    ids, was_preempted = [], False
    while engine.has_unfinished_requests:
        for piece in engine.step():
            ids += [token_id for output in piece.outputs for token_id in output.token_ids]
        if len(ids) == 6 and not was_preempted:
            engine.scheduler.preempt_all()
            was_preempted = True
    assert was_preempted and ids == alone["nested"][0]


def test_a_grammar_that_gives_up_ends_its_answer_only(engine, alone, monkeypatch):
    advance = Grammar.advance

    def give_up(grammar, token_id):
        advance(grammar, token_id)
        grammar.num_taken = getattr(grammar, "num_taken", 0) + 1
        if grammar.num_taken == 4:
            grammar.error = "too complex"

    monkeypatch.setattr(Grammar, "advance", give_up)
    params = [params_for(SCHEMAS["nested"]), PLAIN]
    failed, plain = (output.outputs[0] for output in engine.generate([PROMPT] * 2, params))
    assert failed.finish_reason == "error" and failed.token_ids == alone["nested"][0][:4]
    assert plain.finish_reason == "length" and len(plain.token_ids) == 30


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "text"}, "Invalid type: text"),
        ({"not": {"type": "string"}}, 'Unimplemented keys: \\["not"\\]'),
        ({"$ref": "#/nowhere"}, "Pointer '/nowhere' does not exist"),
        ({"enum": []}, "Unsatisfiable schema"),
        ({"type": "string", "pattern": "("}, "regex parse error"),
        (
            {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}},
            'Unimplemented keys: \\["uniqueItems"',
        ),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(engine, schema, message):
    with pytest.raises(ValueError, match=f"json_schema: {message}"):
        engine.generate([PROMPT], params_for(schema))
    assert not engine.has_unfinished_requests


def test_the_form_of_a_schema():
    assert SamplingParams(json_schema='{"type":  "object"}') == SamplingParams(json_schema={"type": "object"})
    for schema, message in [("{", "expected JSON"), ("[1]", "expected an object"), ({"a": {1}}, "expected JSON")]:
        with pytest.raises(ValueError, match=message):
            SamplingParams(json_schema=schema)
    with pytest.raises(TypeError, match="json_schema=3.: expected a mapping"):
        SamplingParams(json_schema=3)
    with pytest.raises(ValueError, match="JSON has an end"):
        SamplingParams(json_schema={"type": "object"}, ignore_eos=True)


def test_what_an_engine_needs(model, monkeypatch):
    def refusal(*args, **options):
        return Engine(model, *args, **SIZES, **options).compile_json_schema("{}")

    with pytest.raises(ValueError, match="a tokenizer whose tokens are bytes"):
        refusal(eos_token_ids=[1])
    with pytest.raises(ValueError, match="end-of-sequence ids"):
        refusal(byte_tokenizer(), eos_token_ids=[])
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match="flax-paged\\[grammar\\]"):
        refusal(byte_tokenizer())


def test_the_compiled_schemas_kept_are_few(engine):
    for i in range(40):
        engine.compile_json_schema(json.dumps({"const": i}))
    assert len(engine._grammars._compiled) == 32
