"""The kernel's features compile with the real compiler."""

import math

import jax
import jax.numpy as jnp
import pytest
from test_kernels_compile import attention_args, cache_sized_copies, i32, pages_of
from tpu_compiler import compile_for

from flax_paged.ops import kv_scales_update
from flax_paged.ops.ragged_paged_attention.tpu import ragged_paged_attention_tpu
from flax_paged.ops.scales_layout import lines_shape


@pytest.mark.parametrize("path", ["decode", "mixed"])
@pytest.mark.parametrize("options", [{"attention_chunk_size": 512}, {"causal": False}], ids=str)
@pytest.mark.parametrize("chip, heads, head_dim", [("v5e", (9, 3), 64), ("v6e", (32, 8), 128), ("tpu7x", (64, 8), 64)])
def test_sinks_with(chip, heads, head_dim, options, path):
    args = attention_args(heads, head_dim, 16, "bfloat16", num_tokens=64 if path == "decode" else 256)
    max_query_len = 1 if path == "decode" else None

    def run(sinks, *args):
        return ragged_paged_attention_tpu(*args, sm_scale=0.1, sinks=sinks, max_query_len=max_query_len, **options)

    compile_for(chip, run, (jax.ShapeDtypeStruct((heads[0],), jnp.float32), *args))


def features_of(heads, num_tokens, pages_per_seq, *, with_draft):
    """All options at once that mean something together, as shapes; those of a draft mask, or those it excludes."""
    num_q_heads, num_kv_heads = heads

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    others = {"draft_mask": jax.ShapeDtypeStruct((num_tokens, 3), jnp.int32)}
    if not with_draft:
        others = {"alibi_slopes": f32(num_q_heads)}
    return others | {
        "sinks": f32(num_q_heads),
        "page_mask": jax.ShapeDtypeStruct((64, pages_per_seq), jnp.bool_),
        "k_scale": f32(num_kv_heads),
        "v_scale": f32(),
        "out_scale": f32(),
    }


# Every chip compiles every feature, every dtype of 8 bits, and both paths.
EVERYTHING = [
    ((32, 8), 128, "int8", "mixed", True),
    ((9, 3), 64, "float8_e4m3fn", "mixed", False),
    ((9, 3), 256, "float8_e5m2", "decode", True),
]


@pytest.mark.parametrize("chip", ["v5e", "v6e", "tpu7x"])
@pytest.mark.parametrize("heads, head_dim, cache, path, with_draft", EVERYTHING)
def test_all_at_once(chip, heads, head_dim, cache, path, with_draft):
    num_tokens = 64 if path == "decode" else 256
    q, _, *rest = attention_args(heads, head_dim, 16, "bfloat16", num_tokens=num_tokens)
    pages = pages_of(heads[1], head_dim, 16, cache)
    traced = features_of(heads, num_tokens, rest[1].shape[1], with_draft=with_draft)
    static = {"soft_cap": 30.0, "return_lse": True, "out_dtype": jnp.dtype(cache)}
    static |= {"max_query_len": 1 if path == "decode" else None}
    static |= {} if with_draft else {"sliding_window": 100, "attention_chunk_size": 512}

    def run(traced, *args):
        return ragged_paged_attention_tpu(*args, sm_scale=0.1, **traced, **static)

    compiled = compile_for(chip, run, (traced, q, pages, *rest))
    assert not cache_sized_copies(compiled, pages)


@pytest.mark.parametrize(
    "chip, cache, heads, head_dim",
    [("v5e", "int8", (9, 3), 64), ("v6e", "int8", (32, 8), 128), ("tpu7x", "float8_e4m3fn", (32, 8), 128)],
)
def test_a_quantized_cache_is_updated_in_place(chip, cache, heads, head_dim):
    """By the fused form: the old tokens of a group are read, and the groups written, without a copy of the cache."""
    q, _, *rest = attention_args(heads, head_dim, 16, "bfloat16", num_tokens=64)
    pages = pages_of(heads[1], head_dim, 16, cache)
    new = jax.ShapeDtypeStruct((64, heads[1], head_dim), cache)

    def run(pages, q, k, v, slot_mapping, num_slices, *rest):
        update = (k, v, slot_mapping, num_slices)
        return ragged_paged_attention_tpu(q, pages, *rest, update=update, k_scale=0.1, max_query_len=1)

    compiled = compile_for(chip, run, (pages, q, new, new, i32(3, 128), i32(1), *rest), donate_argnums=0)
    assert compiled.memory_analysis().alias_size_in_bytes >= math.prod(pages.shape)
    assert not cache_sized_copies(compiled, pages)


@pytest.mark.parametrize(
    "chip, cache, heads, head_dim, page_size, path",
    [
        ("v5e", "int8", (9, 3), 64, 128, "mixed"),
        ("v6e", "int8", (32, 8), 128, 16, "mixed"),
        ("tpu7x", "float8_e4m3fn", (32, 8), 128, 16, "decode"),
    ],
)
def test_scales_for_each_token_with_all_others(chip, cache, heads, head_dim, page_size, path):
    num_tokens = 64 if path == "decode" else 256
    q, _, *rest = attention_args(heads, head_dim, page_size, "bfloat16", num_tokens=num_tokens)
    pages = pages_of(heads[1], head_dim, page_size, cache)
    num_pages = pages.shape[0]
    scales = jax.ShapeDtypeStruct(lines_shape(num_pages, page_size, heads[1]), jnp.float32)
    traced = features_of(heads, num_tokens, rest[1].shape[1], with_draft=False) | {"kv_scales": scales}
    static = {"soft_cap": 30.0, "return_lse": True, "max_query_len": 1 if path == "decode" else None}

    def run(traced, *args):
        return ragged_paged_attention_tpu(*args, sm_scale=0.1, **traced, **static)

    compiled = compile_for(chip, run, (traced, q, pages, *rest))
    assert not cache_sized_copies(compiled, pages)
    assert not cache_sized_copies(compiled, scales)


@pytest.mark.parametrize("chip, num_kv_heads, page_size", [("v5e", 3, 128), ("tpu7x", 8, 16)])
def test_scales_for_each_token_are_updated_in_place(chip, num_kv_heads, page_size):
    scales = jax.ShapeDtypeStruct(lines_shape(4096, page_size, num_kv_heads), jnp.float32)
    new = jax.ShapeDtypeStruct((64, num_kv_heads, 1), jnp.float32)
    compiled = compile_for(chip, kv_scales_update, (scales, new, new, i32(3, 128), i32(1)), donate_argnums=0)
    assert compiled.memory_analysis().alias_size_in_bytes >= 4 * math.prod(scales.shape)
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * math.prod(scales.shape) / 4
    assert not cache_sized_copies(compiled, scales)
