"""Preempted sequences in host memory: no token changes, nothing is compiled, no slot is lost."""

import numpy as np
import pytest
from compilations import counted_compilations
from toy import VOCAB_SIZE

from flax_paged.generation.engine import Engine
from flax_paged.generation.sampling_params import SamplingParams

SIZES = {
    "num_pages": 20,
    "page_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "max_logprobs": 0,
}
PAGE_NBYTES = 2 * 4 * 2 * 2 * 8 * 4  # layers, tokens, keys and values of two heads of 8 float32


def make_requests():
    """Prompts that do not fit in 20 pages beside each other; greedy, seeded and several answers."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, VOCAB_SIZE, size).tolist() for size in (30, 9, 25, 32, 17, 3, 28, 12)]
    prompts[3][:8] = prompts[0][:8]
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=20, n=1 + i % 2) for i in range(8)]
    return prompts, params


def tokens_of(outputs):
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def one_at_a_time(engine):
    """What each request says alone, which preempts nobody."""
    tokens = [tokens_of(engine.generate([prompt], params))[0] for prompt, params in zip(*make_requests(), strict=True)]
    assert engine.stats().num_preemptions == 0
    return tokens


@pytest.fixture(scope="module")
def expected(model):
    return one_at_a_time(Engine(model, **SIZES))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"swap_space": 40 * PAGE_NBYTES},
        {"swap_space": 12 * PAGE_NBYTES, "enable_prefix_caching": False},
        {"swap_space": 40 * PAGE_NBYTES, "enable_prefix_caching": False, "num_speculative_tokens": 2},
        {"swap_space": 40 * PAGE_NBYTES, "decode_steps_per_call": 4},
    ],
    ids=str,
)
def test_tokens_are_those_without_preemption(model, expected, options):
    engine = Engine(model, **SIZES, **options)
    engine.warmup(progress=False)
    with counted_compilations() as compiled:
        got = tokens_of(engine.generate(*make_requests()))
    assert got == expected
    assert not compiled
    stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.num_swapped_pages == stats.num_live_pages == 0
    is_swapping = "swap_space" in options
    assert (stats.num_swapped_out_pages > 0) == (stats.num_swapped_in_pages > 0) == is_swapping
    if not options.get("enable_prefix_caching", True) and stats.num_swapped_out_pages:
        assert stats.num_swapped_in_pages == stats.num_swapped_out_pages


def test_swapping_computes_no_token_twice(model):
    prompts, params = make_requests()
    engine = Engine(model, **SIZES, enable_prefix_caching=False, swap_space=100 * PAGE_NBYTES)
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * len(prompts)
    engine.generate(prompts, params)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_computed_tokens == sum(len(prompt) + 19 for prompt in prompts)


def test_scales_beside_the_pages_come_back_too(model):
    options = {"kv_cache_dtype": "int8", "enable_prefix_caching": False}
    engine = Engine(model, **SIZES, **options, swap_space=40 * PAGE_NBYTES)
    alone = one_at_a_time(engine)
    assert tokens_of(engine.generate(*make_requests())) == alone
    assert engine.stats().num_swapped_in_pages > 0


def test_aborts_and_new_weights_free_host_memory(model, expected):
    """Random aborts, of sequences in host memory too; then new weights, and the tokens are still right."""
    prompts, params = make_requests()
    engine = Engine(model, **SIZES, swap_space=40 * PAGE_NBYTES)
    rng = np.random.default_rng(0)
    num_aborted_in_host_memory = 0
    for _ in range(2):
        names = [engine.add_request(*request) for request in zip(prompts, params, strict=True)]
        for _ in range(60):
            engine.step()
            waiting = [name for name in names if name in engine._requests]
            swapped = [n for n in waiting if any(a.sequence.swap_slots for a in engine._requests[n].answers)]
            if swapped and rng.integers(0, 8) == 0:
                engine.abort(swapped[0])
                num_aborted_in_host_memory += 1
        for name in names:
            engine.abort(name)
        assert engine.stats().num_swapped_pages == engine.stats().num_live_pages == 0
    assert num_aborted_in_host_memory > 0
    for name, request in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(*request, request_id=f"last {name}")
    got = {}
    while engine.has_unfinished_requests:
        if engine.stats().num_swapped_pages and not got.get("updated"):
            engine.update_weights(model)
            got["updated"] = True
            assert engine.stats().num_swapped_pages == 0
        for piece in engine.step():
            for answer in piece.outputs:
                got.setdefault((piece.request_id, answer.index), []).extend(answer.token_ids)
    assert got.pop("updated")
    assert got == {(f"last {i}", j): list(ids) for i, answers in enumerate(expected) for j, ids in enumerate(answers)}


def test_swap_space_that_holds_no_page_is_refused(model):
    with pytest.raises(ValueError, match=f"swap_space=100 bytes hold no page of all layers: .* {PAGE_NBYTES}, or 0"):
        Engine(model, **SIZES, swap_space=100)
    with pytest.raises(ValueError, match="swap_space=-1"):
        Engine(model, **SIZES, swap_space=-1)
