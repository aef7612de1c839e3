import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from flax_paged.attention import PagedAttention
from flax_paged.cache import CacheSpec
from flax_paged.metadata import SequenceSlice, build_metadata
from flax_paged.sharding import mesh_axis, named_sharding, param_shardings


@pytest.fixture
def mesh():
    return jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))


def test_logical_axes_become_mesh_axes(mesh):
    assert named_sharding(("heads", "embed"), (4, 6), mesh).spec == PartitionSpec("tensor", None)
    assert named_sharding(("vocab", "embed"), (101, 6), mesh).spec == PartitionSpec(None, None)
    assert mesh_axis("mlp", jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))) is None
    with pytest.raises(ValueError, match="logical axis 'hedas': expected one of"):
        named_sharding(("hedas",), (4,), mesh)
    with pytest.raises(ValueError, match="name 1 axes of an array of shape"):
        named_sharding(("heads",), (4, 2), mesh)


def test_parameters_without_axes_are_replicated(mesh):
    module = nnx.Dict(
        split=nnx.Param(jnp.ones((4, 6)), logical_axes=("mlp", "embed")), whole=nnx.Param(jnp.ones((4, 6)))
    )
    shardings = param_shardings(nnx.state(module), mesh)
    assert shardings["split",].spec == PartitionSpec("tensor", None)
    assert shardings["whole",].spec == PartitionSpec(None, None)


def test_heads_split_over_two_devices_give_the_numbers_of_one(mesh):
    spec = CacheSpec(2, 8, num_pages=6, page_size=4, dtype=jnp.float32)
    metadata = build_metadata(
        [SequenceSlice([5, 1], 0, 6), SequenceSlice([2], 0, 3)],
        page_size=4,
        num_pages=6,
        max_num_tokens=12,
        max_num_seqs=2,
        max_pages_per_seq=2,
    )
    q, k, v = (jax.random.normal(jax.random.key(i), (12, heads, 8)) for i, heads in enumerate((4, 2, 2)))
    one = PagedAttention(4, 2, 8, cache=spec)
    two = PagedAttention(4, 2, 8, cache=spec, mesh=mesh)
    expected = one(q, k, v, metadata)
    got = two(q, k, v, metadata)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(two.kv_cache[...], one.kv_cache[...])
    assert two.kv_cache[...].sharding.spec == PartitionSpec(None, None, "tensor", None)


@pytest.mark.parametrize("axis", ["tensor", "data"])
def test_dense_attention_split_over_two_devices_has_the_gradients_of_one(axis):
    two_devices = jax.make_mesh((2,), (axis,), axis_types=(AxisType.Auto,))
    one, two = (PagedAttention(4, 2, 8, sinks=True, sliding_window=5, mesh=mesh) for mesh in (None, two_devices))
    keys = jax.random.split(jax.random.key(0), 3)
    qkv = [jax.random.normal(key, (2, 6, heads, 8)) for key, heads in zip(keys, (4, 2, 2), strict=True)]
    segment_ids = jnp.asarray([[1, 1, 1, 2, 2, 0]] * 2, jnp.int32)

    def gradients(layer):
        def loss(*qkv):
            return (layer(*qkv, segment_ids=segment_ids) ** 2).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*qkv)

    for a, b in zip(gradients(two), gradients(one), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_heads_that_do_not_divide_name_both_numbers(mesh):
    with pytest.raises(ValueError, match="num_kv_heads=3.*2 devices of mesh axis 'tensor'"):
        PagedAttention(9, 3, 64, mesh=mesh)
