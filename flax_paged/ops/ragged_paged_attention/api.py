"""The public function: checks its arguments and chooses an implementation."""

from typing import Any

import jax
import jax.numpy as jnp

from flax_paged.ops import dispatch
from flax_paged.ops.page_layout import PageLayout
from flax_paged.ops.quantization import QUANTIZED_DTYPES, is_quantized, quantize
from flax_paged.ops.ragged_paged_attention import reference, xla
from flax_paged.ops.ragged_paged_attention.rules import AttentionRules
from flax_paged.ops.scales_layout import are_lines, fit_lines, lines_shape, to_standard_scales

_KERNEL_OPTIONS = (
    "sm_scale", "sliding_window", "soft_cap", "max_query_len", "vmem_limit_bytes", "num_kv_pages_per_block",
    "num_queries_per_block", "sinks", "attention_chunk_size", "causal", "alibi_slopes", "return_lse", "k_scale",
    "v_scale", "out_dtype", "out_scale", "page_mask", "draft_mask", "kv_scales",
)  # fmt: skip
_MAX_DRAFT_WORDS = 32  # for the kernel, whose code grows with them


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
    page_mask: Any = None,
    draft_mask: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_scales: Any = None,
    out_dtype: Any = None,
    out_scale: Any = None,
    return_lse: bool = False,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    max_query_len: int | None = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attend each sequence's new queries over its keys and values in the cache.

    Query row t of sequence i, at position p = seq_lens[i] - (query_start_loc[i + 1] - t), sees keys j of its own
    sequence and gives

        out[t] = sum_j w_j v[j],    w = softmax_j(cap(sm_scale * q[t] . k[j]) - alibi_slope * |p - j|)

    where cap(s) is soft_cap * tanh(s / soft_cap). It sees j if all of these hold, those that are asked for:

    * j <= p (causal), otherwise any j < seq_lens[i];
    * |p - j| < sliding_window;
    * j // attention_chunk_size == p // attention_chunk_size;
    * page_mask[i, j // page_size];
    * j is in the context or the bit of j in draft_mask[t] is set.

    Query head h reads kv head h // (H / KV). Softmax and accumulation are in float32. A query that sees no key gives
    zeros. What dead pages and page tails hold, NaN included, never reaches the result.

    With causal=False the queries may be any number, whatever seq_lens is: another sequence's (cross attention).

    Args:
        q: [T, H, D], float32, bfloat16 or float16. Padding rows may hold anything.
        kv_pages: [num_pages, page_size, 2 * KV, padded D], of these dtypes too, or int8, float8_e4m3fn or float8_e5m2.
            Combined head 2h is K of kv head h, 2h + 1 its V. Or a pool in the TPU's layout (`ops.page_layout`), which
            has five dimensions. The step's own keys and values are already written.
        seq_lens: i32[S]. Keys visible to each sequence's last query: its context plus this step's queries.
        block_tables: i32[S, P]. Page ids of each sequence in order; dead entries may be anything in range.
        query_start_loc: i32[S + 1]. Sequence i owns rows [query_start_loc[i], query_start_loc[i + 1]); entries past
            num_seqs repeat the last value.
        num_seqs: i32[1]. Live sequences; rows past it are padding.
        sm_scale: Factor on the scores, usually 1 / sqrt(D) of the unpadded D.
        sliding_window: Keys that a query sees, its own included; None for all.
        soft_cap: Cap on the scaled scores, applied before ALiBi and the mask; None for none.
        sinks: [H] or None. One more logit a head in the softmax's denominator, without a value (gpt-oss).
        alibi_slopes: [H] or None. Slopes of ALiBi (Press et al. 2022).
        attention_chunk_size: Keys of the query's own chunk are seen (chunked local attention, Llama 4); None for all.
        causal: False for encoder and cross attention.
        page_mask: bool[S, P] or None. Pages of a sequence that its queries see (block-sparse attention); masked pages
            are not read.
        draft_mask: i32[T, W] or None. Bit b of word w of a row says whether it sees its sequence's token 32 * w + b of
            this step: a tree of drafts to verify at once. It narrows the causal mask; tokens past the last word are
            hidden.
        k_scale: Factor on the stored keys, a number or [KV]; None is 1. A new value does not compile anew.
        v_scale: Likewise for the values.
        kv_scales: [num_pages, page_size, 2 * KV, 1] or None. A factor for each stored token and head, laid out like the
            standard kv_pages with a head_dim of 1; or in lines, as the kernel takes them (`ops.scales_layout`).
            `kv_scales_update` writes both.
        out_dtype: Dtype of the result; None for that of q. int8 and float8 round and saturate.
        out_scale: The result is divided by it before it is rounded to an int8 or float8 out_dtype; a number or [H].
        return_lse: Return the logarithm of each softmax's denominator too, for `merge_attention`.
        num_kv_pages_per_block: Tile of the TPU kernel; None lets it choose. Other implementations choose their own.
        num_queries_per_block: Likewise.
        vmem_limit_bytes: Likewise.
        max_query_len: Static bound on the queries that a sequence has in this step; 1 selects the decode path. None:
            not known.
        implementation: None (Pallas on a TPU where it does the job, else "xla"), "reference", "xla", "pallas_tpu" or
            "pallas_tpu_interpret".

    Returns:
        [T, H, D] in q's dtype or out_dtype; rows past query_start_loc[num_seqs] are zeros. With return_lse also
        f32[T, H], sinks included, -inf for rows that see nothing and for padding.

    Raises:
        ValueError: Shapes or options that do not fit each other, or an implementation that cannot run here.
        TypeError: A dtype that is not supported.
        NotImplementedError: The implementation asked for does not have a feature; "xla" and "reference" have all.
    """
    _check_arrays(q, kv_pages, seq_lens, block_tables, query_start_loc, num_seqs)
    _check_options(sliding_window, soft_cap, attention_chunk_size, max_query_len)
    num_kv_heads = PageLayout.of(kv_pages, q.shape[2]).num_kv_heads
    _check_masks(q, kv_pages, block_tables, page_mask, draft_mask, kv_scales, causal, sliding_window,
                 attention_chunk_size, alibi_slopes)  # fmt: skip
    out_dtype = _out_dtype(q, out_dtype, out_scale)

    # Metadata often comes as numpy arrays, which tracers cannot index.
    arguments = [jnp.asarray(a) for a in (q, kv_pages, seq_lens, block_tables, query_start_loc, num_seqs)]
    rules = AttentionRules(
        sm_scale,
        sliding_window,
        soft_cap,
        attention_chunk_size,
        causal,
        _per_head("alibi_slopes", alibi_slopes, q.shape[1]),
        _per_head("sinks", sinks, q.shape[1]),
    )
    options = {
        "kv_scales": None if kv_scales is None else jnp.asarray(kv_scales),
        "k_scale": _per_head("k_scale", k_scale, num_kv_heads),
        "v_scale": _per_head("v_scale", v_scale, num_kv_heads),
        "page_mask": None if page_mask is None else jnp.asarray(page_mask),
        "draft_mask": None if draft_mask is None else jnp.asarray(draft_mask),
    }

    out_scale = _per_head("out_scale", out_scale, q.shape[1])

    def finish(out):
        if not is_quantized(out_dtype):
            return out.astype(out_dtype)
        return quantize(out, out_dtype, 1.0 if out_scale is None else out_scale[None, :, None])

    lacking = missing_in_kernel(q, kv_pages, **options)
    chosen = dispatch.choose_implementation(implementation, kernel_can=kv_pages.shape[-1] % 128 == 0 and not lacking)
    if chosen in ("reference", "xla"):
        if chosen == "reference":
            if kv_scales is not None and are_lines(kv_scales.shape):
                options["kv_scales"] = to_standard_scales(options["kv_scales"], num_kv_heads)
            out, lse = reference.ragged_paged_attention(*arguments, rules=rules, finish=finish, **options)
        else:
            options["max_query_len"] = max_query_len
            out, lse = xla.ragged_paged_attention(*arguments, rules=rules, finish=finish, **options)
        return (out, lse) if return_lse else out
    if lacking:
        raise NotImplementedError(f"implementation={chosen!r} does not have: {lacking}. Use 'xla'.")
    # Pallas takes a second to import; only those who run it pay.
    from flax_paged.ops.ragged_paged_attention.tpu import ragged_paged_attention_tpu

    return ragged_paged_attention_tpu(
        *arguments,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=rules.sinks,
        alibi_slopes=rules.alibi_slopes,
        attention_chunk_size=attention_chunk_size,
        causal=causal,
        k_scale=options["k_scale"],
        v_scale=options["v_scale"],
        page_mask=options["page_mask"],
        draft_mask=options["draft_mask"],
        kv_scales=options["kv_scales"],
        out_dtype=out_dtype,
        out_scale=out_scale,
        return_lse=return_lse,
        num_kv_pages_per_block=num_kv_pages_per_block,
        num_queries_per_block=num_queries_per_block,
        vmem_limit_bytes=vmem_limit_bytes,
        max_query_len=max_query_len,
        interpret=chosen == "pallas_tpu_interpret",
    )


def missing_in_kernel(q: jax.Array, kv_pages: jax.Array, **options: Any) -> str:
    """Name the options of a call that the TPU kernel does not have; empty if it can do it.

    Args:
        q: As in `ragged_paged_attention`.
        kv_pages: Likewise.
        **options: Its keyword arguments, in any form that it takes.
    """
    options = {name: value for name, value in options.items() if value is not None and value is not False}
    asked = [name for name in options if name not in _KERNEL_OPTIONS]
    if "draft_mask" in options and options["draft_mask"].shape[1] > _MAX_DRAFT_WORDS:
        asked.append(f"draft_mask of more than {_MAX_DRAFT_WORDS} words")
    for name, array in (("q", q), ("kv_pages", kv_pages)):
        if array.dtype not in (jnp.float32, jnp.bfloat16, *(QUANTIZED_DTYPES if name == "kv_pages" else ())):
            asked.append(f"{array.dtype.name} {name}")
    if "kv_scales" in options and not (are_lines(options["kv_scales"].shape) and is_quantized(kv_pages.dtype)):
        asked.append(
            "kv_scales but of an int8 or float8 cache and in lines of 128 (CacheSpec makes them in the TPU's layout,"
            " where page_size * num_kv_heads is a multiple of 128)"
        )
    if is_quantized(kv_pages.dtype) and kv_pages.ndim == 4:
        asked.append(f"{kv_pages.dtype.name} kv_pages in the standard layout (CacheSpec(layout='tpu') makes the other)")
    return ", ".join(asked)


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


def _check_options(sliding_window, soft_cap, attention_chunk_size, max_query_len):
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"{sliding_window=}: expected at least 1 key, the query's own; None sees every key.")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"{soft_cap=}: expected a positive number; None leaves scores uncapped.")
    if attention_chunk_size is not None and attention_chunk_size < 1:
        raise ValueError(f"{attention_chunk_size=}: expected at least 1 key; None has no chunks.")
    if max_query_len is not None and max_query_len < 1:
        raise ValueError(f"{max_query_len=}: expected at least 1; None when it is not known.")


def _check_masks(q, kv_pages, block_tables, page_mask, draft_mask, kv_scales, causal, sliding_window,
                 attention_chunk_size, alibi_slopes):  # fmt: skip
    if page_mask is not None:
        dispatch.check_shape("page_mask", page_mask, block_tables.shape)
        dispatch.check_dtype("page_mask", page_mask, (jnp.bool_,))
    if draft_mask is not None:
        dispatch.check_shape("draft_mask", draft_mask, (q.shape[0], "num_words"))
        dispatch.check_int32(draft_mask=draft_mask)
        asked = {
            "causal=False": not causal,
            "sliding_window": sliding_window is not None,
            "attention_chunk_size": attention_chunk_size is not None,
            "alibi_slopes": alibi_slopes is not None,
        }
        if any(asked.values()):
            names = ", ".join(name for name, is_asked in asked.items() if is_asked)
            raise ValueError(
                f"draft_mask with {names}: the drafts of a tree lie side by side in the cache, so distances between"
                " their places mean nothing; leave one of them out."
            )
    if kv_scales is not None:
        layout = PageLayout.of(kv_pages, q.shape[2])
        expected = (layout.num_pages, layout.page_size, 2 * layout.num_kv_heads, 1)
        if are_lines(kv_scales.shape) and fit_lines(layout.page_size, layout.num_kv_heads):
            expected = lines_shape(layout.num_pages, layout.page_size, layout.num_kv_heads)
        dispatch.check_shape("kv_scales", kv_scales, expected)


def _out_dtype(q, out_dtype, out_scale):
    out_dtype = jnp.dtype(q.dtype if out_dtype is None else out_dtype)
    if out_dtype not in (*dispatch.FLOAT_DTYPES, *QUANTIZED_DTYPES):
        raise TypeError(f"{out_dtype=}: expected a floating-point dtype of 16 or 32 bits, int8 or float8.")
    if out_scale is not None and not is_quantized(out_dtype):
        raise ValueError(f"out_scale with out_dtype={out_dtype.name}: a scale belongs to int8 and float8 results.")
    return out_dtype


def _per_head(name, values, num_heads):
    """Return a number or an array of one for each head as f32[num_heads]; None stays None."""
    if values is None:
        return None
    values = jnp.asarray(values, jnp.float32)
    if values.shape not in ((), (num_heads,)):
        raise ValueError(f"{name} has shape {values.shape}: expected a number or [{num_heads}], one for each head.")
    return jnp.broadcast_to(values, (num_heads,))
