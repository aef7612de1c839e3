"""reference == xla == float64 oracle, over the shapes that other kernels are tested with and the ones they forget."""

import jax
import numpy as np
import pytest
from oracle import (
    B3,
    BF16,
    KV16_DECODE,
    KV16_MIXED,
    KV16_PREFILL,
    assert_close,
    make_ragged_batch,
    ragged_paged_attention_oracle,
)

from flax_paged.ops import ragged_paged_attention

F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
SMALL = ((5, 18), (1, 33), (7, 7), (1, 1), (20, 64), (2, 40))
EDGES = tuple((1, n) for n in (119, 127, 128, 129, 133, 1001, 1023, 1024, 1025))
WINDOW_EDGES = tuple((1, n) for n in (256, 130, 10, 512))


def attend(implementation, batch, **options):
    run = jax.jit(lambda *args: ragged_paged_attention(*args, implementation=implementation, **options))
    return np.asarray(run(*batch.args))


def check(batch, implementations=("xla", "reference"), hints=(None,), slack=1.0, **options):
    options = {"sm_scale": batch.q.shape[2] ** -0.5, **options}
    expected = ragged_paged_attention_oracle(*batch.args, **options)
    for implementation in implementations:
        for hint in hints:
            out = attend(implementation, batch, max_query_len=hint, **options)
            assert out.dtype == batch.q.dtype
            assert_close(out, expected, batch.q.dtype, f"{implementation} {hint=}", slack)
            assert not out[batch.num_tokens :].any(), f"{implementation}: padding rows are not zero"


def batch_of(lengths, heads=(9, 3), head_dim=64, **options):
    return make_ragged_batch(lengths, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, **options)


def test_oracle_reads_what_the_builder_wrote():
    batch = batch_of(SMALL, shared_prefix_len=0, page_size=8)
    out = ragged_paged_attention_oracle(*batch.args)
    keys, values, q = batch.keys[0], batch.values[0], batch.q[4].astype(np.float64)  # last query of sequence 0
    for head in range(9):
        weights = np.exp(keys[:, head // 3] @ q[head])
        np.testing.assert_allclose(out[4, head], weights @ values[:, head // 3] / weights.sum(), rtol=1e-6)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 128, "soft_cap": 50.0}], ids=str)
@pytest.mark.parametrize("lengths", [B3, KV16_PREFILL, KV16_MIXED], ids=["b3", "prefill", "mixed"])
def test_long_ragged_batches(lengths, options, dtype):
    batch = batch_of(lengths, dtype=dtype, shared_prefix_len=64, sharpness=4.0)
    if lengths is B3:
        check(batch, ("xla", "reference"), **options)
    else:
        check(batch, ("xla",), (None,) if dtype == F32 else (251,), **options)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    "lengths, options",
    [
        (KV16_DECODE, {}),
        (KV16_DECODE, {"sliding_window": 512, "soft_cap": 20.0}),
        (EDGES, {}),
        (WINDOW_EDGES, {"sliding_window": 128}),
        (SMALL[1:2] + SMALL[3:4], {"sliding_window": 5}),
    ],
    ids=["kv16", "kv16_window", "edges", "window_edges", "small"],
)
def test_decode(lengths, options, dtype):
    batch = batch_of(lengths, dtype=dtype, sharpness=4.0, shared_prefix_len=16)
    check(batch, ("xla",), (1, None), **options)


@pytest.mark.parametrize(
    "heads, head_dim, page_size, dtype, options",
    [
        ((32, 8), 128, 1, F32, {"sliding_window": 5}),
        ((32, 16), 64, 8, BF16, {"soft_cap": 20.0}),
        ((16, 2), 80, 16, F32, {"soft_cap": 5.0}),
        ((4, 4), 240, 32, BF16, {"sliding_window": 5}),
        ((8, 1), 256, 33, F32, {}),
        ((12, 2), 128, 64, BF16, {}),
        ((5, 1), 64, 128, F32, {"sliding_window": 1}),
        ((3, 3), 80, 256, BF16, {"soft_cap": 50.0, "sliding_window": 17}),
        ((64, 8), 64, 33, F32, {"sliding_window": 512}),
        ((9, 3), 7, 1, F16, {}),
        ((32, 32), 16, 8, F32, {"soft_cap": 20.0, "sliding_window": 16}),
    ],
    ids=str,
)
def test_heads_head_dims_and_pages(heads, head_dim, page_size, dtype, options):
    batch = batch_of(SMALL, heads, head_dim, page_size=page_size, dtype=dtype, sharpness=4.0)
    check(batch, **options)


@pytest.mark.parametrize("q_dtype, kv_dtype", [(F32, BF16), (BF16, F32), (F16, F32)], ids=str)
def test_padded_head_dim_and_mixed_dtypes(q_dtype, kv_dtype):
    batch = batch_of(SMALL, head_dim=64, padded_head_dim=128, dtype=q_dtype, kv_dtype=kv_dtype)
    check(batch)


@pytest.mark.parametrize("sharpness", [0.0, 50.0])
def test_uniform_and_sharp_softmax(sharpness):
    """Scores of hundreds, whose own rounding is 5e-5, give one key all the weight; scores of zero give a mean."""
    check(batch_of(SMALL, sharpness=sharpness), slack=1 + sharpness / 5)


def test_no_padding_at_all():
    batch = batch_of(SMALL, num_padding_tokens=0, num_padding_seqs=0, num_padding_pages=0, num_dead_pages=0)
    check(batch)


def test_empty_batch_gives_zeros():
    batch = batch_of(SMALL)
    batch.num_seqs[:] = 0
    batch.query_start_loc[:] = 0
    for implementation in ("reference", "xla"):
        for hint in (None, 1):
            assert not attend(implementation, batch, max_query_len=hint).any()


def test_sequences_without_queries_are_skipped():
    """Live sequences with no query this step, between others and at both ends."""
    check(batch_of(((0, 20), (3, 9), (0, 17), (0, 5), (1, 30), (0, 8))))
    check(batch_of(((0, 20), (1, 9), (0, 17), (1, 30), (0, 8))), hints=(1, None))


def test_context_past_int16():
    check(batch_of(((1, 33_000), (2, 32_769)), (1, 1), 8, page_size=256), ("xla",))


def test_long_uniform_context_does_not_stall_the_sum():
    """A sum kept in bf16 stalls at 256 equal weights: the mean of ones must stay 1."""
    batch = batch_of(((1, 20_000),), (1, 1), 8, page_size=256, dtype=BF16, sharpness=0.0)
    batch.kv_pages[..., 1, :] = 1
    np.testing.assert_array_equal(attend("xla", batch)[0], 1)
