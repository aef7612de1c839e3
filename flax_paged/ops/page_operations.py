"""Moving pages within a pool, and between a pool and host memory. Donate the pool, and each works in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def copy_pages(kv_pages: jax.Array, sources: jax.Array, destinations: jax.Array) -> jax.Array:
    """Copy pages within a pool: forks that begin to differ, defragmentation.

    All sources are read before any destination is written, so that pages may also be swapped or rotated.

    Args:
        kv_pages: [num_pages, ...], a pool in any layout.
        sources: i32[N], page ids.
        destinations: i32[N], page ids without repetition; repeat a whole (source, destination) pair to pad.

    Returns:
        The pool, in the same buffer where it is donated.
    """
    return kv_pages.at[destinations].set(kv_pages[sources])


def read_pages(kv_pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """Copy pages out of a pool, to keep them elsewhere: `np.asarray` of the result is a copy in host memory.

    Args:
        kv_pages: [num_pages, ...], a pool in any layout.
        page_ids: i32[N].

    Returns:
        [N, ...].
    """
    return kv_pages[page_ids]


def write_pages(kv_pages: jax.Array, page_ids: jax.Array, pages: jax.Array) -> jax.Array:
    """Put pages that `read_pages` gave, from the device or the host, into a pool.

    Args:
        kv_pages: [num_pages, ...].
        page_ids: i32[N] without repetition; an id of num_pages or more drops its page, to pad.
        pages: [N, ...].

    Returns:
        The pool, in the same buffer where it is donated.
    """
    return kv_pages.at[page_ids].set(jnp.asarray(pages, kv_pages.dtype), mode="drop")


def defragment(block_tables: list[list[int]], num_pages: int) -> tuple[list[list[int]], Any, Any]:
    """Plan to move the live pages to the front of the pool, in the order in which the tables name them.

    Args:
        block_tables: Page ids of each sequence; sequences may share pages.
        num_pages: Pages in the pool.

    Returns:
        The new tables, and sources and destinations i32[N] for `copy_pages`, pages that stay left out.

    Raises:
        ValueError: A page id out of range.
    """
    new_ids: dict[int, int] = {}
    for page in (page for table in block_tables for page in table):
        if not 0 <= page < num_pages:
            raise ValueError(f"block_tables holds page id {page}: expected 0 <= id < {num_pages=}.")
        new_ids.setdefault(page, len(new_ids))
    moves = [(old, new) for old, new in new_ids.items() if old != new]
    sources, destinations = np.array(moves, np.int32).reshape(-1, 2).T
    return [[new_ids[page] for page in table] for table in block_tables], sources, destinations
