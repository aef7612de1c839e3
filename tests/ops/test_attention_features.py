"""Masks, scores and quantised caches: each feature alone and every pair of them, against the float64 oracle."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracle import BF16, assert_close, make_ragged_batch, ragged_paged_attention_oracle

from flax_paged.ops import kv_cache_update, ragged_paged_attention
from flax_paged.ops.quantization import QUANTIZED_DTYPES, quantize, quantize_per_head

H, KV, D, PAGE = 6, 2, 8, 4
# Hundreds of small programs are compiled here; how well does not matter.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Prefill, chunked prefill with context, decode; lengths around page and chunk boundaries; one query after another.
LENGTHS = ((9, 9), (5, 23), (1, 17), (3, 8), (1, 1), (1, 40))
SCALES = {"k_scale": np.array([0.05, 0.03], np.float32), "v_scale": np.array([0.02, 0.04], np.float32)}


def page_mask_of(batch):
    """Half of the pages hidden, at random; some queries are left with none at all."""
    return np.random.default_rng(3).random(batch.block_tables.shape) < 0.5


def draft_mask_of(batch):
    """A random tree in two words: each token sees itself and some of the step's tokens before it."""
    rng = np.random.default_rng(4)
    words = rng.integers(-(2**31), 2**31, (len(batch.q), 2)).astype(np.int32)
    for first, end in itertools.pairwise(batch.query_start_loc[: batch.num_seqs[0] + 1]):
        for row in range(first, end):
            words[row, 0] |= np.int32(1 << (row - first))
    return words


def int8_pages(batch):
    """Round the pages to int8 with a scale for each head; what is dead becomes extreme instead of NaN."""
    scale = np.stack([SCALES["k_scale"], SCALES["v_scale"]], axis=1).reshape(-1, 1)
    pages = np.clip(np.nan_to_num(batch.kv_pages / scale, nan=127), -127, 127)
    return np.round(pages).astype(np.int8)


def token_scales(batch):
    rng = np.random.default_rng(5)
    scales = rng.uniform(0.5, 2.0, (*batch.kv_pages.shape[:3], 1)).astype(np.float32)
    return np.where(np.isnan(batch.kv_pages[..., :1]), np.nan, scales)


FEATURES = {
    "sliding_window": lambda batch: {"sliding_window": 6},
    "soft_cap": lambda batch: {"soft_cap": 1.5},
    "alibi": lambda batch: {"alibi_slopes": np.linspace(0.02, 0.5, H).astype(np.float32)},
    "chunk": lambda batch: {"attention_chunk_size": 7},
    "sinks": lambda batch: {"sinks": np.linspace(-2, 3, H).astype(np.float32)},
    "encoder": lambda batch: {"causal": False},
    "page_mask": lambda batch: {"page_mask": page_mask_of(batch)},
    "draft_mask": lambda batch: {"draft_mask": draft_mask_of(batch)},
    "int8_cache": lambda batch: SCALES,
    "kv_scales": lambda batch: {"kv_scales": token_scales(batch)},
}
# A tree's drafts lie side by side, so distances between their places mean nothing (test_dispatch has the refusal).
MEANINGLESS = {("draft_mask", other) for other in ("sliding_window", "alibi", "chunk", "encoder")}
PAIRS = [
    pair
    for pair in itertools.combinations_with_replacement(FEATURES, 2)
    if pair not in MEANINGLESS and pair[::-1] not in MEANINGLESS
]


def batch_with(features, dtype=np.float32, lengths=LENGTHS):
    batch = make_ragged_batch(
        lengths, num_q_heads=H, num_kv_heads=KV, head_dim=D, page_size=PAGE, dtype=dtype, sharpness=3.0
    )
    options = {"sm_scale": D**-0.5}
    for feature in features:
        options |= FEATURES[feature](batch)
    if "int8_cache" in features:
        batch.kv_pages = int8_pages(batch)
    return batch, options


def attend(implementation, batch, **options):
    traced = {name: value for name, value in options.items() if isinstance(value, np.ndarray)}
    static = {name: value for name, value in options.items() if name not in traced}
    run = jax.jit(
        lambda args, traced: ragged_paged_attention(*args, **traced, **static, implementation=implementation),
        compiler_options=QUICK,
    )
    return run(batch.args, traced)


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_features_alone_and_in_pairs(pair):
    batch, options = batch_with(pair)
    expected, expected_lse = ragged_paged_attention_oracle(*batch.args, **options, return_lse=True)
    for implementation in ("reference", "xla"):
        out, lse = attend(implementation, batch, **options, return_lse=True)
        assert_close(out, expected, np.float32, f"{implementation} {pair}", slack=2)
        assert_close(lse, expected_lse, np.float32, f"{implementation} {pair} lse", slack=2)


@pytest.mark.parametrize("feature", FEATURES)
def test_long_decode_and_blocks_of_queries(feature):
    """Sequences of several blocks of keys, on the loop of decode, on its straight path and on that of prefill."""
    decode = batch_with([feature], lengths=((1, 150), (1, 64), (1, 65), (0, 30), (1, 1)))
    prefill = batch_with([feature], BF16, lengths=((140, 290), (1, 130), (2, 2)))
    for (batch, options), hints in ((decode, (1, None)), (prefill, (None,))):
        expected = ragged_paged_attention_oracle(*batch.args, **options)
        for hint in hints:
            out = attend("xla", batch, **options, max_query_len=hint)
            assert_close(out, expected, batch.q.dtype, f"{feature} {hint=}", slack=2)


def test_every_feature_changes_the_numbers():
    plain, options = batch_with([])
    outs = {"plain": attend("xla", plain, **options)}
    for feature in FEATURES:
        batch, options = batch_with([feature])
        outs[feature] = attend("xla", batch, **options)
    for a, b in itertools.combinations(outs, 2):
        assert {a, b} == {"plain", "int8_cache"} or not np.allclose(outs[a], outs[b], atol=1e-2), (a, b)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_cross_attention_reads_any_number_of_keys(implementation):
    """Queries of one sequence over keys of another: more queries than keys, fewer, one, and no keys at all."""
    batch, options = batch_with([], lengths=((5, 5), (2, 2), (1, 1), (3, 3)))
    encoder, _ = batch_with([], lengths=((3, 3), (30, 30), (4, 4), (1, 1)))
    batch.kv_pages, batch.block_tables = encoder.kv_pages, encoder.block_tables
    batch.seq_lens = encoder.seq_lens
    batch.seq_lens[3] = 0
    expected = ragged_paged_attention_oracle(*batch.args, causal=False, **options)
    out = attend(implementation, batch, causal=False, **options)
    assert_close(out, expected, np.float32)
    assert not np.asarray(out)[8:].any()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("out_dtype", [*QUANTIZED_DTYPES, jnp.bfloat16], ids=lambda dtype: jnp.dtype(dtype).name)
def test_output_quantisation(implementation, out_dtype):
    batch, options = batch_with([])
    expected = ragged_paged_attention_oracle(*batch.args, **options)
    is_quantized = out_dtype in QUANTIZED_DTYPES
    out_scale = np.linspace(0.01, 0.02, H).astype(np.float32) if is_quantized else None
    out = attend(implementation, batch, out_dtype=out_dtype, out_scale=out_scale, **options)
    assert out.dtype == out_dtype
    # A step of int8 is its scale; float8 e4m3 has 3 bits of mantissa, e5m2 2.
    atol = 0.51 * 0.02 if out_dtype == jnp.int8 else 1e-3
    rtol = {jnp.int8: 0, jnp.float8_e4m3fn: 2**-4, jnp.float8_e5m2: 2**-3, jnp.bfloat16: 1e-2}[out_dtype]
    scale = out_scale[None, :, None] if is_quantized else 1.0
    # Two heads of 8 may exceed the range of int8 at this scale: they must saturate, not wrap.
    limit = 127 * scale if out_dtype == jnp.int8 else np.inf
    np.testing.assert_allclose(
        np.asarray(out).astype(np.float64) * scale, np.clip(expected, -limit, limit), rtol=rtol, atol=atol
    )


def test_scales_are_traced():
    batch, _ = batch_with(["int8_cache"])
    run = jax.jit(lambda args, k, v: ragged_paged_attention(*args, k_scale=k, v_scale=v, implementation="xla"))
    first = run(batch.args, 0.1, 0.2)
    second = run(batch.args, 0.1, 0.4)
    assert run._cache_size() == 1
    np.testing.assert_allclose(2 * np.asarray(first), second, rtol=1e-5)


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES, ids=lambda dtype: jnp.dtype(dtype).name)
def test_rounding_and_saturation(dtype):
    """Against ml_dtypes on the host: nearest even, and the largest number instead of inf or a wrap."""
    limit = 127.0 if dtype == jnp.int8 else float(ml_dtypes.finfo(jnp.dtype(dtype)).max)
    x = np.concatenate([np.linspace(-300, 300, 2001), [1e9, -1e9, 0.5, 1.5, 2.5, -2.5, 1e-9, 0.0]]).astype(np.float32)
    scaled = np.clip(x / np.float32(0.5), -limit, limit)
    expected = (np.round(scaled) if dtype == jnp.int8 else scaled).astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(quantize(jnp.asarray(x), dtype, 0.5), expected)
    assert float(quantize(jnp.float32(np.inf), dtype)) == limit


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES, ids=lambda dtype: jnp.dtype(dtype).name)
def test_scales_of_each_token_and_head(dtype):
    x = (
        np.random.default_rng(0).standard_normal((5, 3, 16)).astype(np.float32)
        * 10.0 ** np.arange(-2, 3)[:, None, None]
    )
    x[1, 2] = 0
    values, scale = quantize_per_head(jnp.asarray(x), dtype)
    assert values.dtype == dtype and scale.shape == (5, 3, 1) and float(scale[1, 2, 0]) == 1
    error = np.abs(np.asarray(values, np.float64) * np.asarray(scale, np.float64) - x)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    step = {jnp.int8: 0.5 / 127, jnp.float8_e4m3fn: 2**-4, jnp.float8_e5m2: 2**-3}[dtype]
    assert (error <= largest * step * 1.001).all()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES, ids=lambda dtype: jnp.dtype(dtype).name)
def test_a_scale_is_applied_once_on_the_way_in_and_once_on_the_way_out(implementation, dtype):
    batch = make_ragged_batch(LENGTHS, num_q_heads=H, num_kv_heads=KV, head_dim=16, page_size=PAGE, poison=0)
    scale = 4.0 / (127 if dtype == jnp.int8 else 448)
    scales = {"k_scale": np.array([scale, 2 * scale], np.float32), "v_scale": np.array([3 * scale, scale], np.float32)}
    pages = np.zeros(batch.kv_pages.shape, jnp.dtype(dtype))
    written = kv_cache_update(pages, *batch.update_args[1:], **scales, implementation=implementation)
    by_head = np.stack([scales["k_scale"], scales["v_scale"]], axis=1).reshape(1, 1, -1, 1)
    stored = np.asarray(written).astype(np.float64) * by_head
    step_tokens = batch.kv_pages - batch.kv_pages_before  # this step's tokens, zero elsewhere
    tolerance = 0.51 * by_head if dtype == jnp.int8 else np.abs(step_tokens) * 2.0**-3 + by_head
    assert (np.abs(stored - step_tokens) <= tolerance).all()
    out = ragged_paged_attention(batch.q, written, *batch.args[2:], **scales, implementation=implementation)
    batch.kv_pages = np.asarray(written)
    assert_close(out, ragged_paged_attention_oracle(*batch.args, **scales), np.float32)
