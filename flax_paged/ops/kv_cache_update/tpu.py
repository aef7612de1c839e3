"""Write new keys and values into the paged cache with DMA: the Pallas TPU kernel and its wrapper."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_paged.ops.kv_cache_update.xla import token_slots
from flax_paged.ops.page_layout import PageLayout, token_rows
from flax_paged.ops.tpu_platform import interpret_params

# Enough copies in flight to hide the latency of one (about a microsecond) behind the issue of the others.
SLICES_IN_FLIGHT = 16


def kv_cache_update_tpu(
    kv_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    num_kv_update_slices: jax.Array,
    *,
    num_slices_per_kv_cache_update_block: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Write slices of new keys and values into the cache, in place.

    Each slice is one DMA from HBM to HBM of whole tokens, the outermost dimension of both arrays, so no neighbouring
    token is read or rewritten and slices never wait for one another. The packed layout, in which two tokens share
    words, is written by pairs of tokens (`merge_pairs`).

    Args:
        kv_pages: The pool in any layout of `ops.page_layout`, lanes a multiple of 128; aliased to the result.
        k: [num_tokens, num_kv_heads, head_dim].
        v: Like `k`.
        slot_mapping: i32[3, U]; rows are the first slot in the flattened cache, the first new token, the length.
        num_kv_update_slices: i32[1]; columns of `slot_mapping` past it are not looked at.
        num_slices_per_kv_cache_update_block: Copies in flight. None means 16.
        interpret: False, True, or a `pltpu.InterpretParams`.

    Returns:
        The cache, in the buffer of `kv_pages` where that is donated.
    """
    slices_in_flight = num_slices_per_kv_cache_update_block or SLICES_IN_FLIGHT
    layout = PageLayout.of(kv_pages, k.shape[2])
    groups = token_groups(kv_pages, layout)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    updated = pl.pallas_call(
        _kv_cache_update_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[hbm, hbm],
            out_specs=hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA((slices_in_flight,))],
        ),
        out_shape=jax.ShapeDtypeStruct(groups.shape, groups.dtype),
        # The two prefetched arguments count: 3 is the cache.
        input_output_aliases={3: 0},
        interpret=interpret_params(interpret),
        name="kv_cache_update",
    )(*prepare_update(groups, layout, k, v, slot_mapping, num_kv_update_slices), groups)
    return updated.reshape(kv_pages.shape)


def token_groups(kv_pages: jax.Array, layout: PageLayout) -> jax.Array:
    """Return the pool as the kernels see it: [num_pages, groups_per_page, num_kv_heads, 2, num_lanes].

    A group is what can be copied alone: one token, in the packed layout two. The TPU's layouts have this shape. So has
    the standard layout but for the name of its dimensions: XLA sees the same bytes where lanes are 128 and combined
    heads are 2, 4 or a multiple of 8, and has to copy the pool otherwise.
    """
    if not layout.is_standard:
        return kv_pages
    return kv_pages.reshape(layout.num_pages, layout.page_size, layout.num_kv_heads, 2, layout.num_lanes)


def prepare_update(groups, layout: PageLayout, k, v, slot_mapping, num_kv_update_slices):
    """Return what `start_slices` copies: flat slot mapping, number of slices, new groups."""
    rows = token_rows(k, v, layout.num_lanes, is_packed=layout.is_packed).astype(groups.dtype)
    if not layout.is_packed:
        return slot_mapping.reshape(-1), num_kv_update_slices, rows
    page, offset = token_slots(slot_mapping, num_kv_update_slices, len(k), layout.num_pages, layout.page_size)
    return merge_pairs(groups, rows, page, offset)


def merge_pairs(groups: jax.Array, rows: jax.Array, page: jax.Array, offset: jax.Array):
    """Bring new tokens together with the other token of their pair, whether new too or already in the cache.

    Two tokens of a pair share words in 16 bits. The old ones are read before the kernel runs, so that it still only
    copies, and copies never meet. All but a gather and a few selects depends on the metadata alone: XLA computes it
    once for all layers of a step.

    Args:
        groups: [num_pages, page_size / 2, KV, 2, 128], the pool.
        rows: [T, KV, 128], the new tokens.
        page: i32[T], num_pages for tokens that are not written.
        offset: i32[T], place of each token in its page.

    Returns:
        Slices of one pair each as i32[3 * T], their number i32[1], and the pairs [T, KV, 2, 128].
    """
    num_pages, pairs_per_page = groups.shape[:2]
    num_tokens = rows.shape[0]
    slot = page * (2 * pairs_per_page) + offset
    order = jnp.argsort(jnp.where(page < num_pages, slot, jnp.iinfo(jnp.int32).max))
    page, offset, rows = page[order], offset[order], rows[order]
    is_live, pair, is_second = page < num_pages, offset // 2, offset % 2 == 1
    # A pair with two new tokens has its second one right after the first.
    has_next = is_live & (jnp.roll(page, -1) == page) & (jnp.roll(pair, -1) == pair)
    has_next = has_next.at[-1].set(False)
    is_led = jnp.roll(has_next, 1).at[0].set(False)
    # The barrier keeps XLA from reading the old tokens of all layers at the beginning of the step.
    rows, old_page, old_pair = lax.optimization_barrier((rows, page, pair))
    old = groups.at[old_page, old_pair].get(mode="clip")  # [T, KV, 2, 128]

    def choose(condition, x, y):
        return jnp.where(condition[:, None, None], x, y)

    first = choose(is_second, old[:, :, 0], rows)
    second = choose(is_second, rows, choose(has_next, jnp.roll(rows, -1, axis=0), old[:, :, 1]))
    leads = is_live & ~is_led
    (source,) = jnp.nonzero(leads, size=num_tokens, fill_value=0)
    source = source.astype(jnp.int32)
    mapping = [(page * pairs_per_page + pair)[source], source, jnp.ones_like(source)]
    return jnp.concatenate(mapping), jnp.sum(leads, dtype=jnp.int32)[None], jnp.stack([first, second], axis=2)


def _kv_cache_update_kernel(
    # Prefetch
    slot_mapping_ref,  # i32[3 * U], in groups
    num_slices_ref,  # i32[1]
    # Input
    new_groups_hbm_ref,  # [num_groups, num_kv_heads, 2, num_lanes]
    _,  # the cache, aliased to the output
    # Output
    kv_pages_hbm_ref,  # [num_pages, groups_per_page, num_kv_heads, 2, num_lanes]
    # Scratch
    sems,  # one for each copy in flight
):
    start_slices(slot_mapping_ref, num_slices_ref, new_groups_hbm_ref, kv_pages_hbm_ref, sems)
    wait_for_slices(slot_mapping_ref, num_slices_ref, new_groups_hbm_ref, kv_pages_hbm_ref, sems)


def start_slices(slot_mapping_ref, num_slices_ref, new_groups_hbm_ref, kv_pages_hbm_ref, sems):
    """Start all copies; the last ones, as many as there are semaphores, are left for `wait_for_slices`."""
    in_flight = sems.shape[0]

    def start(i, _):
        # The copy that used this semaphore before has to be done first.
        old = jnp.maximum(i - in_flight, 0)
        old_copy = _slice_copy(slot_mapping_ref, new_groups_hbm_ref, kv_pages_hbm_ref, sems, old)
        pl.when(i >= in_flight)(old_copy.wait)
        _slice_copy(slot_mapping_ref, new_groups_hbm_ref, kv_pages_hbm_ref, sems, i).start()

    lax.fori_loop(0, num_slices_ref[0], start, None)


def wait_for_slices(slot_mapping_ref, num_slices_ref, new_groups_hbm_ref, kv_pages_hbm_ref, sems):
    """Wait for the copies that `start_slices` left in flight."""

    def wait(i, _):
        _slice_copy(slot_mapping_ref, new_groups_hbm_ref, kv_pages_hbm_ref, sems, i).wait()

    lax.fori_loop(jnp.maximum(num_slices_ref[0] - sems.shape[0], 0), num_slices_ref[0], wait, None)


def _slice_copy(slot_mapping_ref, new_groups_hbm_ref, kv_pages_hbm_ref, sems, i):
    num_columns, groups_per_page = slot_mapping_ref.shape[0] // 3, kv_pages_hbm_ref.shape[1]
    slot, group, length = (slot_mapping_ref[row * num_columns + i] for row in range(3))
    # Page and offset apart: a slice never crosses a page, and the number of elements may pass 2**31.
    page, offset = lax.div(slot, groups_per_page), lax.rem(slot, groups_per_page)
    return pltpu.make_async_copy(
        new_groups_hbm_ref.at[pl.ds(group, length)],
        kv_pages_hbm_ref.at[page, pl.ds(offset, length)],
        sems.at[lax.rem(i, sems.shape[0])],
    )
