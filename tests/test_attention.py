import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_paged.attention import PagedAttention, cache_spec_for, drop_cache, init_cache
from flax_paged.cache import CacheSpec
from flax_paged.metadata import SequenceSlice, build_metadata
from flax_paged.ops import to_standard_layout

H, KV, D = 6, 2, 8
SPEC = CacheSpec(KV, D, num_pages=8, page_size=4, dtype=jnp.float32)


def metadata_of(sequences, max_num_tokens=16):
    return build_metadata(
        sequences, page_size=4, num_pages=8, max_num_tokens=max_num_tokens, max_num_seqs=3, max_pages_per_seq=3
    )


def qkv(num_tokens=16, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return tuple(jax.random.normal(key, (num_tokens, heads, D)) for key, heads in zip(keys, (H, KV, KV), strict=True))


OPTIONS = [{}, {"sliding_window": 3}, {"soft_cap": 2.0}, {"scale": 0.7}, {"sliding_window": 5, "soft_cap": 1.0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_paged_equals_within_batch_equals_dense(options):
    """One set of numbers from the cache, from the ragged batch without a cache, and from a padded dense batch."""
    q, k, v = qkv()
    metadata = metadata_of([SequenceSlice([6, 1], 0, 7), SequenceSlice([3, 0], 0, 5)])
    paged = PagedAttention(H, KV, D, cache=SPEC, **options)(q, k, v, metadata)
    bare = PagedAttention(H, KV, D, **options)
    within = bare(q, k, v, metadata)
    dense = bare(*(jnp.stack([x[:7], jnp.pad(x[7:12], ((0, 2), (0, 0), (0, 0)))]) for x in (q, k, v)))
    np.testing.assert_allclose(paged[:12], within[:12], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(paged[:7], dense[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(paged[7:12], dense[1, :5], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(paged[12:], 0)
    np.testing.assert_array_equal(within[12:], 0)


def test_every_option_changes_the_numbers():
    q, k, v = qkv()
    metadata = metadata_of([SequenceSlice([6, 1, 2], 0, 12)])
    outs = [PagedAttention(H, KV, D, cache=SPEC, **options)(q, k, v, metadata) for options in OPTIONS]
    for i in range(len(outs)):
        for j in range(i):
            assert not np.allclose(outs[i], outs[j], atol=1e-3), (OPTIONS[i], OPTIONS[j])


@pytest.mark.parametrize("slices_in_flight", [None, 2])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_tpu_kernels_give_the_same_through_the_layer(head_dim, slices_in_flight):
    """The kernel's own code in interpret mode: fused with the cache update, and as the separate pair."""
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, head_dim - D))) for x in qkv())
    spec = CacheSpec(KV, head_dim, num_pages=8, page_size=8, dtype=jnp.float32)
    metadata = build_metadata(
        [SequenceSlice([6, 1], 0, 11), SequenceSlice([3], 0, 1)],
        page_size=8, num_pages=8, max_num_tokens=16, max_num_seqs=3, max_pages_per_seq=3,
    )  # fmt: skip
    metadata = dataclasses.replace(metadata, num_slices_per_kv_cache_update_block=slices_in_flight)
    tpu_spec = dataclasses.replace(spec, layout="tpu", head_dim_alignment=None)
    xla = PagedAttention(H, KV, head_dim, cache=spec, implementation="xla")
    kernel = PagedAttention(H, KV, head_dim, cache=tpu_spec, implementation="pallas_tpu_interpret")
    expected = xla(q, k, v, metadata)
    np.testing.assert_allclose(kernel(q, k, v, metadata), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(to_standard_layout(kernel.kv_cache[...], head_dim), xla.kv_cache[...])


def test_flat_heads_give_the_same_in_the_same_form():
    q, k, v = qkv()
    metadata = metadata_of([SequenceSlice([6, 1], 0, 7)])
    expected = PagedAttention(H, KV, D, cache=SPEC)(q, k, v, metadata)
    flat = PagedAttention(H, KV, D, cache=SPEC)(*(x.reshape(16, -1) for x in (q, k, v)), metadata)
    assert flat.shape == (16, H * D)
    np.testing.assert_array_equal(flat.reshape(16, H, D), expected)


def test_decode_continues_a_prefill():
    q, k, v = qkv()
    layer = PagedAttention(H, KV, D, cache=SPEC)
    whole = layer(q, k, v, metadata_of([SequenceSlice([6, 1, 4], 0, 9)]))
    layer = PagedAttention(H, KV, D, cache=SPEC)
    layer(q, k, v, metadata_of([SequenceSlice([6, 1, 4], 0, 8)]))
    roll = lambda x: jnp.roll(x, -8, axis=0)  # noqa: E731
    last = layer(roll(q), roll(k), roll(v), metadata_of([SequenceSlice([6, 1, 4], 8, 1)]))
    np.testing.assert_allclose(last[0], whole[8], rtol=1e-5, atol=1e-6)


def test_padding_tokens_leave_the_last_page_alone():
    layer = PagedAttention(H, KV, D, cache=SPEC)
    layer.kv_cache[...] = jnp.full(SPEC.shape, 7.0)
    layer(*qkv(), metadata_of([SequenceSlice([2], 0, 3)]))
    cache = np.array(layer.kv_cache[...])
    assert (cache[2, :3] != 7).all()
    cache[2, :3] = 7
    np.testing.assert_array_equal(cache, 7)


def test_zero_pages_and_dropped_caches_mean_dense():
    layer = PagedAttention(H, KV, D, cache=CacheSpec(KV, D, 0, 4))
    assert layer.kv_cache is None
    layer.init_cache(SPEC)
    assert layer.kv_cache[...].shape == SPEC.shape
    drop_cache(layer)
    assert layer.kv_cache is None
    assert layer(*(x[None] for x in qkv())).shape == (1, 16, H, D)


def test_free_functions_reach_every_layer():
    model = nnx.Dict(a=PagedAttention(H, KV, D), b=nnx.List([PagedAttention(H, KV, D)]))
    model.weight = nnx.Param(jnp.ones(3, jnp.bfloat16))
    spec = cache_spec_for(model, num_pages=8, page_size=4)
    assert spec.dtype == (jnp.float32 if jax.__version_info__ < (0, 12) else jnp.bfloat16)
    assert cache_spec_for(model, num_pages=8, page_size=4, dtype=jnp.bfloat16) == CacheSpec(KV, D, 8, 4, jnp.bfloat16)
    init_cache(model, spec)
    assert model.a.kv_cache[...].shape == model.b[0].kv_cache[...].shape == spec.shape
    model.c = PagedAttention(H, KV, 2 * D)
    with pytest.raises(ValueError, match="layers differ"):
        cache_spec_for(model, num_pages=8, page_size=4)
    with pytest.raises(ValueError, match="has no PagedAttention layer"):
        init_cache(nnx.Dict(), spec)


def test_packed_segments_attend_to_themselves():
    q, k, v = (x[None, :10] for x in qkv())
    layer = PagedAttention(H, KV, D)
    packed = layer(q, k, v, segment_ids=jnp.array([[1] * 6 + [2] * 4]), positions=jnp.array([[*range(6), *range(4)]]))
    np.testing.assert_allclose(packed[:, 6:], layer(q[:, 6:], k[:, 6:], v[:, 6:]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(packed[:, :6], layer(q[:, :6], k[:, :6], v[:, :6]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((6, 4, 8), {}, "num_heads=6 is not a multiple of num_kv_heads=4"),
        ((6, 0, 8), {}, "num_kv_heads=0"),
        ((6, 2, 0), {}, "head_dim=0"),
        ((6, 2, 8), {"sliding_window": 0}, "sliding_window=0"),
        ((6, 2, 8), {"soft_cap": 0.0}, "soft_cap=0.0"),
        ((6, 2, 8), {"cache": CacheSpec(3, 8, 4, 4)}, r"\(3, 8\), but the layer needs \(2, 8\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        PagedAttention(*arguments, **options)


def test_shapes_that_do_not_fit_are_refused():
    layer = PagedAttention(H, KV, D, cache=SPEC)
    q, k, v = qkv()
    metadata = metadata_of([SequenceSlice([2], 0, 3)])
    with pytest.raises(ValueError, match=r"q has shape \(15, 6, 8\); expected \[16, 6, 8\] or \[16, 48\]"):
        layer(q[:15], k, v, metadata)
    with pytest.raises(ValueError, match=r"v has shape \(16, 6, 8\)"):
        layer(q, k, q, metadata)
    with pytest.raises(ValueError, match=r"without metadata expected \[B, L, 6, 8\]"):
        layer(q, k, v)
    with pytest.raises(ValueError, match="belong to the dense form"):
        layer(q, k, v, metadata, segment_ids=jnp.zeros((1, 16), jnp.int32))


@pytest.mark.parametrize("where", ["jit", "nnx.jit", "grad"])
def test_no_tracer_is_left_behind(where):
    layer = PagedAttention(H, KV, D, cache=None if where == "grad" else SPEC)
    metadata = jax.tree.map(jnp.asarray, metadata_of([SequenceSlice([2], 0, 3)]))
    q, k, v = qkv()
    with jax.checking_leaks():
        if where == "jit":
            graphdef, state = nnx.split(layer)
            jax.jit(lambda state, q: nnx.merge(graphdef, state)(q, k, v, metadata))(state, q)
        elif where == "nnx.jit":
            nnx.jit(lambda layer, q: layer(q, k, v, metadata))(layer, q)
        else:
            gradient = jax.grad(lambda q: layer(q, k, v, metadata).sum())(q)
            assert np.isfinite(gradient).all()
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(nnx.state(layer)))
