"""The definition of ragged paged attention: one query token at a time, over every page its table holds."""

import jax
import jax.numpy as jnp

from flax_paged.ops.page_layout import to_standard_layout
from flax_paged.ops.ragged_paged_attention.rules import AttentionRules


def ragged_paged_attention(
    q,
    kv_pages,
    seq_lens,
    block_tables,
    query_start_loc,
    num_seqs,
    *,
    rules: AttentionRules,
    finish,
    kv_scales=None,
    k_scale=None,
    v_scale=None,
    page_mask=None,
    draft_mask=None,
) -> tuple[jax.Array, jax.Array]:
    """Attend in float32; see `api.ragged_paged_attention` and, for what is returned, `xla.ragged_paged_attention`."""
    num_tokens, num_q_heads, head_dim = q.shape
    kv_pages = to_standard_layout(kv_pages, head_dim)
    page_size, num_kv_heads = kv_pages.shape[1], kv_pages.shape[2] // 2
    padded_seq_len = block_tables.shape[1] * page_size
    key_position = jnp.arange(padded_seq_len, dtype=jnp.int32)
    per_group = (num_kv_heads, num_q_heads // num_kv_heads, 1)

    def attend(row):
        is_live = row < query_start_loc[num_seqs[0]]
        seq = jnp.where(is_live, jnp.sum(query_start_loc[1:] <= row), 0)
        position = seq_lens[seq] - (query_start_loc[seq + 1] - row)
        distance = position - key_position

        is_visible = key_position < seq_lens[seq]
        if rules.causal:
            is_visible &= distance >= 0
        if rules.sliding_window is not None:
            is_visible &= jnp.abs(distance) < rules.sliding_window
        if rules.attention_chunk_size is not None:
            is_visible &= key_position // rules.attention_chunk_size == position // rules.attention_chunk_size
        if page_mask is not None:
            is_visible &= page_mask[seq][key_position // page_size]
        if draft_mask is not None:
            context_len = seq_lens[seq] - (query_start_loc[seq + 1] - query_start_loc[seq])
            step_index = key_position - context_len
            bits = (draft_mask[row][:, None] >> jnp.arange(32, dtype=jnp.int32)[None]) & 1  # [W, 32]
            padded = jnp.concatenate([bits.reshape(-1), jnp.zeros(1, bits.dtype)])
            bit = padded[jnp.clip(step_index, 0, bits.size)]
            is_visible &= (step_index < 0) | (bit == 1)

        kv = kv_pages[block_tables[seq]].reshape(padded_seq_len, num_kv_heads, 2, -1)[..., :head_dim]
        kv = kv.astype(jnp.float32)
        if kv_scales is not None:
            kv = kv * kv_scales[block_tables[seq]].reshape(padded_seq_len, num_kv_heads, 2, 1).astype(jnp.float32)
        # Hidden slots may hold NaN, and 0 * NaN is NaN: replace them, a mask on the scores alone is not enough.
        kv = jnp.where(is_visible[:, None, None, None], kv, 0.0)
        k, v = kv[:, :, 0], kv[:, :, 1]  # [L, KV, D]
        k = k if k_scale is None else k * k_scale[None, :, None]
        v = v if v_scale is None else v * v_scale[None, :, None]

        grouped_q = q[row].astype(jnp.float32).reshape(num_kv_heads, num_q_heads // num_kv_heads, head_dim)
        scores = jnp.einsum("kgd,lkd->kgl", grouped_q, k, precision="highest") * rules.sm_scale
        if rules.soft_cap is not None:
            scores = rules.soft_cap * jnp.tanh(scores / rules.soft_cap)
        if rules.alibi_slopes is not None:
            scores = scores - rules.alibi_slopes.reshape(per_group) * jnp.abs(distance)[None, None].astype(jnp.float32)
        scores = jnp.where(is_visible[None, None], scores, -jnp.inf)
        if rules.sinks is not None:  # one more key, with a value of zero
            scores = jnp.concatenate([scores, rules.sinks.reshape(per_group)], axis=-1)
            v = jnp.concatenate([v, jnp.zeros_like(v[:1])])
        lse = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None])
        out = jnp.einsum("kgl,lkd->kgd", weights, v, precision="highest").reshape(num_q_heads, head_dim)
        return jnp.where(is_live, out, 0.0), jnp.where(is_live, lse.reshape(num_q_heads), -jnp.inf)

    out, lse = jax.lax.map(attend, jnp.arange(num_tokens, dtype=jnp.int32))
    return finish(out), lse
