"""What the engine says about itself."""

import logging

import numpy as np
import pytest
from toy import VOCAB_SIZE

from flax_paged.generation.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=12)


def drain(engine):
    while engine.has_unfinished_requests:
        engine.step()


@pytest.mark.parametrize(
    ("num_requests", "prompt_len", "options", "limit"),
    [
        (6, 2, {}, "max_num_seqs"),
        (2, 16, {}, "max_num_batched_tokens"),
        (3, 10, {"num_pages": 6, "max_num_batched_tokens": 64}, "num_pages"),
    ],
)
def test_says_what_a_request_waits_for(shared_engine, caplog, num_requests, prompt_len, options, limit):
    engine = shared_engine(**options)
    rng = np.random.default_rng(0)
    before = engine.stats()
    for _ in range(num_requests):
        engine.add_request(rng.integers(1, VOCAB_SIZE, prompt_len).tolist(), PARAMS)
    with caplog.at_level(logging.INFO, logger="flax_paged"):
        engine.step()
    stats = engine.stats()
    assert stats.waits_for == limit and stats.num_waiting > 0 and stats.num_running > 0
    assert stats.num_steps_waited[limit] == before.num_steps_waited[limit] + 1
    assert f"wait for {limit}" in caplog.text and caplog.records[-1].engine["waits_for"] == limit
    drain(engine)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.waits_for, stats.num_live_pages) == (0, 0, None, 0)


def test_counts(shared_engine):
    engine = shared_engine(num_speculative_tokens=3)
    before = engine.stats()
    outputs = engine.generate([[5] * 20, [5] * 20], PARAMS)
    stats = engine.stats()
    assert stats.num_sampled_tokens - before.num_sampled_tokens == 24
    assert stats.num_cached_tokens - before.num_cached_tokens == sum(o.num_cached_tokens for o in outputs) == 16
    computed = stats.num_computed_tokens - before.num_computed_tokens
    wrong = (
        stats.num_draft_tokens - stats.num_right_draft_tokens - before.num_draft_tokens + before.num_right_draft_tokens
    )
    assert computed == 20 + 4 + 2 * 11 + wrong
    assert stats.num_free_pages + stats.num_cached_pages == 64 and stats.num_cached_pages > 0
    assert stats.num_steps > before.num_steps
