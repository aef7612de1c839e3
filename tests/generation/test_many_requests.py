"""Answers of one prompt, drafts, and many requests at once: always the tokens of one request at a time."""

import numpy as np
import pytest
from toy import VOCAB_SIZE, ScriptedModel

from flax_paged.generation.drafts import NgramDrafter
from flax_paged.generation.engine import Engine
from flax_paged.generation.sampling_params import SamplingParams

NUM_REQUESTS = 40
SIZES = {"num_pages": 64, "page_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 96}


def make_engine(model, **options):
    return Engine(model, **{**SIZES, **options})


def count_tokens(engine):
    """Count the tokens that the engine's steps compute from here on."""
    counted = []
    schedule = engine.scheduler.schedule

    def counting():
        result = schedule()
        counted.append(result.num_tokens)
        return result

    engine.scheduler.schedule = counting  # for as long as the engine lives; a later count adds another
    return counted


# Several answers


@pytest.mark.parametrize("prompt_len", [1, 7, 8, 21, 40])
@pytest.mark.parametrize(
    "options", [{}, {"enable_prefix_caching": False, "num_pages": 24}, {"max_num_seqs": 2}], ids=str
)
def test_answers_of_one_prompt_are_those_of_separate_requests(shared_engine, prompt_len, options):
    prompt = np.random.default_rng(prompt_len).integers(1, VOCAB_SIZE, prompt_len).tolist()
    params = [SamplingParams(temperature=0.9, seed=3 + i, max_tokens=10) for i in range(5)]
    separate = [output.outputs[0].token_ids for output in shared_engine(**SIZES).generate([prompt] * 5, params)]
    engine = shared_engine(**{**SIZES, **options})
    counted = count_tokens(engine)
    output = engine.generate([prompt], SamplingParams(temperature=0.9, seed=3, max_tokens=10, n=5))[0]
    assert [answer.index for answer in output.outputs] == list(range(5))
    assert [answer.token_ids for answer in output.outputs] == separate
    assert engine.scheduler.pool.num_live == 0
    if not options:
        # The prompt once, its last token again for each other answer, and nine new tokens each.
        assert sum(counted) == prompt_len + 4 + 5 * 9


def test_aborting_a_request_ends_all_its_answers(model):
    engine = make_engine(model, max_num_seqs=2)
    for steps in range(6):
        name = engine.add_request([1] * 40, SamplingParams(n=4, max_tokens=20))
        for _ in range(steps):
            engine.step()
        engine.abort(name)
        assert not engine.scheduler.has_unfinished and engine.scheduler.pool.num_live == 0
    engine.step()


def test_stream_of_several_answers(shared_engine):
    engine = shared_engine(**SIZES)
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=6, n=3)
    whole = engine.generate([[5, 6, 7]], params)[0]
    tokens = {}
    for piece in engine.stream([[5, 6, 7]], params):
        for answer in piece.outputs:
            tokens[answer.index] = tokens.get(answer.index, []) + answer.token_ids
    assert tokens == {answer.index: answer.token_ids for answer in whole.outputs}


# Drafts


def test_drafter_finds_what_followed_the_latest_time():
    drafter = NgramDrafter(3)
    assert drafter.propose([1, 2]) == ()
    assert drafter.propose([1, 2, 3, 4, 1, 2]) == (3, 4, 1)
    assert drafter.propose([1, 2, 3, 4, 1, 2, 9, 1, 2]) == (9, 1, 2)
    assert drafter.propose([1, 2, 3, 4, 1, 2, 9, 1, 2, 3]) == (4, 1, 2)  # the longer match wins


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_drafts_change_no_token(shared_engine, temperature):
    rng = np.random.default_rng(1)
    prompts = [(rng.integers(1, 9, 6).tolist() * 5)[:size] for size in (30, 17, 9, 4)]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=40, logprobs=1) for i in range(4)]
    plain = shared_engine(**SIZES).generate(prompts, params)
    drafted = shared_engine(**SIZES, num_speculative_tokens=4).generate(prompts, params)
    for a, b in zip(plain, drafted, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        np.testing.assert_allclose(a.outputs[0].cumulative_logprob, b.outputs[0].cumulative_logprob, rtol=1e-4)


def test_right_drafts_save_steps_and_penalties_see_them():
    model = ScriptedModel([3, 4, 5, 6] * 20)
    for params in ({}, {"frequency_penalty": 0.1, "bad_words": (), "logit_bias": {9: 0.5}}):
        params = SamplingParams(temperature=0, max_tokens=40, **params)
        plain, drafted = make_engine(model), make_engine(model, num_speculative_tokens=4)
        counts = [count_tokens(plain), count_tokens(drafted)]
        assert plain.generate([[1]], params)[0].outputs[0] == drafted.generate([[1]], params)[0].outputs[0]
        assert sum(c > 0 for c in counts[1]) < 0.5 * sum(c > 0 for c in counts[0])


# Prefix cache


def test_shared_prefix_is_computed_once(model):
    engine = make_engine(model, num_pages=400, max_num_batched_tokens=64, max_model_len=600, page_size=16)
    prefix = np.random.default_rng(2).integers(1, VOCAB_SIZE, 512).tolist()
    prompts = [[*prefix, i + 1, i + 2] for i in range(50)]
    counted = count_tokens(engine)
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=1))
    assert sum(counted) == 512 + 50 * 2
    assert [output.num_cached_tokens for output in outputs] == [0] + [512] * 49


def test_salts_share_nothing(shared_engine):
    engine = shared_engine(**SIZES)
    for salt, num_cached in (("a", 0), ("a", 16), ("b", 0), (None, 0)):
        engine.add_request([7] * 20, SamplingParams(max_tokens=1), cache_salt=salt)
        pieces = []
        while engine.has_unfinished_requests:
            pieces += engine.step()
        assert pieces[-1].num_cached_tokens == num_cached


# Many requests


def test_every_page_comes_back(shared_engine):
    """300 requests that end by length, by a stop id or by an abort in any state, some just where a page does."""
    engine = shared_engine(**{**SIZES, "num_pages": 24})
    rng = np.random.default_rng(7)
    reasons, num_sent = [], 0
    while num_sent < 300 or engine.has_unfinished_requests:
        for _ in range(rng.integers(0, 4)):
            if num_sent < 300:
                prompt = rng.integers(1, VOCAB_SIZE, rng.integers(1, 40)).tolist()
                params = SamplingParams(temperature=1.0, seed=num_sent, max_tokens=8, stop_token_ids=[1, 2, 3, 4, 5])
                engine.add_request(prompt, params)
                num_sent += 1
        if rng.integers(0, 6) == 0 and engine._requests:
            engine.abort(str(rng.choice(list(engine._requests))))
        for piece in engine.step():
            if piece.finished:
                reasons.append(piece.outputs[0].finish_reason)
        pool, running = engine.scheduler.pool, engine.scheduler.running
        assert pool.num_live == len({page for sequence in running for page in sequence.pages})
    assert pool.num_live == 0 and pool.num_available == 24
    pages = [pool.allocate() for _ in range(24)]
    assert len(set(pages)) == 24  # none is free twice
    pool.release(pages)
    assert set(reasons) == {"stop", "length"} and len(reasons) < 300


@pytest.fixture(scope="module")
def many(model):
    """Requests of mixed lengths, half of them with a common prefix, and their tokens one at a time."""
    rng = np.random.default_rng(4)
    prefix = rng.integers(1, VOCAB_SIZE, 33).tolist()
    requests = []
    for i in range(NUM_REQUESTS):
        prompt = rng.integers(1, VOCAB_SIZE, rng.integers(1, 50)).tolist()
        if i % 2:
            prompt = prefix[: rng.integers(1, 34)] + prompt[:20]
        sampled = {"temperature": 0.8, "seed": i, "top_p": 0.9} if i % 5 == 4 else {"temperature": 0}
        requests.append((prompt, SamplingParams(max_tokens=int(rng.integers(1, 30)), **sampled)))
    engine = make_engine(model, max_num_seqs=1, max_num_batched_tokens=96, enable_prefix_caching=False)
    expected = [engine.generate([prompt], params)[0].outputs[0].token_ids for prompt, params in requests]
    return requests, expected


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 4, "num_pages": 40, "max_prefill_chunk": 1},
        {"page_size": 4, "num_pages": 28, "max_prefill_chunk": 16, "num_speculative_tokens": 3},
        {"page_size": 16, "num_pages": 12, "enable_prefix_caching": False},
        {"page_size": 16, "num_pages": 9, "max_num_batched_tokens": 64, "num_speculative_tokens": 2},
        {"page_size": 32, "num_pages": 6, "max_prefill_chunk": 16},
        {"page_size": 1, "num_pages": 120},
    ],
    ids=str,
)
def test_tokens_are_those_of_one_request_at_a_time(model, many, options):
    """Random arrivals and aborts, in a pool that forces preemption."""
    requests, expected = many
    engine = make_engine(model, **options)
    rng = np.random.default_rng(5)
    waiting, got, aborted = list(range(NUM_REQUESTS)), {}, set()
    num_preempted = 0
    for _ in range(5000):
        for _ in range(rng.integers(0, 4)):
            if waiting:
                i = waiting.pop(0)
                engine.add_request(*requests[i], request_id=str(i), priority=int(rng.integers(0, 2)))
        if rng.integers(0, 20) == 0 and engine._requests:
            name = str(rng.choice(list(engine._requests)))
            engine.abort(name)
            aborted.add(int(name))
        for piece in engine.step():
            got.setdefault(int(piece.request_id), []).extend(piece.outputs[0].token_ids)
            num_preempted += piece.metrics.num_preemptions
        if not waiting and not engine.has_unfinished_requests:
            break
    for i in range(NUM_REQUESTS):
        if i in aborted:
            assert got.get(i, []) == expected[i][: len(got.get(i, []))]
        else:
            assert got[i] == expected[i]
    pool = engine.scheduler.pool
    assert (pool.num_live, pool.num_available) == (0, pool.num_pages)
    assert num_preempted > 0 or options["page_size"] == 1
