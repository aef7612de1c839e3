"""The TPU kernels over the shapes that other kernels are tested with, in both interpret modes.

By default every list and every pair of head counts runs once with small heads or short sequences; with
FLAX_PAGED_FULL_KERNEL_LISTS=1 every list runs with every pair and several head sizes, page sizes and options.
"""

import itertools
import os

import jax.numpy as jnp
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
from tpu_interpret_tools import MODES, attend, in_layout, run

from flax_paged.ops import to_standard_layout
from flax_paged.ops.kv_cache_update.tpu import kv_cache_update_tpu

FULL = bool(os.environ.get("FLAX_PAGED_FULL_KERNEL_LISTS"))
LISTS = {
    "b3": B3,
    "kv16-decode": KV16_DECODE,
    "kv16-prefill": KV16_PREFILL,
    "kv16-mixed": KV16_MIXED,
    "decode-edges": tuple((1, n) for n in (119, 127, 128, 129, 133, 1001, 1023, 1024, 1025)),
    "window-128": tuple((1, n) for n in (256, 130, 10, 512)),
}
HEADS = ((32, 8), (32, 16), (16, 2), (4, 4), (8, 1), (12, 2), (5, 1), (3, 3), (64, 8), (9, 3), (32, 32))
SHORT = ((1, 37), (9, 20), (1, 3))


def list_cases():
    """(name, heads, head_dim, page size, dtype, options)."""
    for name in LISTS:
        window = 128 if name == "window-128" else None
        if not FULL:
            yield name, (2, 1), 64, 32, np.float32, {"sliding_window": window}
            continue
        sizes = itertools.product(HEADS, (64, 80, 128, 240, 256), (16, 128), (np.float32, BF16))
        for i, (heads, head_dim, page_size, dtype) in enumerate(sizes):
            options = {"sliding_window": window or (None, 5, 128, 512)[i % 4], "soft_cap": (None, 20.0, 50.0)[i % 3]}
            yield name, heads, head_dim, page_size, dtype, options


def check(lengths, heads, head_dim, page_size, dtype, mode, options, **blocks):
    batch = make_ragged_batch(
        lengths, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, page_size=page_size, dtype=dtype,
        padded_head_dim=-(-head_dim // 128) * 128,
    )  # fmt: skip
    is_decode = all(query_len == 1 for query_len, _ in lengths)
    options = {**options, "sm_scale": head_dim**-0.5}
    out = attend(batch, mode, max_query_len=1 if is_decode else None, **options, **blocks)
    assert_close(out, ragged_paged_attention_oracle(*batch.args, **options), dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name, heads, head_dim, page_size, dtype, options", list(list_cases()))
def test_lists(name, heads, head_dim, page_size, dtype, options, mode):
    blocks = {"num_kv_pages_per_block": 256 // page_size, "num_queries_per_block": 64}
    check(LISTS[name], heads, head_dim, page_size, dtype, mode, options, **blocks)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_pair_of_head_counts(heads, mode):
    """Decode and prefill items in one step; packed heads in bfloat16 and wide ones in float32, in turn."""
    head_dim, dtype = ((64, BF16), (80, np.float32))[HEADS.index(heads) % 2]
    check(SHORT, heads, head_dim, 8, dtype, mode, {}, num_kv_pages_per_block=16, num_queries_per_block=16)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_cache_update_of_unlike_slices(num_kv_heads, head_dim, mode):
    """Slices of 7, page, page, 1, 1, 1, 9 tokens, some of which meet within a page, in no order."""
    page_size, rng = 16, np.random.default_rng(0)
    # (first slot, length); slots 4 and 5 of page 9 are written by different slices.
    places = [(9 * 16 + 5, 7), (16, 16), (7 * 16, 16), (9 * 16 + 4, 1), (3 * 16 + 15, 1), (2, 1), (5 * 16 + 3, 9)]
    pages = rng.standard_normal((10, page_size, 2 * num_kv_heads, max(head_dim, 64))).astype(BF16)
    k, v = rng.standard_normal((2, 60, num_kv_heads, head_dim)).astype(BF16)
    columns, expected = [], pages.copy()
    free = 0
    for index in rng.permutation(len(places)):
        slot, length = places[index]
        columns.append((slot, free, length))
        for i in range(length):
            expected[(slot + i) // page_size, (slot + i) % page_size, 0::2] = k[free + i]
            expected[(slot + i) // page_size, (slot + i) % page_size, 1::2] = v[free + i]
        free += length
    columns.append((0, 0, 16))  # past the live ones
    slot_mapping = jnp.asarray(np.array(columns, np.int32).T)
    args = (in_layout(pages, head_dim), *map(jnp.asarray, (k, v, slot_mapping)), jnp.array([len(places)], jnp.int32))
    out = to_standard_layout(run(lambda p: kv_cache_update_tpu(*args, interpret=p), mode), head_dim)
    np.testing.assert_array_equal(np.asarray(out).view(np.uint16), expected.view(np.uint16))
