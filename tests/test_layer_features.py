"""The features of `PagedAttention`: its paged form against its dense form, and both against transformers' layers."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from flax_paged import CacheSpec, CompiledStep, PagedAttention
from flax_paged.attention import cache_spec_for, init_cache
from flax_paged.cache import KVCache, KVScale
from flax_paged.calibration import calibrate_kv_scales
from flax_paged.metadata import CrossSlice, SequenceSlice, build_cross_metadata, build_metadata

H, KV, D = 6, 2, 8
FEATURES = {
    "sliding_window": {"sliding_window": 3},
    "soft_cap": {"soft_cap": 1.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi_slopes": np.linspace(0.1, 0.6, H)},
    "chunk": {"attention_chunk_size": 4},
    "encoder": {"attention_type": "encoder"},
}
PAIRS = list(itertools.combinations_with_replacement(FEATURES, 2))


def spec_of(dtype=jnp.float32, **options):
    return CacheSpec(KV, D, num_pages=8, page_size=4, dtype=dtype, **options)


def layer_of(cache=None, **options):
    layer = PagedAttention(H, KV, D, cache=cache, **options)
    if layer.sinks is not None:
        layer.sinks[...] = jnp.linspace(-1, 2, H)
    return layer


def metadata_of(*sequences, max_num_tokens=16):
    return build_metadata(
        [SequenceSlice(*s) for s in sequences],
        page_size=4, num_pages=8, max_num_tokens=max_num_tokens, max_num_seqs=3, max_pages_per_seq=3,
    )  # fmt: skip


def qkv(num_tokens=16, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return tuple(jax.random.normal(key, (num_tokens, heads, D)) for key, heads in zip(keys, (H, KV, KV), strict=True))


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_paged_equals_dense(pair):
    options = FEATURES[pair[0]] | FEATURES[pair[1]]
    q, k, v = qkv()
    paged, bare = layer_of(spec_of(), **options), layer_of(**options)
    metadata = metadata_of(([6, 1], 0, 7), ([3, 0], 0, 5))
    out = paged(q, k, v, metadata)
    np.testing.assert_allclose(out, bare(q, k, v, metadata), rtol=1e-5, atol=1e-6)
    dense = bare(*(x[None, :7] for x in (q, k, v)))[0]
    np.testing.assert_allclose(out[:7], dense, rtol=1e-5, atol=1e-6)
    if "encoder" not in pair:  # and token by token
        steps = layer_of(spec_of(), **options)
        for t in range(7):
            one = steps(*(x[t : t + 1] for x in (q, k, v)), metadata_of(([6, 1], t, 1), max_num_tokens=1))
            np.testing.assert_allclose(one[0], dense[t], rtol=1e-5, atol=1e-6)


def test_cross_attention_writes_keys_once_and_reads_them_often():
    q, k, v = qkv()
    layer = layer_of(spec_of(), attention_type="encoder_decoder")
    common = {"page_size": 4, "num_pages": 8, "max_num_seqs": 3, "max_pages_per_seq": 3}
    slices = [CrossSlice([6, 1], 7, 3, True), CrossSlice([2], 2, 5, True)]
    first = build_cross_metadata(slices, max_num_tokens=10, max_num_keys=12, **common)
    out = layer(q[:10], k[:12], v[:12], first)
    reads = [s._replace(writes_keys=False) for s in slices]
    later = build_cross_metadata(reads, max_num_tokens=10, max_num_keys=0, **common)
    again = layer(q[:10], None, None, later)
    dense = layer_of(attention_type="encoder_decoder")
    for queries, keys in ((slice(0, 3), slice(0, 7)), (slice(3, 8), slice(7, 9))):
        expected = dense(q[None, queries], k[None, keys], v[None, keys])[0]
        np.testing.assert_allclose(out[queries], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(out[queries], again[queries])
    assert not out[8:].any()


def test_cross_metadata_refuses_what_does_not_fit():
    common = {"page_size": 4, "num_pages": 8, "max_num_tokens": 4, "max_num_keys": 4, "max_num_seqs": 1}
    common["max_pages_per_seq"] = 2
    for slices, message in (
        ([CrossSlice([1], 3, 5)], "max_num_tokens=4"),
        ([CrossSlice([1, 2], 5, 1, True)], "max_num_keys=4"),
        ([CrossSlice([1], 5, 1)], "need 2"),
        ([CrossSlice([9], 3, 1)], "page id 9"),
        ([CrossSlice([1], 3, 1)] * 2, "max_num_seqs=1"),
        ([CrossSlice([1], 3, -1)], "num_queries=-1"),
    ):
        with pytest.raises(ValueError, match=message):
            build_cross_metadata(slices, **common)


class Pair(nnx.Module):
    """Two layers of one cache; the second has its own queries."""

    def __init__(self, cache=None):
        self.first = PagedAttention(H, KV, D, cache=cache)
        self.second = PagedAttention(H, KV, D, kv_sharing_source=self.first)

    def __call__(self, q, k, v, metadata=None):
        return self.first(q, k, v, metadata) + self.second(2 * q, k, v, metadata)


def test_a_layer_that_shares_a_cache_reads_it_and_never_writes():
    q, k, v = qkv()
    metadata = metadata_of(([6, 1], 0, 7))
    pair = Pair()
    init_cache(pair, cache_spec_for(pair, num_pages=8, page_size=4))
    assert len(jax.tree.leaves(nnx.state(pair, KVCache))) == 1
    out = pair(q, k, v, metadata)
    np.testing.assert_allclose(out, Pair()(q, k, v, metadata), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out[:7], Pair()(*(x[None, :7] for x in (q, k, v)))[0], rtol=1e-5, atol=1e-6)
    before = np.asarray(pair.first.kv_cache[...])
    pair.second(q, k + 1, v + 1, metadata)
    np.testing.assert_array_equal(pair.first.kv_cache[...], before)
    np.testing.assert_allclose(pair.second(q, None, None, metadata), pair.first(q, k, v, metadata), rtol=1e-6)
    step = CompiledStep(pair)
    np.testing.assert_allclose(step(q, k, v, metadata), out, rtol=1e-5, atol=1e-6)


# A stored number of 8 bits differs from the number by half of its last place, and the weights of a softmax too.
@pytest.mark.parametrize(
    "dtype, scales, tolerance",
    [("int8", "per_token_head", 0.02), ("int8", "per_head", 0.04), ("float8_e4m3fn", "per_token_head", 0.2),
     ("float8_e4m3fn", "per_head", 0.2), ("float8_e5m2", None, 0.4)],
)  # fmt: skip
def test_a_quantised_cache_is_near_the_float_one(dtype, scales, tolerance):
    q, k, v = qkv()
    spec = spec_of(dtype, scales=scales)
    layer, exact = layer_of(spec), layer_of(spec_of())
    assert layer.kv_cache[...].dtype == jnp.dtype(dtype)
    if layer.k_scale is not None:
        layer.k_scale[...] = layer.v_scale[...] = jnp.full(KV, 4 / (127 if dtype == "int8" else 448))
    metadata = metadata_of(([6, 1], 0, 7), ([3, 0], 0, 5))
    out, expected = layer(q, k, v, metadata), exact(q, k, v, metadata)
    assert 0 < np.abs(out - expected).max() < tolerance
    buffers = jax.tree.leaves(nnx.state(layer, KVCache))
    assert sum(x.nbytes for x in buffers) == spec.nbytes


def test_a_quantised_cache_is_updated_in_place_and_survives_new_weights():
    layer = layer_of(spec_of("float8_e4m3fn"))
    layer.k_scale[...] = jnp.full(KV, 0.25)
    step = CompiledStep(layer)
    arguments = (*qkv(), metadata_of(([6, 1], 0, 7)))
    assert step.lower(*arguments).compile().memory_analysis().alias_size_in_bytes >= layer.kv_cache[...].nbytes
    first = step(*arguments)
    step.update_weights(layer_of())
    np.testing.assert_array_equal(step(*arguments), first)
    assert step.num_traces == 1
    CompiledStep(layer_of(spec_of())).update_weights(layer_of(spec_of("float8_e4m3fn")))  # scales of no use there


class Toy(nnx.Module):
    def __init__(self):
        self.embedding = nnx.Param(jax.random.normal(jax.random.key(0), (11, 1, D)))
        self.attention = PagedAttention(KV, KV, D)

    def __call__(self, tokens, metadata):
        x = self.embedding[...][tokens] * jnp.array([1.0, 3.0])[None, :, None]
        return self.attention(x, x, 2 * x, metadata)


def test_calibration_finds_the_largest_key_and_value_of_each_head():
    model = Toy()
    prompts = [[1, 2, 3, 4, 5], [6], [7, 1, 2]]
    spec = CacheSpec(KV, D, num_pages=3, page_size=4, dtype="int8", scales="per_head")
    calibrate_kv_scales(model, prompts, spec)
    largest = float(jnp.abs(model.embedding[...][1:8]).max())
    np.testing.assert_allclose(model.attention.k_scale[...], np.array([1, 3]) * largest / 127, rtol=1e-6)
    np.testing.assert_allclose(model.attention.v_scale[...], np.array([2, 6]) * largest / 127, rtol=1e-6)
    assert model.attention.kv_cache[...].shape == spec.shape and not model.attention.kv_cache[...].any()
    assert isinstance(model.attention.k_scale, KVScale)
    scales = np.asarray(model.attention.k_scale[...])
    init_cache(model, CacheSpec(KV, D, num_pages=9, page_size=4, dtype="int8", scales="per_head"))
    np.testing.assert_array_equal(model.attention.k_scale[...], scales)  # another pool, the same scales
    init_cache(model, CacheSpec(KV, D, num_pages=9, page_size=4, dtype="float32"))
    assert model.attention.k_scale is None
    calibrate_kv_scales(model, prompts, spec, margin=2.0)
    np.testing.assert_allclose(model.attention.k_scale[...], 2 * scales, rtol=1e-6)
    with pytest.raises(ValueError, match="margin=0"):
        calibrate_kv_scales(model, prompts, spec, margin=0)
    with pytest.raises(ValueError, match="'per_head'"):
        calibrate_kv_scales(model, prompts, CacheSpec(KV, D, 3, 4, "int8"))
    with pytest.raises(ValueError, match="at least one"):
        calibrate_kv_scales(model, [[]], spec)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_calibration_takes_the_float8_scale_of_least_error(dtype):
    model = Toy()
    prompts = [[1, 2, 3, 4, 5], [6], [7, 1, 2]]
    calibrate_kv_scales(model, prompts, CacheSpec(KV, D, num_pages=3, page_size=4, dtype=dtype))
    embedding = np.asarray(model.embedding[...])[[i for prompt in prompts for i in prompt], 0]
    for scales, factors in ((model.attention.k_scale, (1, 3)), (model.attention.v_scale, (2, 6))):
        for scale, factor in zip(np.asarray(scales[...]), factors, strict=True):
            x = factor * embedding

            def error(scale, x=x):
                return np.square((x / scale).astype(ml_dtypes.finfo(dtype).dtype).astype(np.float32) * scale - x).sum()

            first = 2 * np.abs(x).max() / float(ml_dtypes.finfo(dtype).max)  # room for twice the largest
            assert first * 0.999 < scale < 2 * first
            assert error(scale) <= 1.001 * min(error(first * 2 ** (i / 16)) for i in range(16))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"alibi_slopes": [0.1]}, "alibi_slopes has 1 numbers: expected num_heads=6"),
        ({"attention_chunk_size": 0}, "attention_chunk_size=0"),
        ({"attention_type": "encoder_only"}, "attention_type='encoder_only': expected"),
        ({"attention_type": "encoder_decoder", "sliding_window": 3}, "sliding_window with attention_type"),
        ({"attention_type": "encoder_decoder", "alibi_slopes": [0.1] * H}, "alibi_slopes with attention_type"),
        ({"kv_sharing_source": "layers.0"}, "expected the PagedAttention layer itself"),
        ({"kv_sharing_source": PagedAttention(H, 3, D)}, r"= \(3, 8\), but this layer \(2, 8\)"),
        ({"kv_sharing_source": Pair().second}, "give the layer that owns it"),
    ],
)
def test_what_means_nothing_is_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        PagedAttention(H, KV, D, **options)


def test_missing_keys_are_refused():
    q, _, _ = qkv()
    metadata = metadata_of(([6, 1], 0, 7))
    with pytest.raises(ValueError, match="written"):
        layer_of(spec_of())(q, None, None, metadata)
    with pytest.raises(ValueError, match="no cache that holds keys"):
        layer_of()(q, None, None, metadata)
    with pytest.raises(ValueError, match="needs a cache"):
        layer_of(attention_type="encoder_decoder")(*qkv(), metadata)
    with pytest.raises(ValueError, match="give that layer a cache"):
        Pair().second.init_cache(spec_of())
