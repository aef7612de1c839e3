"""The kernels compile for every TPU generation with the real compiler, in place and within their budgets.

FLAX_PAGED_FULL_TPU_MATRIX=1 runs the whole matrices (900 compilations and more), the default covering samples of them.
"""

import itertools
import math
import os

import jax
import jax.numpy as jnp
import pytest
from tpu_compiler import TOPOLOGIES, compile_for

from flax_paged.cache import CacheSpec
from flax_paged.ops.kv_cache_update.tpu import kv_cache_update_tpu
from flax_paged.ops.ragged_paged_attention.block_sizes import padded_rows
from flax_paged.ops.ragged_paged_attention.tpu import ragged_paged_attention_tpu

CHIPS = tuple(TOPOLOGIES)
HEADS = ((32, 8), (9, 3), (64, 8), (8, 1), (16, 16))
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 64, 128)
DTYPES = ("bfloat16", "float32")
PATHS = ("decode", "mixed")
MIB = 1024 * 1024
IS_WHOLE = bool(os.environ.get("FLAX_PAGED_FULL_TPU_MATRIX"))


def matrix():
    if IS_WHOLE:
        return list(itertools.product(CHIPS, HEADS, HEAD_DIMS, PAGE_SIZES, DTYPES, PATHS))
    # Every value on every chip, and most pairs of values somewhere.
    return [
        (chip, heads, HEAD_DIMS[(h + c) % 3], PAGE_SIZES[(h + 2 * c) % 3], DTYPES[(h + c) % 2], PATHS[(h + c // 2) % 2])
        for (c, chip), (h, heads) in itertools.product(enumerate(CHIPS), enumerate(HEADS))
    ]


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def pages_of(num_kv_heads, head_dim, page_size, dtype, layout=None, num_pages=4096):
    """The cache that a TPU gets; "tpu" has no packed heads in pages of an odd size."""
    layout = layout or ("standard" if head_dim <= 64 and page_size % 2 else "tpu")
    spec = CacheSpec(num_kv_heads, head_dim, num_pages, page_size, dtype, head_dim_alignment=128, layout=layout)
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype)


def attention_args(heads, head_dim, page_size, dtype, *, num_tokens, num_seqs=64, pages_per_seq=None, layout=None):
    num_q_heads, num_kv_heads = heads
    return (
        jax.ShapeDtypeStruct((num_tokens, num_q_heads, head_dim), dtype),
        pages_of(num_kv_heads, head_dim, page_size, dtype, layout),
        i32(num_seqs),
        i32(num_seqs, pages_per_seq or 4096 // page_size),
        i32(num_seqs + 1),
        i32(1),
    )


def attention(path, **options):
    max_query_len = 1 if path == "decode" else None
    return lambda *args: ragged_paged_attention_tpu(*args, sm_scale=0.1, max_query_len=max_query_len, **options)


@pytest.mark.parametrize("chip, heads, head_dim, page_size, dtype, path", matrix())
def test_attention(chip, heads, head_dim, page_size, dtype, path):
    args = attention_args(heads, head_dim, page_size, dtype, num_tokens=64 if path == "decode" else 1024)
    compile_for(chip, attention(path), args)


@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
@pytest.mark.parametrize("options", [{"sliding_window": 128}, {"soft_cap": 30.0}], ids=str)
def test_window_and_cap(chip, options):
    args = attention_args((32, 8), 128, 16, "bfloat16", num_tokens=256)
    compile_for(chip, attention("mixed", **options), args)


@pytest.mark.parametrize("chip", ["v4", "v6e"])
@pytest.mark.parametrize("page_size, head_dim", [(1, 128), (8, 80), (33, 128), (256, 240)])
def test_odd_pages_and_heads(chip, page_size, head_dim):
    args = attention_args((16, 4), head_dim, page_size, "bfloat16", num_tokens=64, pages_per_seq=2048 // page_size)
    compile_for(chip, attention("decode"), args)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("path", PATHS)
def test_page_table_larger_than_smem(chip, path):
    """256 sequences of 2048 pages: a table of 2 MiB, twice the core's SMEM."""
    args = attention_args((8, 2), 128, 16, "bfloat16", num_tokens=256, num_seqs=256, pages_per_seq=2048)
    compile_for(chip, attention(path), args)


@pytest.mark.parametrize("chip", ["v4", "v6e"])
@pytest.mark.parametrize("heads, head_dim", [((32, 8), 128), ((9, 3), 64)])
def test_attention_over_the_standard_layout(chip, heads, head_dim):
    args = attention_args(heads, head_dim, 16, "bfloat16", num_tokens=64, layout="standard")
    compile_for(chip, attention("decode"), args)


def cache_sized_copies(compiled, pages):
    """Lines of the compiled program that copy a buffer of the cache's shape, whatever its layout."""
    dims = "[" + ",".join(map(str, pages.shape)) + "]"
    lines = compiled.as_text().splitlines()
    return [line for line in lines if dims in line and (" copy(" in line or " copy-start(" in line)]


# By default each number of heads on one chip a head_dim, and both chips of each number.
UPDATES = [
    (chip, head_dim, num_kv_heads)
    for (c, chip), (d, head_dim), num_kv_heads in itertools.product(
        enumerate(("v5e", "tpu7x")), enumerate((64, 128)), range(1, 17)
    )
    if IS_WHOLE or (c + d + num_kv_heads) % 2
]


@pytest.mark.parametrize("chip, head_dim, num_kv_heads", UPDATES)
def test_cache_update_is_in_place_for_every_number_of_heads(chip, num_kv_heads, head_dim):
    dtype = "bfloat16" if num_kv_heads % 4 else "float32"
    pages = pages_of(num_kv_heads, head_dim, 16, dtype)
    new = jax.ShapeDtypeStruct((64, num_kv_heads, head_dim), dtype)
    compiled = compile_for(chip, kv_cache_update_tpu, (pages, new, new, i32(3, 128), i32(1)), donate_argnums=0)
    assert compiled.memory_analysis().alias_size_in_bytes >= math.prod(pages.shape) * pages.dtype.itemsize
    assert not cache_sized_copies(compiled, pages)


STEPS = [
    *[(chip, (32, 8), 128, True) for chip in CHIPS],
    *[(chip, (32, 8), 128, False) for chip in (CHIPS if IS_WHOLE else ("v4", "tpu7x"))],
    *[("v5e", heads, 64, True) for heads in ((9, 3), (5, 1), (12, 2))],
    *[("v6e", heads, 64, True) for heads in (((9, 3), (5, 1), (12, 2)) if IS_WHOLE else ((9, 3),))],
    ("v5e", (9, 3), 128, False),
]


@pytest.mark.parametrize("chip, heads, head_dim, is_fused", STEPS)
def test_decoder_step_updates_its_cache_in_place(chip, heads, head_dim, is_fused):
    """Eight layers, donated caches: one copy of the cache in memory, and nothing of its shape is copied."""
    num_layers, num_tokens, hidden = 8, 64, 1024
    num_q_heads, num_kv_heads = heads
    num_heads = num_q_heads + 2 * num_kv_heads
    shape = jax.ShapeDtypeStruct
    _, pages, *metadata = attention_args(heads, head_dim, 16, "bfloat16", num_tokens=num_tokens)
    weights = [
        (shape((hidden, num_heads * head_dim), "bfloat16"), shape((num_q_heads * head_dim, hidden), "bfloat16"))
    ] * num_layers  # fmt: skip

    def step(caches, weights, x, slot_mapping, num_slices, *metadata):
        updated = []
        for cache, (w_in, w_out) in zip(caches, weights, strict=True):
            heads = (x @ w_in).reshape(num_tokens, num_heads, head_dim)
            q, k, v = jnp.split(heads, (num_q_heads, num_q_heads + num_kv_heads), axis=1)
            options = {"max_query_len": 1, "sm_scale": head_dim**-0.5}
            if is_fused:
                update = (k, v, slot_mapping, num_slices)
                out, cache = ragged_paged_attention_tpu(q, cache, *metadata, update=update, **options)
            else:
                cache = kv_cache_update_tpu(cache, k, v, slot_mapping, num_slices)
                out = ragged_paged_attention_tpu(q, cache, *metadata, **options)
            x = x + out.reshape(num_tokens, -1) @ w_out
            updated.append(cache)
        return x, updated

    args = ([pages] * num_layers, weights, shape((num_tokens, hidden), "bfloat16"), i32(3, 128), i32(1), *metadata)
    compiled = compile_for(chip, step, args, donate_argnums=0)
    memory = compiled.memory_analysis()
    # Of each layer: q, the result, the new K and V, twice; padded to whole tiles. A layer's cache is far larger.
    rows = 2 * padded_rows(num_q_heads) + 2 * padded_rows(2 * num_kv_heads)
    activation_bytes = num_layers * num_tokens * rows * 128 * 2
    assert memory.alias_size_in_bytes >= num_layers * math.prod(pages.shape) * 2
    assert memory.temp_size_in_bytes < MIB + activation_bytes
    assert not cache_sized_copies(compiled, pages)
