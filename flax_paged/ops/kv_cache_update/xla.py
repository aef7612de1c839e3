"""Cache update as one scatter of token rows, which XLA does in place on a donated cache."""

import jax
import jax.numpy as jnp

from flax_paged.ops.page_layout import PageLayout, token_rows


def kv_cache_update(kv_pages, k, v, slot_mapping, num_kv_update_slices) -> jax.Array:
    """Write slices of k and v to their slots; see `api.kv_cache_update`."""
    layout = PageLayout.of(kv_pages, k.shape[2])
    page, offset = token_slots(slot_mapping, num_kv_update_slices, len(k), layout.num_pages, layout.page_size)
    rows = token_rows(k, v, layout.num_lanes, is_packed=layout.is_packed).astype(kv_pages.dtype)
    group = layout.tokens_per_group
    if group > 1:
        rows = rows.reshape(len(k), layout.rows_per_token, layout.num_lanes)
        return kv_pages.at[page, offset // group, :, offset % group].set(rows, mode="drop")
    return kv_pages.at[page, offset].set(rows.reshape(len(k), *kv_pages.shape[2:]), mode="drop")


def token_slots(
    slot_mapping: jax.Array, num_kv_update_slices: jax.Array, num_tokens: int, num_pages: int, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Return the page and the offset in it of each token, i32[T] each.

    A token in no live slice gets page `num_pages`, one past the end, which a scatter drops; -1 would wrap to the last
    page. Depends on the metadata alone, so XLA computes it once for all layers of a step.
    """
    first_slot, first_token, length = slot_mapping[0][None], slot_mapping[1][None], slot_mapping[2][None]
    live = jnp.arange(slot_mapping.shape[1], dtype=jnp.int32)[None] < num_kv_update_slices[:, None]
    index = jnp.arange(num_tokens, dtype=jnp.int32)[:, None] - first_token  # [T, U], token's place in each slice
    inside = live & (index >= 0) & (index < length)
    slot = jnp.sum(jnp.where(inside, first_slot + index, 0), axis=1, dtype=jnp.int32)
    page = jnp.where(inside.any(axis=1), slot // page_size, num_pages)
    return page, slot % page_size
