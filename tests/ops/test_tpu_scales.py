"""Scales for each token and KV head in the TPU kernel, in interpret mode against the float64 oracle; and their lines.

With FLAX_PAGED_FULL_KERNEL_LISTS=1 they meet every other option alone, on every path and dtype.
"""

import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracle import BF16, assert_close, make_ragged_batch, ragged_paged_attention_oracle
from tpu_interpret_tools import MODES, attend

from flax_paged import CacheSpec, PagedAttention
from flax_paged.metadata import SequenceSlice, build_metadata
from flax_paged.ops import (
    kv_cache_update,
    kv_scales_update,
    quantize,
    ragged_paged_attention,
    to_standard_layout,
    to_tpu_layout,
)
from flax_paged.ops.quantization import largest_value
from flax_paged.ops.scales_layout import to_scale_lines, to_standard_scales

FULL = bool(os.environ.get("FLAX_PAGED_FULL_KERNEL_LISTS"))
# Query heads, KV heads, page size: lines of one page each; heads whose groups cross the ends of lines; one head.
PAGES = {"16/8": (16, 8, 16), "6/3": (6, 3, 128), "4/1": (4, 1, 128)}
# One key, a page, pages and a bit, several blocks; blocks of 16 queries.
DECODE = ((1, 5), (1, 64), (1, 130), (1, 33), (1, 1))
MIXED = ((5, 5), (1, 77), (40, 100), (17, 60), (1, 128))
LONG_DECODE = ((1, 5), (1, 256), (1, 700), (1, 1))
LONG_MIXED = ((5, 5), (1, 300), (20, 530), (17, 60))
CACHES = {"int8": np.int8, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
FEATURES = {
    "window": lambda batch: {"sliding_window": 21},
    "cap": lambda batch: {"soft_cap": 2.0},
    "alibi": lambda batch: {"alibi_slopes": np.linspace(0.02, 0.5, batch.q.shape[1]).astype(np.float32)},
    "chunk": lambda batch: {"attention_chunk_size": 37},
    "sinks": lambda batch: {"sinks": np.linspace(-2, 4, batch.q.shape[1]).astype(np.float32)},
    "encoder": lambda batch: {"causal": False},
    "page_mask": lambda batch: {"page_mask": np.random.default_rng(3).random(batch.block_tables.shape) < 0.5},
    "draft_mask": lambda batch: {
        "draft_mask": np.random.default_rng(4).integers(-(2**31), 2**31, (len(batch.q), 2)).astype(np.int32)
    },
    "per_head": lambda batch: {
        name: np.linspace(low, 1.5, batch.kv_pages.shape[2] // 2).astype(np.float32)
        for name, low in (("k_scale", 0.5), ("v_scale", 2.0))
    },
}
MEANINGLESS = [{"draft_mask", other} for other in ("window", "alibi", "chunk", "encoder")]
WITH_DRAFTS = ("cap", "sinks", "page_mask", "draft_mask", "per_head")
WITHOUT = ("window", "cap", "alibi", "chunk", "sinks", "page_mask", "per_head")
ENCODER = ("window", "cap", "alibi", "sinks", "encoder", "per_head")


def quantized(pages, dtype):
    """Pages rounded with a scale for each token and head, and the scales: NaN where they are dead."""
    largest = np.abs(pages).max(axis=3, keepdims=True)
    scales = np.where(largest == 0, 1.0, largest / largest_value(dtype)).astype(np.float32)
    numbers = np.nan_to_num(pages, nan=1e9) if dtype == np.int8 else pages
    return np.asarray(quantize(jnp.asarray(numbers), dtype, np.nan_to_num(scales, nan=1.0))), scales


def check(features, lengths, heads, head_dim, cache, q_dtype=np.float32, mode="waits"):
    num_q_heads, num_kv_heads, page_size = PAGES[heads]
    batch = make_ragged_batch(
        lengths, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size,
        dtype=q_dtype, kv_dtype=np.float32, padded_head_dim=-(-head_dim // 128) * 128, sharpness=3.0,
    )  # fmt: skip
    batch.kv_pages, kv_scales = quantized(batch.kv_pages, CACHES[cache])
    assert np.isnan(kv_scales).any()
    options = {"sm_scale": head_dim**-0.5}
    for feature in features:
        options |= FEATURES[feature](batch)
    is_decode = all(query_len == 1 for query_len, _ in lengths)
    blocks = {"num_kv_pages_per_block": 64 // page_size or 1, "num_queries_per_block": None if is_decode else 16}
    lines = to_scale_lines(jnp.asarray(kv_scales))
    out, lse = attend(
        batch, mode, kv_scales=lines, max_query_len=1 if is_decode else None, return_lse=True, **options, **blocks
    )  # fmt: skip
    expected, expected_lse = ragged_paged_attention_oracle(
        *batch.args, return_lse=True, kv_scales=kv_scales, **options
    )  # fmt: skip
    message = f"{features} {lengths} {heads} {head_dim} {cache}"
    assert_close(out, expected, q_dtype, message, slack=3)
    assert_close(lse, expected_lse, q_dtype, message, slack=3)
    assert not np.asarray(out, np.float32)[sum(query_len for query_len, _ in lengths) :].any()


CASES = [
    ((), DECODE, "16/8", 128, "int8", np.float32, "waits"),
    ((), LONG_MIXED, "6/3", 64, "int8", BF16, "races"),
    ((), LONG_DECODE, "6/3", 128, "e5m2", BF16, "races"),
    ((), LONG_MIXED, "4/1", 128, "int8", np.float32, "waits"),
    (WITHOUT, DECODE, "16/8", 64, "e4m3", np.float32, "races"),
    (WITHOUT, MIXED, "16/8", 128, "int8", np.float32, "waits"),
    (WITH_DRAFTS, LONG_DECODE, "6/3", 64, "int8", np.float32, "waits"),
    (WITH_DRAFTS, MIXED, "16/8", 64, "e5m2", np.float32, "races"),
    (ENCODER, MIXED, "16/8", 64, "int8", np.float32, "waits"),
]


@pytest.mark.parametrize("features, lengths, heads, head_dim, cache, q_dtype, mode", CASES)
def test_scales_of_tokens(features, lengths, heads, head_dim, cache, q_dtype, mode):
    check(features, lengths, heads, head_dim, cache, q_dtype, mode)


@pytest.mark.skipif(not FULL, reason="FLAX_PAGED_FULL_KERNEL_LISTS=1 runs every pair")
@pytest.mark.parametrize("heads, lengths", [(h, x) for h in PAGES for x in (
    (DECODE, MIXED) if h == "16/8" else (LONG_DECODE, LONG_MIXED))])  # fmt: skip
@pytest.mark.parametrize("feature", [None, *FEATURES])
@pytest.mark.parametrize("mode", MODES)
def test_scales_of_tokens_with_each_option(heads, lengths, feature, mode):
    i = sum(map(ord, f"{heads}{feature}{len(lengths)}"))
    check((feature,) if feature else (), lengths, heads, (64, 128)[i % 2], list(CACHES)[i % 3], mode=mode)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_portable_implementations_read_lines(implementation):
    batch = make_ragged_batch(LONG_MIXED, num_q_heads=6, num_kv_heads=3, head_dim=24, page_size=128)
    pages, scales = quantized(batch.kv_pages, np.int8)
    args = [pages, *batch.args[2:]]
    expected = ragged_paged_attention_oracle(batch.q, *args, kv_scales=scales)
    lines = to_scale_lines(jnp.asarray(scales))
    args[0] = to_tpu_layout(jnp.asarray(pages), 24)
    out = ragged_paged_attention(batch.q, *args, kv_scales=lines, implementation=implementation)
    assert_close(out, expected, np.float32)


@pytest.mark.parametrize("num_kv_heads, page_size", [(8, 16), (3, 128), (5, 128), (1, 128), (40, 16), (64, 8)])
def test_lines_are_written_like_standard_scales(num_kv_heads, page_size):
    """Bit for bit, whatever the lines hold and the neighbours bring."""
    rng = np.random.default_rng(0)
    old = rng.standard_normal((6, page_size, 2 * num_kv_heads, 1)).astype(np.float32)
    old[2] = np.nan
    k, v = (rng.standard_normal((20, num_kv_heads, 1)).astype(np.float32) for _ in range(2))
    k[3], v[9] = np.inf, np.nan
    # Two slices in a page, one that begins and ends within groups, tokens that are not written, a dead column.
    slot_mapping = np.array([[5 * page_size + 3, 2 * page_size, 5 * page_size, 7], [0, 5, 14, 0], [5, 8, 2, 9]])
    update = (k, v, slot_mapping.astype(np.int32), np.array([3], np.int32))
    expected = kv_cache_update(old, *update, implementation="reference")
    got = to_standard_scales(kv_scales_update(to_scale_lines(jnp.asarray(old)), *update), num_kv_heads)
    np.testing.assert_array_equal(np.asarray(got).view(np.int32), np.asarray(expected).view(np.int32))
    same = kv_scales_update(old, *update)
    np.testing.assert_array_equal(np.asarray(same).view(np.int32), np.asarray(expected).view(np.int32))


@pytest.mark.parametrize("head_dim, dtype", [(64, jnp.int8), (128, jnp.float8_e4m3fn)])
def test_the_layer_writes_and_reads_them_by_the_kernel(head_dim, dtype):
    """A prefill, and a decode that writes into a group of tokens and a line that others share."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((16, heads, head_dim)).astype(np.float32) for heads in (8, 4, 4))
    layers = {}
    for implementation, layout in (("xla", "standard"), ("pallas_tpu_interpret", "tpu")):
        spec = CacheSpec(4, head_dim, 8, 32, dtype, scales="per_token_head", layout=layout)
        layers[implementation] = PagedAttention(8, 4, head_dim, cache=spec, implementation=implementation)
        layers[implementation].kv_scales[...] = jnp.full(spec.scales_shape, jnp.nan)
    xla, kernel = layers.values()
    assert kernel.kv_scales[...].shape == (8, 1, 2, 128)
    for slices in ([SequenceSlice([6], 0, 9), SequenceSlice([3], 0, 2)], [SequenceSlice([6], 9, 1)]):
        metadata = build_metadata(
            slices, page_size=32, num_pages=8, max_num_tokens=16, max_num_seqs=3, max_pages_per_seq=3
        )  # fmt: skip
        expected, out = (layer(q, k, v, metadata) for layer in layers.values())
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(to_standard_scales(kernel.kv_scales[...], 4), xla.kv_scales[...])
    pools = (np.asarray(to_standard_layout(x.kv_cache[...], head_dim)) for x in (xla, kernel))
    np.testing.assert_array_equal(*(pool.view(np.int8)[..., :head_dim] for pool in pools))


@pytest.mark.parametrize("num_shards, shape", [(1, (5, 2, 2, 128)), (2, (5, 2, 2, 128)), (4, (5, 32, 16, 1))])
def test_the_spec_takes_lines_where_each_device_fills_them(num_shards, shape):
    spec = CacheSpec(8, 64, num_pages=5, page_size=32, dtype="int8", layout="tpu")
    assert spec.scales_shape_for(num_shards) == shape
    assert spec.nbytes == 5 * 32 * 8 * (128 + 8)
    assert CacheSpec(8, 64, 5, 32, "int8", layout="standard").scales_shape == (5, 32, 16, 1)


def test_scales_that_fill_no_lines_are_for_xla():
    """A page of 8 tokens and 2 heads: `xla` reads it, and the kernel, asked for by name, says what it needs."""
    spec = CacheSpec(2, 64, 4, 8, "int8", layout="tpu")
    metadata = build_metadata(
        [SequenceSlice([1], 0, 5)], page_size=8, num_pages=4, max_num_tokens=8, max_num_seqs=1, max_pages_per_seq=1
    )
    q, k, v = (jnp.ones((8, heads, 64)) for heads in (4, 2, 2))
    layer = PagedAttention(4, 2, 64, cache=spec, implementation="xla")
    np.testing.assert_allclose(layer(q, k, v, metadata)[:5], 1, rtol=1e-2)
    layer = PagedAttention(4, 2, 64, cache=spec, implementation="pallas_tpu_interpret")
    with pytest.raises(NotImplementedError, match="page_size [*] num_kv_heads is a multiple of 128"):
        layer(q, k, v, metadata)


def test_scales_of_another_shape_are_refused():
    batch = make_ragged_batch(DECODE, num_q_heads=8, num_kv_heads=8, head_dim=128, page_size=16)
    pages = to_tpu_layout(jnp.zeros(batch.kv_pages.shape, jnp.int8), 128)
    for shape in ((len(pages), 2, 2, 128), (len(pages) + 1, 1, 2, 128), (len(pages), 16, 8, 1)):
        with pytest.raises(ValueError, match="kv_scales has shape"):
            ragged_paged_attention(batch.q, pages, *batch.args[2:], kv_scales=jnp.ones(shape))
    lines = jax.ShapeDtypeStruct((len(pages), 1, 2, 128), jnp.float32)
    with pytest.raises(NotImplementedError, match="of an int8 or float8 cache"):
        jax.eval_shape(
            lambda lines: ragged_paged_attention(
                *batch.args, kv_scales=lines, implementation="pallas_tpu_interpret"
            ), lines
        )  # fmt: skip
