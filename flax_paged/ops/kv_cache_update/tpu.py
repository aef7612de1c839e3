"""Write new keys and values into the paged cache with DMA: the Pallas TPU kernel and its wrapper."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_paged.ops.tpu_platform import interpret_params

# Enough copies in flight to hide the latency of one (about a microsecond) behind the issue of the others.
_DEFAULT_SLICES_IN_FLIGHT = 16


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
    num_pages, page_size, num_rows, padded_head_dim = kv_pages.shape
    slices_in_flight = num_slices_per_kv_cache_update_block or _DEFAULT_SLICES_IN_FLIGHT
    new_rows = interleave_kv(k, v, padded_head_dim).astype(kv_pages.dtype)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    slots = kv_pages.reshape(num_pages * page_size, num_rows, padded_head_dim)
    slots = pl.pallas_call(
        _kv_cache_update_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[hbm, hbm],
            out_specs=hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA((slices_in_flight,))],
        ),
        out_shape=jax.ShapeDtypeStruct(slots.shape, slots.dtype),
        # The two prefetched arguments count: 3 is `slots`.
        input_output_aliases={3: 0},
        interpret=interpret_params(interpret),
        name="kv_cache_update",
    )(slot_mapping.reshape(-1), num_kv_update_slices, new_rows, slots)
    return slots.reshape(kv_pages.shape)


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
    slots_hbm_ref,  # [num_pages * page_size, 2 * num_kv_heads, padded_head_dim]
    # Scratch
    sems,  # one for each copy in flight
):
    num_columns = slot_mapping_ref.shape[0] // 3
    slices_in_flight = sems.shape[0]
    num_slices = num_slices_ref[0]

    def copy(i):
        slot, token, length = (slot_mapping_ref[row * num_columns + i] for row in range(3))
        return pltpu.make_async_copy(
            new_rows_hbm_ref.at[pl.ds(token, length)],
            slots_hbm_ref.at[pl.ds(slot, length)],
            sems.at[lax.rem(i, slices_in_flight)],
        )

    def start(i, _):
        # The copy that used this semaphore before has to be done first.
        pl.when(i >= slices_in_flight)(lambda: copy(i - slices_in_flight).wait())
        copy(i).start()

    lax.fori_loop(0, num_slices, start, None)
    first_in_flight = jnp.maximum(num_slices - slices_in_flight, 0)
    lax.fori_loop(first_in_flight, num_slices, lambda i, _: copy(i).wait(), None)


