import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from flax_paged.cache import CacheSpec, KVCache


def create_kv_cache(spec):
    return KVCache(jnp.zeros(spec.shape, spec.dtype))


@pytest.mark.parametrize(
    ("alignment", "padded"),
    [(1, 80), (64, 128), (128, 128)],
)
def test_bytes_reported_are_bytes_allocated(alignment, padded):
    spec = CacheSpec(3, 80, num_pages=5, page_size=7, dtype=jnp.bfloat16, head_dim_alignment=alignment)
    cache = create_kv_cache(spec)
    assert spec.padded_head_dim == padded
    assert cache[...].shape == spec.shape == (5, 7, 6, padded)
    assert cache[...].nbytes == spec.nbytes == 5 * spec.page_nbytes
    assert cache[...].dtype == spec.dtype


def test_alignment_is_one_off_tpu_and_specs_are_hashable():
    spec = CacheSpec(2, 64, 4, 16)
    assert spec.head_dim_alignment == 1
    assert hash(spec) == hash(CacheSpec(2, 64, 4, 16, "bfloat16"))


@pytest.mark.parametrize(
    "head_dim, page_size, dtype, shape",
    [
        (64, 16, jnp.bfloat16, (5, 8, 3, 2, 128)),
        (8, 16, jnp.float32, (5, 8, 3, 2, 128)),
        (80, 7, jnp.bfloat16, (5, 7, 3, 2, 128)),
        (256, 16, jnp.float32, (5, 16, 3, 2, 256)),
        (64, 7, jnp.bfloat16, (5, 7, 6, 128)),  # tokens cannot be paired
        (64, 16, jnp.float16, (5, 16, 6, 128)),  # the kernels do not read it
    ],
)
def test_layout_that_a_tpu_gets(monkeypatch, head_dim, page_size, dtype, shape):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    spec = CacheSpec(3, head_dim, 5, page_size, dtype)
    assert spec.shape == shape
    assert spec.layout == ("tpu" if len(shape) == 5 else "standard")
    assert spec.nbytes == math.prod(shape) * spec.dtype.itemsize
    standard = CacheSpec(3, head_dim, 5, page_size, dtype, layout="standard")
    assert standard.shape == (5, page_size, 6, -(-head_dim // 128) * 128)


def test_packed_cache_is_half_the_padded_one():
    packed = CacheSpec(3, 64, 100, 16, layout="tpu")
    assert packed.is_packed
    assert packed.nbytes * 2 == CacheSpec(3, 64, 100, 16, head_dim_alignment=128).nbytes
    assert packed.nbytes == CacheSpec(3, 64, 100, 16, head_dim_alignment=1).nbytes


@pytest.mark.parametrize(
    ("max_model_len", "page_size"),
    [(1, 16), (256, 16), (257, 32), (512, 32), (2048, 128), (2049, 256), (4096, 256), (8192, 256), (8193, 16)],
)
def test_choose_page_size_follows_the_vllm_rule(max_model_len, page_size):
    assert CacheSpec.choose_page_size(max_model_len) == page_size


def test_smem_rules_bound_the_block_tables():
    def table_bytes(max_model_len, max_num_seqs, page_size):
        return max_num_seqs * -(-max_model_len // page_size) * 4

    for shape in [(8192, 256), (131072, 64), (100, 3), (2048, 131072)]:
        page_size = CacheSpec.min_page_size(*shape)
        assert table_bytes(*shape, page_size) <= 512 * 1024
        assert page_size == 1 or table_bytes(*shape, page_size // 2) > 512 * 1024
    assert CacheSpec.max_num_seqs(2048, 16) == 1024
    with pytest.raises(ValueError, match="max_num_seqs=131073: expected at most 131072"):
        CacheSpec.min_page_size(2048, 131073)


def test_pages_that_fit():
    spec = CacheSpec(2, 64, 1, 16, jnp.float32)
    assert spec.page_nbytes == 16 * 4 * 64 * 4
    assert spec.pages_that_fit(10 * 3 * spec.page_nbytes - 1, num_layers=3) == 9
    assert spec.pages_that_fit(10 * 3 * spec.page_nbytes, num_layers=3) == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"head_dim": -1}, "head_dim=-1"),
        ({"page_size": 0}, "page_size=0"),
        ({"num_pages": -1}, "num_pages=-1"),
        ({"dtype": jnp.int16}, "dtype=int16"),
        ({"dtype": jnp.float32, "scales": "per_head"}, "scales='per_head', dtype=float32"),
        ({"dtype": jnp.int8, "scales": "per_page"}, "scales='per_page'"),
        ({"layout": "rows"}, "layout='rows'.: expected 'standard', 'tpu' or None"),
        ({"layout": "tpu", "page_size": 7}, "page_size=7.: expected a multiple of 2"),
        ({"layout": "tpu", "head_dim_alignment": 1}, "head_dim_alignment=1.: expected a multiple of 128"),
        ({"num_pages": 2**27, "page_size": 16}, "more than the 2147483647 that an int32"),
    ],
)
def test_impossible_specs_are_refused(change, message):
    arguments = {"num_kv_heads": 2, "head_dim": 64, "num_pages": 4, "page_size": 16} | change
    with pytest.raises(ValueError, match=message):
        CacheSpec(**arguments)


def test_a_pool_of_more_than_2_to_the_31_elements_is_planned_right():
    spec = CacheSpec(8, 128, num_pages=100_000, page_size=64, dtype=jnp.bfloat16)
    assert spec.nbytes == 100_000 * 64 * 16 * 128 * 2 > 2**33
    assert jax.eval_shape(lambda: create_kv_cache(spec)[...]).shape == spec.shape


def test_kv_cache_is_split_by_its_own_type_and_by_nnx_cache():
    module = nnx.Dict(cache=create_kv_cache(CacheSpec(1, 4, 2, 2)), weight=nnx.Param(jnp.ones(3)))
    _, params, caches, rest = nnx.split(module, nnx.Param, KVCache, ...)
    assert len(jax.tree.leaves(params)) == len(jax.tree.leaves(caches)) == 1
    assert not jax.tree.leaves(rest)
    assert len(jax.tree.leaves(nnx.state(module, nnx.Cache))) == 1


def test_a_donated_cache_says_so_and_still_prints():
    cache = create_kv_cache(CacheSpec(1, 4, 2, 2, jnp.float32))
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(cache[...]))
    assert cache.is_stale
    with pytest.raises(RuntimeError, match="stale: its array was donated to a compiled step"):
        cache[...]
    assert "donated" in repr(cache)


def test_a_quantised_cache_counts_its_scales():
    int8 = CacheSpec(3, 64, num_pages=5, page_size=16, dtype="int8")
    assert int8.scales == "per_token_head" and int8.scales_shape == (5, 16, 6, 1)
    assert int8.nbytes == 5 * 16 * 6 * (64 + 4)
    float8 = CacheSpec(3, 64, num_pages=5, page_size=16, dtype="float8_e4m3fn")
    assert float8.scales == "per_head" and float8.scales_shape is None
    assert float8.nbytes == CacheSpec(3, 64, num_pages=5, page_size=16, dtype="bfloat16").nbytes // 2
