"""Drawn tokens follow the exact distribution, for each option that changes logits: chi-square against float64 numpy.

Temperature, top-k, top-p and min-p are in test_sampling.py.
"""

import jax
import numpy as np
import pytest
from test_sampling import chi_square
from toy import VOCAB_SIZE, ScriptedModel

from flax_paged.generation.engine import Engine
from flax_paged.generation.sampling import sample
from flax_paged.generation.sampling_inputs import SamplingRow, build_sampling_inputs
from flax_paged.generation.sampling_params import SamplingParams
from flax_paged.generation.sequence import Sequence

NUM_ROWS, SIZE = 5000, 13
PROMPT, OUTPUT = [1, 2, 3, 2], [5, 6, 5]
EOS = 7
LOGITS = (np.random.default_rng(1).normal(size=SIZE) * 1.5).astype(np.float32)


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def penalized(repetition=1.0, frequency=0.0, presence=0.0):
    logits = LOGITS.astype(np.float64)
    for token in {*PROMPT, *OUTPUT}:
        logits[token] *= 1 / repetition if logits[token] > 0 else repetition
    for token in {*OUTPUT}:
        logits[token] -= presence + frequency * OUTPUT.count(token)
    return logits


def changed(added):
    logits = LOGITS.astype(np.float64)
    for token, value in added.items():
        logits[token] += value
    return logits


def only(*allowed):
    return changed({token: -np.inf for token in range(SIZE) if token not in allowed})


OPTIONS = {
    "nothing": ({}, (), LOGITS.astype(np.float64)),
    "repetition_penalty": ({"repetition_penalty": 1.7}, (), penalized(repetition=1.7)),
    "presence_penalty": ({"presence_penalty": 1.2}, (), penalized(presence=1.2)),
    "frequency_penalty": ({"frequency_penalty": -0.8}, (), penalized(frequency=-0.8)),
    "all penalties, then temperature": (
        {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.7, "temperature": 0.6},
        (),
        penalized(0.8, 0.7, -0.5) / 0.6,
    ),
    "logit_bias": ({"logit_bias": {4: 2.0, 9: -1.5, 0: -np.inf}}, (), changed({4: 2.0, 9: -1.5, 0: -np.inf})),
    "allowed_token_ids": ({"allowed_token_ids": [2, 5, 11]}, (), only(2, 5, 11)),
    "bad words": ({}, [(3,), (5, 8), (6, 5, 9), (6, 1)], changed({3: -np.inf, 8: -np.inf, 9: -np.inf})),
    "min_tokens": ({"min_tokens": 4, "stop_token_ids": [2]}, (), changed({EOS: -np.inf, 2: -np.inf})),
    "min_tokens that are there": ({"min_tokens": 3, "stop_token_ids": [2]}, (), LOGITS.astype(np.float64)),
}


@pytest.fixture(scope="module")
def draw():
    return jax.jit(lambda logits, inputs, last: sample(logits, inputs, last).token_ids)


@pytest.mark.parametrize("is_pending", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_distribution_is_exact(draw, name, is_pending):
    """The last token is known to the host, or only to the device."""
    options, bad_words, logits = OPTIONS[name]
    params = SamplingParams(**{"temperature": 1.0, **options})
    rows = []
    for i in range(NUM_ROWS):
        sequence = Sequence("0", PROMPT, params, seed=i, max_num_tokens=99, eos_token_ids=[EOS], bad_words=bad_words)
        sequence.token_ids += OUTPUT[:-1] if is_pending else OUTPUT
        rows.append(SamplingRow(i, sequence, len(PROMPT + OUTPUT)))
    inputs = build_sampling_inputs(rows, NUM_ROWS, max_history=8, max_entries=8, vocab_size=32)
    tokens = draw(np.tile(LOGITS, (NUM_ROWS, 1)), inputs, np.full(NUM_ROWS, OUTPUT[-1], np.int32))
    statistic, limit = chi_square(np.bincount(tokens, minlength=SIZE), softmax(logits))
    assert statistic < limit


def test_guessed_tokens_are_drawn_from_the_exact_distribution():
    """Speculation: each place's tokens, among requests whose guesses are now right, now wrong."""
    num_requests = 1500
    script = [9, 9, 9, 9, 3, 1, 2, 9]  # after the prompt 1 2 3 1 2: 3 1 2, as guessed, and not 3
    model = ScriptedModel(script)
    engine = Engine(
        model,
        num_pages=256,
        page_size=16,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        max_model_len=16,
        num_speculative_tokens=3,
        max_logprobs=0,
        seed=0,
    )
    params = SamplingParams(temperature=1.2, max_tokens=4)
    outputs = engine.generate([[1, 2, 3, 1, 2]] * num_requests, params)
    stats = engine.stats()
    assert 0.1 < stats.num_right_draft_tokens / stats.num_draft_tokens < 0.9
    tokens = np.array([output.outputs[0].token_ids for output in outputs])
    table = np.asarray(model.table[...], np.float64)
    for place in range(4):
        counts = np.bincount(tokens[:, place], minlength=VOCAB_SIZE)
        statistic, limit = chi_square(counts, softmax(table[4 + place] / 1.2))
        assert statistic < limit
