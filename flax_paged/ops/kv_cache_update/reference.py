"""The definition of a cache update: slice by slice, token by token."""

import jax
import jax.numpy as jnp

from flax_paged.ops.page_layout import PageLayout, to_standard_layout, to_tpu_layout


def kv_cache_update(kv_pages, k, v, slot_mapping, num_kv_update_slices) -> jax.Array:
    """Write slices of k and v to their slots; see `api.kv_cache_update`."""
    if not PageLayout.of(kv_pages, k.shape[2]).is_standard:
        standard = to_standard_layout(kv_pages, k.shape[2])
        return to_tpu_layout(kv_cache_update(standard, k, v, slot_mapping, num_kv_update_slices), k.shape[2])
    page_size, head_dim = kv_pages.shape[1], k.shape[2]

    def write_slice(u, kv_pages):
        first_slot, first_token, length = slot_mapping[0, u], slot_mapping[1, u], slot_mapping[2, u]

        def write_token(i, kv_pages):
            page, offset = (first_slot + i) // page_size, (first_slot + i) % page_size
            token = jnp.zeros(kv_pages.shape[2:], kv_pages.dtype)
            token = token.at[0::2, :head_dim].set(k[first_token + i].astype(kv_pages.dtype))
            token = token.at[1::2, :head_dim].set(v[first_token + i].astype(kv_pages.dtype))
            return kv_pages.at[page, offset].set(token)

        return jax.lax.fori_loop(0, length, write_token, kv_pages)

    return jax.lax.fori_loop(0, num_kv_update_slices[0], write_slice, kv_pages)
