"""Cache writes: exactly the named slots, in place, whatever surrounds them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import BF16, make_ragged_batch

from flax_paged.ops import kv_cache_update
from flax_paged.ops.kv_cache_update.xla import token_slots

IMPLEMENTATIONS = ("reference", "xla")


def update(implementation, *args):
    return np.asarray(jax.jit(lambda *a: kv_cache_update(*a, implementation=implementation))(*args))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("page_size, num_kv_heads, head_dim", [(16, 1, 128), (8, 8, 256), (1, 3, 64), (33, 2, 80)])
@pytest.mark.parametrize("dtype, kv_dtype", [(np.float32, np.float32), (BF16, BF16), (np.float32, BF16)])
def test_writes_exactly_the_new_tokens(implementation, page_size, num_kv_heads, head_dim, dtype, kv_dtype):
    """Slices of part pages, whole pages and single tokens, in random order; everything else keeps its bits."""
    p = page_size
    lengths = ((7, 7), (2 * p, 2 * p + 5), (1, 1), (1, p), (1, p + 1), (9, 30))
    batch = make_ragged_batch(
        lengths, num_q_heads=num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size,
        dtype=dtype, kv_dtype=kv_dtype,
    )  # fmt: skip
    out = update(implementation, *batch.update_args)
    assert out.tobytes() == batch.kv_pages.tobytes()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_lanes_become_zero(implementation):
    batch = make_ragged_batch(((3, 9),), num_q_heads=2, num_kv_heads=2, head_dim=5, padded_head_dim=8)
    assert update(implementation, *batch.update_args).tobytes() == batch.kv_pages.tobytes()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_slices", [0, 1])
def test_padding_never_reaches_the_last_page(implementation, num_slices):
    """Padding tokens and dead columns, even ones that name live slots, write nothing; no index wraps around."""
    num_pages, page_size = 6, 4
    pages = np.random.default_rng(0).standard_normal((num_pages, page_size, 4, 8)).astype(np.float32)
    k = np.full((5, 2, 8), 7, np.float32)
    last = num_pages * page_size - 1
    columns = np.array([[2, 0, 1], [last, 0, 1], [last - 3, 1, 4], [0, 0, 0]], np.int32).T
    out = update(implementation, pages, k, k, columns, np.array([num_slices], np.int32))
    expected = pages.copy()
    if num_slices:
        expected[0, 2] = 7
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_live_sequence_may_own_the_last_page(implementation):
    batch = make_ragged_batch(((2, 6),), num_q_heads=1, num_kv_heads=1, head_dim=4, page_size=4, num_dead_pages=0)
    assert batch.block_tables[0, :2].max() == len(batch.kv_pages) - 1
    assert update(implementation, *batch.update_args).tobytes() == batch.kv_pages.tobytes()


def compile_update(num_pages, num_layers=1):
    def step(caches, k, v, slot_mapping, num_slices):
        return [kv_cache_update(c, k, v, slot_mapping, num_slices, implementation="xla") for c in caches]

    kv = jax.ShapeDtypeStruct((8, 3, 64), jnp.float32)
    caches = [jax.ShapeDtypeStruct((num_pages, 16, 6, 64), jnp.float32)] * num_layers
    i32 = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 12), (1,))]
    return jax.jit(step, donate_argnums=0).lower(caches, kv, kv, *i32).compile()


def test_donated_cache_is_aliased_and_not_copied():
    compiled = compile_update(num_pages=5000)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 5000 * 16 * 6 * 64 * 4
    assert memory.temp_size_in_bytes < 2**20
    assert not [line for line in compiled.as_text().splitlines() if " copy(" in line and "f32[5000," in line]
    assert memory.temp_size_in_bytes == compile_update(num_pages=50).memory_analysis().temp_size_in_bytes


def test_layers_share_the_slots_of_a_step():
    """XLA computes each token's slot once: the comparison of tokens with slices does not multiply with the layers."""

    def count(num_layers):
        return compile_update(50, num_layers).as_text().count("pred[8,12]{1,0} and(")

    assert count(4) == count(1) > 0


def test_slots_of_a_huge_pool():
    """Slots up to 2**31 - 1 come apart into page and offset without overflow, and more are refused."""
    num_pages, page_size = 2**27 - 1, 16
    slot = (num_pages - 1) * page_size + 13
    mapping = np.array([[slot], [1], [3]], np.int32)
    page, offset = token_slots(mapping, np.array([1], np.int32), 5, num_pages, page_size)
    np.testing.assert_array_equal(page, [num_pages, *[num_pages - 1] * 3, num_pages])
    np.testing.assert_array_equal(offset[1:4], [13, 14, 15])

    shapes = [((2**27, 16, 4, 8), jnp.float32), *[((5, 2, 8), jnp.float32)] * 2, ((3, 2), jnp.int32), ((1,), jnp.int32)]
    arrays = [jax.ShapeDtypeStruct(*s) for s in shapes]
    with pytest.raises(ValueError, match="fewer than 2\\*\\*31 slots"):
        jax.eval_shape(kv_cache_update, *arrays)
    arrays[0] = jax.ShapeDtypeStruct((2**26, 16, 4, 8), jnp.float32)
    assert jax.eval_shape(kv_cache_update, *arrays).shape == arrays[0].shape
