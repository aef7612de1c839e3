"""Every feature of the TPU kernel together with every other, in interpret mode against the float64 oracle.

By default each case turns on as many features as mean something together, so that all pairs meet somewhere; with
FLAX_PAGED_FULL_KERNEL_LISTS=1 every pair runs alone, too, and every feature with every dtype of the cache.
"""

import itertools
import os

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracle import BF16, assert_close, make_ragged_batch, ragged_paged_attention_oracle
from tpu_interpret_tools import MODES, attend

from flax_paged.ops.quantization import quantize

FULL = bool(os.environ.get("FLAX_PAGED_FULL_KERNEL_LISTS"))
H, KV, PAGE = 6, 3, 16
# One key, a page, pages and a bit, several blocks of 64 keys; blocks of 16 queries.
DECODE = ((1, 5), (1, 64), (1, 130), (1, 33), (1, 1))
MIXED = ((5, 5), (1, 77), (40, 100), (17, 60), (1, 128))
SCALES = {"k_scale": np.array([0.02, 0.04, 0.03], np.float32), "v_scale": np.array([0.03, 0.01, 0.02], np.float32)}


def page_mask_of(batch):
    """Half of the pages hidden, at random; some queries are left with none at all."""
    return np.random.default_rng(3).random(batch.block_tables.shape) < 0.5


def draft_mask_of(batch):
    """Random trees in two words: some tokens do not even see themselves."""
    return np.random.default_rng(4).integers(-(2**31), 2**31, (len(batch.q), 2)).astype(np.int32)


CACHES = {
    "f32": np.float32, "bf16": BF16, "int8": np.int8, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip
FEATURES = {
    "window": lambda batch: {"sliding_window": 21},
    "cap": lambda batch: {"soft_cap": 2.0},
    "alibi": lambda batch: {"alibi_slopes": np.linspace(0.02, 0.5, H).astype(np.float32)},
    "chunk": lambda batch: {"attention_chunk_size": 37},
    "sinks": lambda batch: {"sinks": np.linspace(-2, 4, H).astype(np.float32)},
    "encoder": lambda batch: {"causal": False},
    "page_mask": lambda batch: {"page_mask": page_mask_of(batch)},
    "draft_mask": lambda batch: {"draft_mask": draft_mask_of(batch)},
}
# A tree's drafts lie side by side, so distances between their places mean nothing.
MEANINGLESS = [{"draft_mask", other} for other in ("window", "alibi", "chunk", "encoder")]


def quantized_pages(pages, dtype):
    """Rounded with a scale for each head; what is dead stays NaN, in int8 it becomes extreme."""
    scale = np.stack([SCALES["k_scale"], SCALES["v_scale"]], axis=1).reshape(1, 1, -1, 1)
    return np.asarray(quantize(jnp.asarray(np.nan_to_num(pages, nan=1e9) if dtype == np.int8 else pages), dtype, scale))


def check(features, lengths=MIXED, head_dim=64, cache="f32", q_dtype=np.float32, mode="waits", **more):
    cache = CACHES[cache]
    is_quantized = np.dtype(cache).itemsize == 1
    batch = make_ragged_batch(
        lengths, num_q_heads=H, num_kv_heads=KV, head_dim=head_dim, page_size=PAGE, dtype=q_dtype,
        kv_dtype=np.float32 if is_quantized else cache, padded_head_dim=-(-head_dim // 128) * 128, sharpness=3.0,
    )  # fmt: skip
    options = {"sm_scale": head_dim**-0.5, **more}
    for feature in features:
        options |= FEATURES[feature](batch)
    if is_quantized:
        batch.kv_pages = quantized_pages(batch.kv_pages, cache)
        options |= SCALES
    is_decode = all(query_len == 1 for query_len, _ in lengths)
    blocks = {"num_kv_pages_per_block": 4, "num_queries_per_block": None if is_decode else 16}
    out, lse = attend(batch, mode, max_query_len=1 if is_decode else None, return_lse=True, **options, **blocks)
    expected, expected_lse = ragged_paged_attention_oracle(*batch.args, return_lse=True, **options)
    message = f"{features} {lengths} {head_dim}"
    assert_close(out, expected, q_dtype, message, slack=3)
    assert_close(lse, expected_lse, q_dtype, message, slack=3)


def combinations():
    """Names of features that go together, the largest sets of them."""
    with_draft = [f for f in FEATURES if {"draft_mask", f} not in MEANINGLESS]
    without = [f for f in FEATURES if f != "draft_mask"]
    causal = [f for f in without if f != "encoder"]
    return [*({tuple(with_draft)} - {tuple(causal)} if "draft_mask" in FEATURES else ()), tuple(causal), tuple(without)]


CASES = [
    (features, lengths, *shape)
    for i, (features, lengths) in enumerate(itertools.product(combinations(), (DECODE, MIXED)))
    for shape in [((64, "f32"), (128, "bf16"), (64, "int8"), (128, "e4m3"), (64, "e5m2"), (128, "int8"))[i % 6]]
]


def with_modes(cases):
    """Each case in both modes, or by default in one of them, in turn."""
    return [(*case, mode) for i, case in enumerate(cases) for mode in (MODES if FULL else [MODES[(i + i // 2) % 2]])]


@pytest.mark.parametrize("features, lengths, head_dim, cache, mode", with_modes(CASES))
def test_many_features_at_once(features, lengths, head_dim, cache, mode):
    check(features, lengths, head_dim, cache, mode=mode)


@pytest.mark.parametrize("cache, head_dim, lengths", [("int8", 128, DECODE), ("e5m2", 256, MIXED)])
def test_quantized_caches_and_bfloat16_queries(cache, head_dim, lengths):
    check((), lengths, head_dim, cache, BF16)


@pytest.mark.skipif(not FULL, reason="FLAX_PAGED_FULL_KERNEL_LISTS=1 runs every pair")
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("pair", [p for p in itertools.combinations(FEATURES, 2) if set(p) not in MEANINGLESS], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_every_pair(pair, lengths, mode):
    i = sum(map(ord, "".join(pair)))
    check(pair, lengths, (64, 128)[i % 2], list(CACHES)[i % 5], mode=mode)
