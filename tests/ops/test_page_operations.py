import jax
import numpy as np
import pytest

from flax_paged.ops.page_operations import copy_pages, defragment, read_pages, write_pages

POOL = np.random.default_rng(0).standard_normal((7, 4, 6, 8)).astype(np.float32)


def test_copies_read_before_they_write():
    expected = POOL.copy()
    expected[[1, 2, 5]] = POOL[[2, 1, 0]]  # 1 and 2 change places
    run = jax.jit(copy_pages, donate_argnums=0)
    pool = run(jax.numpy.array(POOL), np.array([2, 1, 0, 0], np.int32), np.array([1, 2, 5, 5], np.int32))
    np.testing.assert_array_equal(pool, expected)


def test_pages_go_to_the_host_and_come_back_elsewhere():
    kept = np.asarray(read_pages(jax.numpy.array(POOL), np.array([3, 6], np.int32)))
    pool = write_pages(jax.numpy.array(POOL), np.array([0, 1, 7], np.int32), np.concatenate([kept, POOL[:1]]))
    expected = POOL.copy()
    expected[[0, 1]] = POOL[[3, 6]]
    np.testing.assert_array_equal(pool, expected)


@pytest.mark.parametrize("operation", ["copy", "write"])
def test_a_donated_pool_is_changed_in_place(operation):
    ids = np.array([0, 1], np.int32)
    if operation == "copy":
        compiled = jax.jit(copy_pages, donate_argnums=0).lower(POOL, ids, ids).compile()
    else:
        compiled = jax.jit(write_pages, donate_argnums=0).lower(POOL, ids, POOL[:2]).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= POOL.nbytes


def test_defragmenting_keeps_what_each_sequence_reads():
    tables = [[6, 2, 4], [6, 5], [], [0]]
    new_tables, sources, destinations = defragment(tables, len(POOL))
    pool = np.asarray(copy_pages(jax.numpy.array(POOL), sources, destinations))
    for old, new in zip(tables, new_tables, strict=True):
        np.testing.assert_array_equal(pool[new], POOL[old])
    assert sorted({page for table in new_tables for page in table}) == [0, 1, 2, 3, 4]
    again, sources, _ = defragment(new_tables, len(POOL))
    assert again == new_tables and not len(sources)
    with pytest.raises(ValueError, match="page id 7"):
        defragment([[7]], len(POOL))
