"""The definition of ragged paged attention: one query token at a time, over every page its table holds."""

import jax
import jax.numpy as jnp

from flax_paged.ops.page_layout import to_standard_layout


def ragged_paged_attention(
    q, kv_pages, seq_lens, block_tables, query_start_loc, num_seqs, *, sm_scale, sliding_window, soft_cap
) -> jax.Array:
    """Attend in float32; see `api.ragged_paged_attention`."""
    num_tokens, num_q_heads, head_dim = q.shape
    kv_pages = to_standard_layout(kv_pages, head_dim)
    num_kv_heads = kv_pages.shape[2] // 2
    padded_seq_len = block_tables.shape[1] * kv_pages.shape[1]

    def attend(row):
        is_live = row < query_start_loc[num_seqs[0]]
        seq = jnp.where(is_live, jnp.sum(query_start_loc[1:] <= row), 0)
        position = seq_lens[seq] - (query_start_loc[seq + 1] - row)

        kv = kv_pages[block_tables[seq]].reshape(padded_seq_len, num_kv_heads, 2, -1)[..., :head_dim]
        key_position = jnp.arange(padded_seq_len, dtype=jnp.int32)
        is_visible = key_position <= position
        if sliding_window is not None:
            is_visible &= key_position > position - sliding_window
        # Hidden slots may hold NaN, and 0 * NaN is NaN: replace them, a mask on the scores alone is not enough.
        kv = jnp.where(is_visible[:, None, None, None], kv.astype(jnp.float32), 0.0)
        k, v = kv[:, :, 0], kv[:, :, 1]  # [L, KV, D]

        grouped_q = q[row].astype(jnp.float32).reshape(num_kv_heads, num_q_heads // num_kv_heads, head_dim)
        scores = jnp.einsum("kgd,lkd->kgl", grouped_q, k, precision="highest") * sm_scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        weights = jax.nn.softmax(scores, axis=-1, where=is_visible[None, None])
        out = jnp.einsum("kgl,lkd->kgd", weights, v, precision="highest").reshape(num_q_heads, head_dim)
        return jnp.where(is_live, out, 0.0).astype(q.dtype)

    return jax.lax.map(attend, jnp.arange(num_tokens, dtype=jnp.int32))
