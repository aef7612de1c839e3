"""Each sampling option: on the device against numpy, and through the engine."""

import math

import jax
import numpy as np
import pytest
from toy import ScriptedModel, letter_tokenizer

from flax_paged.generation import sampling
from flax_paged.generation.engine import Engine
from flax_paged.generation.logit_rules import LogitEntry, LogitRules
from flax_paged.generation.sampling_inputs import SamplingRow, build_sampling_inputs
from flax_paged.generation.sampling_params import SamplingParams
from flax_paged.generation.sequence import Sequence

GREEDY = SamplingParams(temperature=0, max_tokens=2)


def make_row(row, tokens, prompt_len, num_pending=0, bad_words=(), **params):
    sequence = Sequence(
        "0", tokens[:prompt_len], SamplingParams(**params), max_num_tokens=99, eos_token_ids=[7], bad_words=bad_words
    )
    sequence.token_ids += tokens[prompt_len : len(tokens) - num_pending]
    return SamplingRow(row, sequence, len(tokens))


def changed_logits(rows, tokens_of_rows, logits):
    inputs = build_sampling_inputs(rows, len(logits), max_history=16, max_entries=16, vocab_size=logits.shape[1])
    last = np.array([tokens[-1] for tokens in tokens_of_rows], np.int32)

    @jax.jit
    def change(logits, inputs, last):
        return sampling._penalize(sampling._apply_entries(logits, inputs, last), inputs, last)

    return np.asarray(change(logits, inputs, last))


@pytest.mark.parametrize("num_pending", [0, 1])
def test_penalties(num_pending):
    tokens, prompt_len = [1, 2, 3, 2, 5, 5, 6], 3
    logits = np.random.default_rng(0).normal(size=(2, 10)).astype(np.float32)
    options = {"repetition_penalty": 1.5, "frequency_penalty": 0.25, "presence_penalty": -0.5}
    rows = [make_row(1, tokens, prompt_len, num_pending, **options)]
    got = changed_logits(rows, [[0], tokens], logits)
    expected = logits[1].copy()
    for token in set(tokens):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token in tokens[prompt_len:]:
        expected[token] -= 0.25
    for token in set(tokens[prompt_len:]):
        expected[token] += 0.5
    np.testing.assert_allclose(got[1], expected, rtol=1e-6)
    np.testing.assert_array_equal(got[0], logits[0])


def test_repetition_penalty_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokens = [1, 2, 3, 2, 5]
    logits = np.random.default_rng(1).normal(size=(1, 10)).astype(np.float32)
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.3)
    expected = processor(torch.tensor([tokens]), torch.tensor(logits)).numpy()
    got = changed_logits([make_row(0, tokens, 2, repetition_penalty=1.3)], [tokens], logits)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("num_pending", [0, 1])
def test_entries(num_pending):
    logits = np.zeros((4, 10), np.float32)
    rows = [
        make_row(0, [1, 2], 1, num_pending, logit_bias={3: 2.5, 4: -math.inf}),
        make_row(1, [1, 2], 1, num_pending, allowed_token_ids=[2, 9], logit_bias={9: 1.0}),
        make_row(2, [1, 2], 1, num_pending, min_tokens=2, stop_token_ids=[5]),
        make_row(3, [1, 2, 3], 1, num_pending, bad_words=[(8,), (2, 3, 4), (2, 5), (3, 6), (1, 2, 3, 9)]),
    ]
    got = changed_logits(rows, [[2], [2], [2], [3]], logits)
    assert got[0].tolist() == [0, 0, 0, 2.5, -math.inf, 0, 0, 0, 0, 0]
    assert [i for i in range(10) if got[1][i] > -math.inf] == [2, 9] and got[1][9] == 1
    assert [i for i in range(10) if got[2][i] == -math.inf] == [5, 7]
    assert [i for i in range(10) if got[3][i] == -math.inf] == [4, 6, 8]  # the word begun in the prompt does not count


def test_min_tokens_bans_the_ends_until_there_are_enough():
    rules = LogitRules(SamplingParams(min_tokens=2), stop_token_ids=[7])
    assert rules.entries([1], 1) == [LogitEntry(7, -math.inf)]
    assert rules.entries([1, 2], 2) == []


def make_engine(script, **options):
    sizes = {"num_pages": 32, "page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    return Engine(ScriptedModel(script), letter_tokenizer(), **{**sizes, **options})


@pytest.fixture(scope="module")
def engine():
    return make_engine([3, 4, 60, 5, 6, 7, 8, 9] * 4)


def say(engine, **params):
    return engine.generate("", SamplingParams(**{"temperature": 0, "max_tokens": 8, **params}))[0].outputs[0]


def test_min_tokens(engine):
    assert say(engine).token_ids == [3, 4, 60]
    assert say(engine, min_tokens=2).token_ids == [3, 4, 60]
    answer = say(engine, min_tokens=3)
    assert answer.token_ids == [3, 4, 0, 5, 6, 7, 8, 9] and answer.finish_reason == "length"


def test_stop_text(engine):
    answer = say(engine, stop="EF", ignore_eos=True)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("CD", "stop", "EF")
    assert answer.token_ids == [3, 4, 60, 5, 6]


def test_bad_words(engine):
    assert say(engine, bad_words=["D"]).token_ids == [3, 0, 60]
    assert say(engine, bad_words=["CD", "FGH"], ignore_eos=True).token_ids == [3, 0, 60, 5, 6, 7, 0, 9]


def test_logit_bias_and_allowed_tokens(engine):
    assert say(engine, logit_bias={4: -10, 9: 1}).token_ids == [3, 9, 60]
    assert say(engine, allowed_token_ids=[3, 9]).token_ids == [3] * 7 + [9]


def test_penalties_through_the_engine(engine):
    # Scripted logits are 5, the others 0.01 less an id. Said twice, a token has lost 2 * 2 + 2 and is below the unsaid.
    answer = say(engine, ignore_eos=True, max_tokens=24, presence_penalty=2, frequency_penalty=2)
    assert answer.token_ids == [3, 4, 60, 5, 6, 7, 8, 9] * 2 + [0, 1, 2, 10, 11, 12, 13, 14]


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs(engine, num_top):
    answer = say(engine, logprobs=num_top, logit_bias={9: 20.0}, ignore_eos=True)
    table = np.asarray(engine._runner._step.module().table[...], np.float64)
    expected = table - np.log(np.exp(table).sum(1, keepdims=True))
    assert answer.token_ids == [9] * 8 and len(answer.logprobs) == 8
    for position, entry in enumerate(answer.logprobs):
        order = np.argsort(-expected[position], kind="stable")
        assert set(entry) == {9, *order[:num_top].tolist()}
        for token_id, logprob in entry.items():
            np.testing.assert_allclose(logprob.logprob, expected[position, token_id], rtol=1e-4)
            assert order[logprob.rank - 1] == token_id
        assert entry[9].decoded_token == "I"
    np.testing.assert_allclose(answer.cumulative_logprob, expected[:8, 9].sum(), rtol=1e-4)


@pytest.mark.parametrize("chunk", [None, 3])
def test_prompt_logprobs(chunk):
    engine = make_engine([3, 4, 60, 5, 6, 7, 8, 9] * 4, max_prefill_chunk=chunk)
    prompt = [1, 3, 9, 60, 5, 2, 7, 8, 1]
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    table = np.asarray(engine._runner._step.module().table[...], np.float64)
    expected = table - np.log(np.exp(table).sum(1, keepdims=True))
    for _ in range(2):  # the second time the prompt is in the prefix cache
        outputs = engine.generate([prompt, [1, 2]], [params, SamplingParams(temperature=0, max_tokens=2)])
        reported = outputs[0].prompt_logprobs
        assert len(reported) == 9 and reported[0] is None and outputs[1].prompt_logprobs is None
        for position in range(1, 9):
            entry = reported[position]
            np.testing.assert_allclose(
                entry[prompt[position]].logprob, expected[position - 1, prompt[position]], rtol=1e-4
            )
            assert len(entry) == (2 if entry[prompt[position]].rank <= 2 else 3)
        assert outputs[0].outputs[0].token_ids == engine.generate([prompt], GREEDY)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1}, "temperature=-1): expected 0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"top_p": 0}, "top_p=0): expected a probability in (0, 1]"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -2}, "top_k=-2"),
        ({"min_p": 2}, "min_p=2"),
        ({"max_tokens": 0}, "max_tokens=0): expected at least 1"),
        ({"min_tokens": 20}, "min_tokens=20, max_tokens=16"),
        ({"n": 0}, "n=0): expected at least 1"),
        ({"n": 2, "temperature": 0}, "greedy answers are all equal"),
        ({"seed": 2**64}, "seed=18446744073709551616): expected a 64-bit integer"),
        ({"repetition_penalty": 0}, "repetition_penalty=0): expected above 0"),
        ({"presence_penalty": 3}, "presence_penalty=3): expected a number in [-2, 2]"),
        ({"allowed_token_ids": []}, "allowed_token_ids=[]"),
        ({"logit_bias": {3: math.inf}}, "expected numbers below infinity"),
        ({"stop": [""]}, "expected texts that are not empty"),
        ({"stop_token_ids": [-1]}, "expected token ids, 0 or more"),
        ({"logprobs": -1}, "logprobs=-1): expected 0 or more"),
    ],
)
def test_values_out_of_range_are_refused(params, message):
    with pytest.raises(ValueError) as error:
        SamplingParams(**params)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": "0"},
        {"max_tokens": 1.5},
        {"top_k": True},
        {"stop": [1]},
        {"stop_token_ids": "ab"},
        {"seed": 0.5},
    ],
)
def test_values_of_a_wrong_type_are_refused(params):
    with pytest.raises(TypeError, match=next(iter(params))):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logprobs": 21}, "logprobs=21 is more than the engine's max_logprobs=20"),
        ({"stop_token_ids": [61]}, "token id 61; expected less than 61"),
        ({"logit_bias": {61: 1}}, "token id 61; expected less than 61"),
        (
            {"allowed_token_ids": list(range(40))},
            "change the logits of 40 tokens, more than the engine's max_logit_entries=32",
        ),
    ],
)
def test_what_the_engine_cannot_do_is_refused(params, message):
    engine = make_engine([1], max_logit_entries=32)
    with pytest.raises(ValueError, match=message):
        engine.generate("", SamplingParams(**params))


def test_texts_need_a_tokenizer():
    engine = Engine(ScriptedModel([1]), max_model_len=32, max_num_seqs=1)
    for params in ({"stop": "x"}, {"bad_words": ["x"]}):
        with pytest.raises(ValueError, match="the engine has no tokenizer; use stop_token_ids"):
            engine.generate([[1]], SamplingParams(**params))
