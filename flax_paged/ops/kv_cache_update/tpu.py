"""Write new keys and values into the paged cache with DMA: the Pallas TPU kernel and its wrapper."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

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
    token is read or rewritten and slices never wait for one another.

    Args:
        kv_pages: [num_pages, page_size, 2 * num_kv_heads, padded_head_dim]; aliased to the result.
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
    new_rows = interleave_kv(k, v, kv_pages.shape[3]).astype(kv_pages.dtype)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        _kv_cache_update_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[hbm, hbm],
            out_specs=hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA((slices_in_flight,))],
        ),
        out_shape=jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        # The two prefetched arguments count: 3 is `kv_pages`.
        input_output_aliases={3: 0},
        interpret=interpret_params(interpret),
        name="kv_cache_update",
    )(slot_mapping.reshape(-1), num_kv_update_slices, new_rows, kv_pages)


def interleave_kv(k: jax.Array, v: jax.Array, padded_head_dim: int) -> jax.Array:
    """Return [num_tokens, 2 * num_kv_heads, padded_head_dim]: K and V of each head next to each other, zero padded."""
    num_tokens, num_kv_heads, head_dim = k.shape
    rows = jnp.stack([k, v], axis=2).reshape(num_tokens, 2 * num_kv_heads, head_dim)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, padded_head_dim - head_dim)))


def _kv_cache_update_kernel(
    # Prefetch
    slot_mapping_ref,  # i32[3 * U]
    num_slices_ref,  # i32[1]
    # Input
    new_rows_hbm_ref,  # [num_tokens, 2 * num_kv_heads, padded_head_dim]
    _,  # the cache, aliased to the output
    # Output
    kv_pages_hbm_ref,  # [num_pages, page_size, 2 * num_kv_heads, padded_head_dim]
    # Scratch
    sems,  # one for each copy in flight
):
    start_slices(slot_mapping_ref, num_slices_ref, new_rows_hbm_ref, kv_pages_hbm_ref, sems)
    wait_for_slices(slot_mapping_ref, num_slices_ref, new_rows_hbm_ref, kv_pages_hbm_ref, sems)


def start_slices(slot_mapping_ref, num_slices_ref, new_rows_hbm_ref, kv_pages_hbm_ref, sems):
    """Start all copies; the last ones, as many as there are semaphores, are left for `wait_for_slices`."""
    in_flight = sems.shape[0]

    def start(i, _):
        # The copy that used this semaphore before has to be done first.
        old = jnp.maximum(i - in_flight, 0)
        old_copy = _slice_copy(slot_mapping_ref, new_rows_hbm_ref, kv_pages_hbm_ref, sems, old)
        pl.when(i >= in_flight)(old_copy.wait)
        _slice_copy(slot_mapping_ref, new_rows_hbm_ref, kv_pages_hbm_ref, sems, i).start()

    lax.fori_loop(0, num_slices_ref[0], start, None)


def wait_for_slices(slot_mapping_ref, num_slices_ref, new_rows_hbm_ref, kv_pages_hbm_ref, sems):
    """Wait for the copies that `start_slices` left in flight."""

    def wait(i, _):
        _slice_copy(slot_mapping_ref, new_rows_hbm_ref, kv_pages_hbm_ref, sems, i).wait()

    lax.fori_loop(jnp.maximum(num_slices_ref[0] - sems.shape[0], 0), num_slices_ref[0], wait, None)


def _slice_copy(slot_mapping_ref, new_rows_hbm_ref, kv_pages_hbm_ref, sems, i):
    num_columns, page_size = slot_mapping_ref.shape[0] // 3, kv_pages_hbm_ref.shape[1]
    slot, token, length = (slot_mapping_ref[row * num_columns + i] for row in range(3))
    # Page and offset apart: a slice never crosses a page, and the number of elements may pass 2**31.
    page, offset = lax.div(slot, page_size), lax.rem(slot, page_size)
    return pltpu.make_async_copy(
        new_rows_hbm_ref.at[pl.ds(token, length)],
        kv_pages_hbm_ref.at[page, pl.ds(offset, length)],
        sems.at[lax.rem(i, sems.shape[0])],
    )
