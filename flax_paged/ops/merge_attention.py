"""Attention over parts of the keys, put together exactly: merging by log-sum-exp, and a prefix shared by a batch."""

from typing import Any

import jax
import jax.numpy as jnp

from flax_paged.ops.page_layout import PageLayout
from flax_paged.ops.ragged_paged_attention import ragged_paged_attention


def merge_attention(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge the results of attending to N disjoint sets of keys into that of attending to all of them.

    Args:
        outs: [N, T, H, D], each part's result.
        lses: f32[N, T, H], the logarithm of each part's softmax denominator; -inf where a part has no key. Sinks belong
            to one part only.

    Returns:
        [T, H, D] in the dtype of `outs`, and f32[T, H], to be merged further.

    Reference: Ye et al. 2025, "FlashInfer", section 2.2; Juravsky et al. 2024, "Hydragen".
    """
    largest = lses.max(axis=0, keepdims=True)
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    weights = jnp.exp(lses - largest)
    total = weights.sum(axis=0)
    weights = weights / jnp.where(total == 0, 1.0, total)[None]
    out = jnp.sum(outs.astype(jnp.float32) * weights[..., None], axis=0).astype(outs.dtype)
    return out, jnp.log(total) + largest[0]


def cascade_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    num_seqs: jax.Array,
    num_shared_pages: jax.Array,
    *,
    max_query_len: int | None = None,
    **options: Any,
) -> jax.Array:
    """`ragged_paged_attention` of sequences that begin with the same pages, reading those pages once for all.

    All queries attend to the shared prefix as one batch, then each to the rest of its own sequence; the two are merged.

    Args:
        q: [T, H, D], as in `ragged_paged_attention`.
        kv_pages: Likewise.
        seq_lens: Likewise.
        block_tables: Likewise; the live rows agree in their first `num_shared_pages` entries.
        query_start_loc: Likewise.
        num_seqs: Likewise.
        num_shared_pages: i32[1]. Full pages that every live sequence begins with, none of this step's tokens in them; 0
            shares nothing. A new number does not compile anew.
        max_query_len: As in `ragged_paged_attention`.
        **options: Those of `ragged_paged_attention` whose meaning does not depend on the distance between a query and a
            key: sm_scale, soft_cap, sinks, scales, out_dtype, implementation.

    Returns:
        [T, H, D], as `ragged_paged_attention` gives it.

    Raises:
        ValueError: An option that the split cannot do.
    """
    allowed = ("sm_scale", "soft_cap", "sinks", "k_scale", "v_scale", "kv_scales", "out_dtype", "implementation")
    for name, value in options.items():
        if name not in allowed and value is not None:
            raise ValueError(f"cascade_attention({name}={value!r}): expected options among {', '.join(allowed)}.")
    sinks, out_dtype = options.pop("sinks", None), options.pop("out_dtype", None)
    seq_lens, block_tables, query_start_loc = (jnp.asarray(x) for x in (seq_lens, block_tables, query_start_loc))
    page_size = PageLayout.of(kv_pages, q.shape[2]).page_size
    shared = jnp.asarray(num_shared_pages, jnp.int32)

    num_tokens = query_start_loc[jnp.asarray(num_seqs)]  # i32[1]
    prefix_start_loc = jnp.concatenate([jnp.zeros(1, jnp.int32), num_tokens])
    one = jnp.ones(1, jnp.int32)
    prefix = ragged_paged_attention(
        q, kv_pages, shared * page_size, block_tables[:1], prefix_start_loc, one,
        causal=False, return_lse=True, **options,
    )  # fmt: skip
    columns = jnp.minimum(jnp.arange(block_tables.shape[1], dtype=jnp.int32) + shared, block_tables.shape[1] - 1)
    rest = ragged_paged_attention(
        q, kv_pages, jnp.maximum(seq_lens - shared * page_size, 0), block_tables[:, columns], query_start_loc, num_seqs,
        sinks=sinks, return_lse=True, max_query_len=max_query_len, **options,
    )  # fmt: skip
    out, _ = merge_attention(*(jnp.stack(pair) for pair in zip(prefix, rest, strict=True)))
    return out if out_dtype is None else out.astype(out_dtype)
