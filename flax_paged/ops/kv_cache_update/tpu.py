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
    token is read or rewritten and slices never wait for one another. Layouts in which tokens share words are written by
    groups of tokens (`merge_groups`).

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

    A group is what can be copied alone: one token, or those that share words. The TPU's layouts have this shape; that
    of 8 bits is [num_pages, groups_per_page, rows_per_token, 4, num_lanes]. The standard layout has it but for the name
    of its dimensions: XLA sees the same bytes where lanes are 128 and combined heads are 2, 4 or a multiple of 8, and
    has to copy the pool otherwise.

    Raises:
        ValueError: 8 bits in the standard layout, which the kernels do not read.
    """
    if not layout.is_standard:
        return kv_pages
    if kv_pages.dtype.itemsize == 1:
        raise ValueError(
            f"kv_pages is {kv_pages.dtype} in the standard layout; the TPU kernels read 8 bits in the TPU's layout"
            " only: CacheSpec(layout='tpu') makes it, to_tpu_layout converts."
        )
    return kv_pages.reshape(layout.num_pages, layout.page_size, layout.num_kv_heads, 2, layout.num_lanes)


def prepare_update(groups, layout: PageLayout, k, v, slot_mapping, num_kv_update_slices):
    """Return what `start_slices` copies: flat slot mapping, number of slices, new groups."""
    rows = token_rows(k, v, layout.num_lanes, is_packed=layout.is_packed).astype(groups.dtype)
    if layout.tokens_per_group == 1:
        return slot_mapping.reshape(-1), num_kv_update_slices, rows
    page, offset = token_slots(slot_mapping, num_kv_update_slices, len(k), layout.num_pages, layout.page_size)
    rows = rows.reshape(len(k), layout.rows_per_token, layout.num_lanes)
    # A slice of n tokens touches at most n / group + 2 groups, and no more than n.
    most = min(len(k), len(k) // layout.tokens_per_group + 2 * slot_mapping.shape[1])
    return merge_groups(groups, rows, page, offset, most)


def merge_groups(groups: jax.Array, rows: jax.Array, page: jax.Array, offset: jax.Array, max_num_groups: int):
    """Bring new tokens together with the others of their group, whether new too or already in the cache.

    Tokens of a group share words. The old ones are read before the kernel runs, so that it still only copies, and
    copies never meet. All but two gathers and a few selects depends on the metadata alone: XLA computes it once for all
    layers of a step.

    Args:
        groups: [num_pages, groups_per_page, R, G, lanes], the pool: R rows of lanes of each of G tokens.
        rows: [T, R, lanes], the new tokens.
        page: i32[T], num_pages for tokens that are not written.
        offset: i32[T], place of each token in its page.
        max_num_groups: Bound N on the groups that are written.

    Returns:
        Slices of one group each as i32[3 * N], their number i32[1], and the groups [N, R, G, lanes].
    """
    num_pages, groups_per_page, _, size, _ = groups.shape
    num_tokens = rows.shape[0]
    slot = jnp.where(page < num_pages, page * (groups_per_page * size) + offset, jnp.iinfo(jnp.int32).max)
    order = jnp.argsort(slot).astype(jnp.int32)
    page, offset, group = page[order], offset[order], slot[order] // size
    leads = (page < num_pages) & (group != jnp.roll(group, 1).at[0].set(-1))
    (first,) = jnp.nonzero(leads, size=max_num_groups, fill_value=num_tokens)
    # The tokens of a group follow one another; those of the next group, and places past the end, are left out.
    members = first.astype(jnp.int32)[:, None] + jnp.arange(size, dtype=jnp.int32)[None]  # [N, G]
    first, at = members[:, 0].clip(max=num_tokens - 1), members.clip(max=num_tokens - 1)
    is_member = (members < num_tokens) & (group[at] == group[first][:, None])
    place = jnp.where(is_member, offset[at] % size, size)
    # The barrier keeps XLA from reading the old tokens of all layers at the beginning of the step.
    rows, old_page, old_group = lax.optimization_barrier((rows, page[first], offset[first] // size))
    merged = groups.at[old_page, old_group].get(mode="clip")  # [N, R, G, lanes]
    for i in range(size):
        is_here = place[:, i, None] == jnp.arange(size, dtype=jnp.int32)[None]  # [N, G]
        merged = jnp.where(is_here[:, None, :, None], rows[order[at[:, i]]][:, :, None], merged)
    targets = page[first] * groups_per_page + offset[first] // size
    sources = jnp.arange(max_num_groups, dtype=jnp.int32)
    mapping = jnp.concatenate([targets, sources, jnp.ones_like(sources)])
    return mapping, jnp.sum(leads, dtype=jnp.int32)[None], merged


def _kv_cache_update_kernel(
    # Prefetch
    slot_mapping_ref,  # i32[3 * U], in groups
    num_slices_ref,  # i32[1]
    # Input
    new_groups_hbm_ref,  # [num_groups, num_kv_heads, 2, num_lanes], or groups of the 8-bit layout
    _,  # the cache, aliased to the output
    # Output
    kv_pages_hbm_ref,  # [num_pages, groups_per_page, ...] of these groups
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
