"""The public function: checks its arguments and chooses an implementation."""

from typing import Any

import jax
import jax.numpy as jnp

from flax_paged.ops import dispatch
from flax_paged.ops.ragged_paged_attention import reference, xla


def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    attention_chunk_size: int | None = None,
    causal: bool = True,
    k_scale: Any = None,
    v_scale: Any = None,
    out_dtype: Any = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    max_query_len: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attend each sequence's new queries over its keys and values in the cache.

    Query row t of sequence i, at position p = seq_lens[i] - (query_start_loc[i + 1] - t), sees the keys j of its own
    sequence with p - sliding_window < j <= p:

        out[t] = softmax_j(cap(sm_scale * q[t] . k[j])) @ v,    cap(s) = soft_cap * tanh(s / soft_cap)

    Query head h reads kv head h // (H / KV). Softmax and accumulation are in float32. What dead pages and page tails
    hold, NaN included, never reaches the result.

    Args:
        q: [T, H, D], float32, bfloat16 or float16. Padding rows may hold anything.
        kv_pages: [num_pages, page_size, 2 * KV, padded D], of these dtypes too. Combined head 2h is K of kv head h,
            2h + 1 its V. Or a pool in the TPU's layout (`ops.page_layout`), which has five dimensions. The step's own
            keys and values are already written.
        seq_lens: i32[S]. Keys visible to each sequence's last query: its context plus this step's queries.
        block_tables: i32[S, P]. Page ids of each sequence in order; dead entries may be anything in range.
        query_start_loc: i32[S + 1]. Sequence i owns rows [query_start_loc[i], query_start_loc[i + 1]); entries past
            num_seqs repeat the last value.
        num_seqs: i32[1]. Live sequences; rows past it are padding.
        sm_scale: Factor on the scores, usually 1 / sqrt(D) of the unpadded D.
        sliding_window: Keys that a query sees, its own included; None for all.
        soft_cap: Cap on the scaled scores, applied before the mask; None for none.
        sinks: Not available yet.
        alibi_slopes: Not available yet.
        attention_chunk_size: Not available yet.
        causal: False is not available yet.
        k_scale: Not available yet.
        v_scale: Not available yet.
        out_dtype: q's dtype, or None for the same.
        num_kv_pages_per_block: Tile of the TPU kernel; None lets it choose. Other implementations choose their own.
        num_queries_per_block: Likewise.
        vmem_limit_bytes: Likewise.
        max_query_len: Static bound on the queries that a sequence has in this step; 1 selects the decode path. None:
            not known.
        implementation: None (Pallas on a TPU where it takes the cache, else "xla"), "reference", "xla", "pallas_tpu" or
            "pallas_tpu_interpret".

    Returns:
        [T, H, D] in q's dtype; rows past query_start_loc[num_seqs] are zeros.

    Raises:
        ValueError: Shapes or options that do not fit, or an implementation that cannot run here.
        TypeError: A dtype that is not supported.
        NotImplementedError: An argument whose feature is not available yet.
    """
    dispatch.refuse(
        sinks=sinks, alibi_slopes=alibi_slopes, attention_chunk_size=attention_chunk_size, k_scale=k_scale,
        v_scale=v_scale, causal=None if causal else causal,
        out_dtype=None if out_dtype is None or jnp.dtype(out_dtype) == q.dtype else out_dtype,
    )  # fmt: skip
    _check_arrays(q, kv_pages, seq_lens, block_tables, query_start_loc, num_seqs)
    _check_options(sliding_window, soft_cap, max_query_len)

    # Metadata often comes as numpy arrays, which tracers cannot index.
    arguments = [jnp.asarray(a) for a in (q, kv_pages, seq_lens, block_tables, query_start_loc, num_seqs)]
    options = {"sm_scale": sm_scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
    kernel_can = kv_pages.shape[-1] % 128 == 0 and jnp.float16 not in (q.dtype, kv_pages.dtype)
    chosen = dispatch.choose_implementation(implementation, kernel_can=kernel_can)
    if chosen == "reference":
        return reference.ragged_paged_attention(*arguments, **options)
    if chosen == "xla":
        return xla.ragged_paged_attention(*arguments, **options, max_query_len=max_query_len)
    # Pallas takes a second to import; only those who run it pay.
    from flax_paged.ops.ragged_paged_attention.tpu import ragged_paged_attention_tpu

    return ragged_paged_attention_tpu(
        *arguments,
        **options,
        num_kv_pages_per_block=num_kv_pages_per_block,
        num_queries_per_block=num_queries_per_block,
        vmem_limit_bytes=vmem_limit_bytes,
        max_query_len=max_query_len,
        interpret=chosen == "pallas_tpu_interpret",
    )


def _check_arrays(q, kv_pages, seq_lens, block_tables, query_start_loc, num_seqs):
    dispatch.check_shape("q", q, ("num_tokens", "num_q_heads", "head_dim"))
    dispatch.check_dtype("q", q, dispatch.FLOAT_DTYPES)
    layout = dispatch.check_kv_pages(kv_pages, None, q.shape[2])
    num_q_heads, num_kv_heads = q.shape[1], layout.num_kv_heads
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"q has {num_q_heads} heads and kv_pages {num_kv_heads} kv heads: expected a multiple, each kv head serving"
            " the same number of query heads."
        )
    dispatch.check_shape("block_tables", block_tables, ("max_num_seqs", "pages_per_seq"))
    max_num_seqs = block_tables.shape[0]
    dispatch.check_shape("seq_lens", seq_lens, (max_num_seqs,))
    dispatch.check_shape("query_start_loc", query_start_loc, (max_num_seqs + 1,))
    dispatch.check_shape("num_seqs", num_seqs, (1,))
    dispatch.check_int32(
        seq_lens=seq_lens, block_tables=block_tables, query_start_loc=query_start_loc, num_seqs=num_seqs
    )


def _check_options(sliding_window, soft_cap, max_query_len):
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"{sliding_window=}: expected at least 1 key, the query's own; None sees every key.")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"{soft_cap=}: expected a positive number; None leaves scores uncapped.")
    if max_query_len is not None and max_query_len < 1:
        raise ValueError(f"{max_query_len=}: expected at least 1; None when it is not known.")
