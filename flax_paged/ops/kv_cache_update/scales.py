"""Write the scales of new keys and values beside the pages."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flax_paged.ops import dispatch
from flax_paged.ops.kv_cache_update.api import kv_cache_update
from flax_paged.ops.kv_cache_update.xla import token_slots
from flax_paged.ops.page_layout import NUM_LANES
from flax_paged.ops.scales_layout import are_lines, rows_of


def kv_scales_update(
    kv_scales: jax.Array,
    k_scale: jax.Array,
    v_scale: jax.Array,
    slot_mapping: jax.Array,
    num_kv_update_slices: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Write the scales of new tokens; in place within a jit that donates `kv_scales`.

    Args:
        kv_scales: f32, in a layout of `ops.scales_layout`.
        k_scale: f32[num_tokens, num_kv_heads, 1], as `quantize_per_head` gives it.
        v_scale: Like `k_scale`.
        slot_mapping: i32[3, U], as in `kv_cache_update`.
        num_kv_update_slices: i32[1].
        implementation: As in `kv_cache_update`. Lines are written by XLA beside every kernel.

    Returns:
        The updated scales.

    Raises:
        ValueError: Shapes that do not fit.
    """
    if not are_lines(kv_scales.shape):
        portable = "reference" if implementation == "reference" else "xla"
        return kv_cache_update(
            kv_scales, k_scale, v_scale, slot_mapping, num_kv_update_slices, implementation=portable
        )  # fmt: skip
    dispatch.check_shape("k_scale", k_scale, ("num_tokens", "num_kv_heads", 1))
    dispatch.check_shape("v_scale", v_scale, k_scale.shape)
    kv_scales, slot_mapping, num_slices = (jnp.asarray(x) for x in (kv_scales, slot_mapping, num_kv_update_slices))
    scales = jnp.stack([k_scale[..., 0], v_scale[..., 0]], axis=1).astype(kv_scales.dtype)  # [T, 2, KV]
    return _update_lines(kv_scales, scales, slot_mapping, num_slices)


def _update_lines(kv_scales, scales, slot_mapping, num_slices):
    """Merge new scales with the old ones of their lines, and write whole lines, each of them once.

    A line holds scales of many tokens, and single numbers are what XLA scatters slowest. All but one matrix product, a
    gather and a scatter of lines depends on the metadata alone: XLA computes it once for all layers of a step.
    """
    num_tokens, _, num_heads = scales.shape
    num_pages, lines_per_page = kv_scales.shape[:2]
    page_size = lines_per_page * NUM_LANES // num_heads
    page, offset = token_slots(slot_mapping, num_slices, num_tokens, num_pages, page_size)
    # The scales of a token lie within a stretch of rows, its group's, that may cross the ends of lines.
    first_line = rows_of(offset - offset % 4, 0, num_heads) // NUM_LANES
    last_line = rows_of(offset, num_heads - 1, num_heads) // NUM_LANES
    most_lines = _most_lines(num_heads)
    line = first_line[:, None] + jnp.arange(most_lines, dtype=jnp.int32)[None]  # [T, most_lines]
    is_written = (page[:, None] < num_pages) & (line <= last_line[:, None])
    # Of each of these lines, which lanes are the token's, and which head they belong to.
    row = line[:, :, None] * NUM_LANES + jnp.arange(NUM_LANES, dtype=jnp.int32)[None, None]  # [T, most_lines, 128]
    head = row // 4 % num_heads
    is_token = is_written[:, :, None] & (row == rows_of(offset[:, None, None], head, num_heads))

    line_id = jnp.where(is_written, page[:, None] * lines_per_page + line, num_pages * lines_per_page).reshape(-1)
    most = _most_lines_of_a_step(num_tokens, slot_mapping.shape[1], num_heads, most_lines)
    order = jnp.sort(line_id)
    is_first = (order != jnp.roll(order, 1).at[0].set(-1)) & (order < num_pages * lines_per_page)
    (first,) = jnp.nonzero(is_first, size=most, fill_value=len(order))
    written = order.at[first].get(mode="fill", fill_value=num_pages * lines_per_page)  # [N], each line once
    takes = written[:, None] == line_id[None]  # [N, T * most_lines]
    is_new = _product(takes, is_token.reshape(-1, NUM_LANES)) > 0

    spread = jnp.zeros((num_tokens, most_lines, 2, NUM_LANES), kv_scales.dtype)
    for i in range(num_heads):
        here = (head == i) & is_token
        spread = jnp.where(here[:, :, None], scales[:, None, :, i, None], spread)
    new = _select_bits(takes, spread.reshape(-1, 2 * NUM_LANES)).reshape(-1, 2, NUM_LANES)
    # The barrier keeps XLA from reading the old lines of all layers at the beginning of the step.
    new, target_page, target_line = lax.optimization_barrier(
        (new, written // lines_per_page, written % lines_per_page)
    )  # fmt: skip
    old = kv_scales.at[target_page, target_line].get(mode="clip")
    return kv_scales.at[target_page, target_line].set(jnp.where(is_new[:, None], new, old), mode="drop")


def _most_lines(num_heads: int) -> int:
    """Lines that the scales of one token may touch."""
    stretch = 4 * num_heads
    if NUM_LANES % stretch == 0 or stretch % NUM_LANES == 0:
        return max(stretch // NUM_LANES, 1)
    return (stretch - 2) // NUM_LANES + 2


def _most_lines_of_a_step(num_tokens: int, num_slices: int, num_heads: int, most_lines: int) -> int:
    """Lines that slices of so many tokens in all may touch: a slice of n tokens those of at most n + 6."""
    return min(num_tokens * most_lines, (num_tokens + 6 * num_slices) * num_heads // NUM_LANES + 2 * num_slices)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Product of zeros and ones with small integers, which bfloat16 holds exactly."""
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32).astype(jnp.int32)


def _select_bits(takes: jax.Array, numbers: jax.Array) -> Any:
    """Sum the rows of f32 numbers that each row of `takes` selects, of which at most one is not 0 in any column.

    Byte by byte, so that the matrix unit does it exactly in one pass, and infinity in one row stays out of others.
    """
    bits = lax.bitcast_convert_type(numbers, jnp.int32)
    parts = (_product(takes, lax.shift_right_logical(bits, 8 * i) & 255) << 8 * i for i in range(4))
    return lax.bitcast_convert_type(sum(parts), jnp.float32)
