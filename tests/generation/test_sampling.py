"""Sampling on the device against exact distributions from numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_paged.generation import sampling
from flax_paged.generation.sampling import sample
from flax_paged.generation.sampling_inputs import build_sampling_inputs


def make_inputs(num_rows, *, seeds=None, counters=0, **fields):
    """SamplingInputs with everything off but the fields given, which may be one value for all rows."""
    off = build_sampling_inputs([], num_rows, max_history=8, max_entries=4, vocab_size=1 << 16)
    arrays = {
        name: np.broadcast_to(np.asarray(value, getattr(off, name).dtype), num_rows) for name, value in fields.items()
    }
    arrays.setdefault("temperature", np.ones(num_rows, np.float32))
    halves = np.zeros((num_rows, 2), np.uint32)
    halves[:, 1] = np.arange(num_rows) if seeds is None else seeds
    counters = np.broadcast_to(np.asarray(counters, np.uint32), num_rows)
    return dataclasses.replace(off, seeds=halves, counters=counters, **arrays)


@jax.jit
def draw(logits, inputs):
    return sample(logits, inputs, np.zeros(logits.shape[0], np.int32)).token_ids


def exact_distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """float64: temperature, min-p, top-k, top-p, in this order."""
    scaled = np.asarray(logits, np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p[p < min_p * p.max()] = 0
    if 0 < top_k < len(p):
        p[p < np.sort(p)[-top_k]] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    return p / p.sum()


def chi_square(counts, p):
    """Statistic and its 1 - 1e-6 quantile (Wilson-Hilferty); bins of fewer than 5 expected are taken together."""
    assert counts[p == 0].sum() == 0
    expected = counts.sum() * p
    rare = (expected < 5) & (p > 0)
    counts = np.append(counts[expected >= 5], counts[rare].sum())
    expected = np.append(expected[expected >= 5], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    dof = max(len(expected) - 1, 1)
    return ((counts - expected) ** 2 / expected).sum(), dof * (1 - 2 / (9 * dof) + 4.75 * np.sqrt(2 / (9 * dof))) ** 3


@functools.cache
def compiled(name, num_candidates):
    """A function of `sampling` compiled for a number of candidates, which the tests change."""
    return jax.jit(lambda *args: getattr(sampling, name)(*args))


OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "top_k larger than the vocabulary": {"top_k": 1000},
    "top_p tiny": {"top_p": 1e-6},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("vocab_size", [13, 600])
@pytest.mark.parametrize("num_candidates", [4, 64])
def test_distribution_is_exact(options, vocab_size, num_candidates, monkeypatch):
    """Both routes: 4 candidates are too few for most options, so the whole vocabulary is searched."""
    monkeypatch.setattr(sampling, "_NUM_CANDIDATES", num_candidates)
    num_rows = 5_000
    logits = np.random.default_rng(1).normal(size=vocab_size).astype(np.float32) * 2
    rows = jnp.broadcast_to(jnp.asarray(logits), (num_rows, vocab_size))
    p = exact_distribution(logits, **options)
    temperature = options.get("temperature", 1.0)
    if any(name != "temperature" for name in options):
        scaled = compiled("_thresholds", num_candidates)(rows[:1] / temperature, make_inputs(1, **options))
        assert ((logits / np.float32(temperature) >= np.asarray(scaled)[0]) == (p > 0)).all()
    tokens = np.asarray(
        compiled("sample", num_candidates)(
            rows, make_inputs(num_rows, **options), np.zeros(num_rows, np.int32)
        ).token_ids
    )
    statistic, limit = chi_square(np.bincount(tokens, minlength=vocab_size), p)
    assert statistic < limit


def test_greedy_rows_of_a_mixed_batch():
    logits = np.random.default_rng(2).normal(size=(4, 100)).astype(np.float32)
    inputs = make_inputs(4, temperature=[0, 1e-8, 0.7, 0.7], top_p=0.9, top_k=5, seeds=7)
    tokens = np.asarray(draw(logits, inputs))
    assert (tokens[:2] == logits[:2].argmax(1)).all()
    alone = draw(logits[2:3], make_inputs(1, temperature=0.7, top_p=0.9, top_k=5, seeds=7))
    assert tokens[2] == alone[0]


@pytest.mark.parametrize("temperature", [0.0, 1e-8])
def test_ties_go_to_the_lowest_id(temperature):
    logits = np.zeros((3, 50), np.float32)
    logits[0, [9, 30]] = 2
    logits[1, 49] = 1e30
    assert draw(logits, make_inputs(3, temperature=temperature)).tolist() == [9, 49, 0]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_row_does_not_depend_on_its_neighbours(options):
    logits = np.random.default_rng(3).normal(size=(1, 600)).astype(np.float32)
    flat = np.zeros((1, 600), np.float32)  # its nucleus is wide, so it forces the search
    alone = draw(logits, make_inputs(1, seeds=5, counters=3, **options))[0]
    fields = {name: [0.99 if name == "top_p" else value, value] for name, value in options.items()}
    fields.setdefault("top_p", [0.99, 1.0])
    together = draw(np.concatenate([flat, logits]), make_inputs(2, seeds=[9, 5], counters=[1, 3], **fields))
    assert together[1] == alone


def test_random_numbers_differ_by_seed_and_counter():
    seeds = np.array([[0, 1], [0, 2], [1, 1], [0, 1]], np.uint32)
    counters = np.array([0, 0, 0, 1], np.uint32)
    values = np.asarray(sampling._uniform(seeds, counters))
    assert len(set(values.tolist())) == 4 and (values >= 0).all() and (values < 1).all()


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 1000])
def test_draw_inverts_the_distribution_at_block_edges(vocab_size):
    weights = np.random.default_rng(4).uniform(size=vocab_size).astype(np.float32)
    weights[vocab_size // 2 :: 3] = 0
    weights[0] = 1
    uniform = np.linspace(0, 1, 501, endpoint=False).astype(np.float32)
    tiled = np.broadcast_to(weights, (len(uniform), vocab_size))
    index = np.asarray(sampling._draw(tiled, uniform, np.zeros(len(uniform), np.int32)))
    cdf = np.cumsum(weights.astype(np.float64)) / weights.sum(dtype=np.float64)
    assert (weights[index] > 0).all()
    assert (np.abs(index - np.searchsorted(cdf, uniform, side="right")) <= 1).all()
    near_edge = np.abs(cdf[index] - uniform) < 1e-6
    assert ((index == np.searchsorted(cdf, uniform, side="right")) | near_edge).mean() > 0.99


def test_bf16_logits_and_minus_infinity():
    logits = jnp.full((2, 40), -jnp.inf, jnp.bfloat16).at[:, 17].set(jnp.bfloat16(3))
    assert draw(logits, make_inputs(2, temperature=[0.0, 1.0], top_p=0.5)).tolist() == [17, 17]
