"""Ragged paged attention on TPU: checks, padding, block sizes and the Pallas call."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_paged.ops import dispatch
from flax_paged.ops.kv_cache_update.tpu import SLICES_IN_FLIGHT, prepare_update, token_groups
from flax_paged.ops.page_layout import NUM_LANES, V_LANE, PageLayout
from flax_paged.ops.quantization import QUANTIZED_DTYPES, is_quantized, quantize
from flax_paged.ops.ragged_paged_attention.block_sizes import (
    SMEM_BUDGET,
    Problem,
    choose_block_sizes,
    padded_rows,
    smem_bytes,
    whole_rows,
)
from flax_paged.ops.ragged_paged_attention.tpu_kernel import ragged_paged_attention_kernel
from flax_paged.ops.ragged_paged_attention.tpu_pipeline import LOG2_E, KernelConfig
from flax_paged.ops.ragged_paged_attention.tpu_scales import num_lines
from flax_paged.ops.scales_layout import fit_lines, lines_shape
from flax_paged.ops.tpu_platform import interpret_params, tpu_generation

_FLOAT_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))


def ragged_paged_attention_tpu(
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
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    attention_chunk_size: int | None = None,
    causal: bool = True,
    k_scale: Any = None,
    v_scale: Any = None,
    page_mask: jax.Array | None = None,
    draft_mask: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
    out_dtype: Any = None,
    out_scale: Any = None,
    return_lse: bool = False,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    max_query_len: int | None = None,
    interpret: Any = False,
    update: tuple[jax.Array, jax.Array, jax.Array, jax.Array] | None = None,
) -> Any:
    """Attend over a ragged batch with the Pallas TPU kernel; see `ragged_paged_attention` for the meaning.

    Args:
        q: f32 or bf16[num_tokens, num_q_heads, head_dim].
        kv_pages: f32 or bf16, in any layout of `ops.page_layout`; int8 or float8 in the TPU's.
        seq_lens: i32[max_num_seqs].
        block_tables: i32[max_num_seqs, pages_per_seq]; stays in HBM, rows are streamed into SMEM.
        query_start_loc: i32[max_num_seqs + 1].
        num_seqs: i32[1].
        sm_scale: Factor on the scores.
        sliding_window: Keys that a query sees, its own included.
        soft_cap: Cap on the scaled scores.
        sinks: f32[num_q_heads], one more logit a head without a value; None for none.
        alibi_slopes: f32[num_q_heads], or None.
        attention_chunk_size: A query sees keys of its own chunk only; None for all.
        causal: Whether later keys are hidden.
        k_scale: Of an int8 or float8 cache: a number or [num_kv_heads], or None.
        v_scale: Likewise.
        page_mask: bool[max_num_seqs, pages_per_seq], pages that are seen; the others are not fetched. None for all.
        draft_mask: i32[num_tokens, num_words], as in `ragged_paged_attention`; at most 32 words. None for none.
        kv_scales: f32[num_pages, lines_per_page, 2, 128], as `ops.scales_layout` describes, of an int8 or float8 cache;
            None for none.
        out_dtype: Result dtype; None means q's. What is not float32 or bfloat16 leaves the kernel as float32.
        out_scale: Of an int8 or float8 result: a number or [num_q_heads], or None.
        return_lse: Return the logarithm of each softmax's denominator too.
        num_kv_pages_per_block: Pages fetched at a time; None lets `block_sizes` choose.
        num_queries_per_block: Queries of a sequence that share a fetch; None lets `block_sizes` choose.
        vmem_limit_bytes: VMEM that the kernel may use; None means the generation's budget.
        max_query_len: 1 compiles only the decode path; otherwise an upper bound or None.
        interpret: False, True, or a `pltpu.InterpretParams`.
        update: k, v, slot_mapping and num_kv_update_slices as in `kv_cache_update`, written to the cache first, k and v
            already in its dtype if that is int8 or float8; None for no update.

    Returns:
        [num_tokens, num_q_heads, head_dim]; rows past the last query are zeros. With `return_lse` a pair of that and
        f32[num_tokens, num_q_heads]. With `update` a pair of this result and the cache, in the buffer of `kv_pages`
        where that is donated.

    Raises:
        ValueError: Shapes, dtypes or block sizes that the kernel cannot take.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    layout = PageLayout.of(kv_pages, head_dim)
    result_dtype = jnp.dtype(out_dtype or q.dtype)
    out_dtype = result_dtype if result_dtype in _FLOAT_DTYPES else jnp.dtype(jnp.float32)
    _check(q, kv_pages)
    _check_kv_scales(kv_scales, kv_pages, layout)
    problem = Problem(
        num_q_heads=num_q_heads,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.num_lanes,
        page_size=layout.page_size,
        pages_per_seq=block_tables.shape[1],
        num_tokens=num_tokens,
        q_bytes=max(q.dtype.itemsize, out_dtype.itemsize),
        kv_bytes=kv_pages.dtype.itemsize,
        decode_only=max_query_len == 1,
        max_query_len=max_query_len,
        is_packed=layout.is_packed,
        has_kv_scales=kv_scales is not None,
    )
    page_mask_words, num_mask_words = _page_mask_words(page_mask)
    _check_smem(problem, seq_lens.shape[0], num_mask_words)
    blocks = choose_block_sizes(
        problem,
        generation=tpu_generation() if interpret is False else None,
        num_kv_pages_per_block=num_kv_pages_per_block,
        num_queries_per_block=num_queries_per_block,
        vmem_limit_bytes=vmem_limit_bytes,
    )
    per_head = {
        "sinks": _for_heads(sinks, num_q_heads, 1, LOG2_E),
        "slopes": _for_heads(alibi_slopes, num_q_heads, 1, LOG2_E),
        "k_scale": _for_heads(k_scale, layout.num_kv_heads, num_q_heads // layout.num_kv_heads),
        "v_scale": _for_heads(v_scale, layout.num_kv_heads, num_q_heads // layout.num_kv_heads),
    }
    per_head = {name: numbers for name, numbers in per_head.items() if numbers is not None}
    config = KernelConfig(
        num_kv_heads=layout.num_kv_heads,
        num_queries_per_kv=num_q_heads // layout.num_kv_heads,
        page_size=layout.page_size,
        pages_per_block=blocks.pages_per_block,
        queries_per_block=blocks.queries_per_block,
        heads_per_chunk=blocks.heads_per_chunk,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        causal=causal,
        decode_only=max_query_len == 1,
        is_packed=layout.is_packed,
        edge_chunk=blocks.edge_chunk,
        compute_dtype=q.dtype if is_quantized(kv_pages.dtype) else dispatch.product_dtype(q, kv_pages),
        interpret=interpret is not False,
        has_update=update is not None,
        attention_chunk_size=attention_chunk_size,
        tokens_per_group=layout.tokens_per_group,
        per_head=tuple(per_head),
        has_lse=return_lse,
        num_mask_words=num_mask_words,
        num_draft_words=0 if draft_mask is None else draft_mask.shape[1],
        has_kv_scales=kv_scales is not None,
    )
    if "k_scale" in per_head:
        per_head["k_scale"] *= config.score_factor
    if page_mask is not None:  # a negative id is not fetched
        block_tables = jnp.where(page_mask, block_tables, -1)
    groups = token_groups(kv_pages, layout)
    padding = ((0, 0), (0, padded_rows(num_q_heads) - num_q_heads), (0, layout.num_lanes - head_dim))
    out, *others = _call(
        config,
        jnp.pad(q, padding),
        groups,
        # The copies of its rows move whole lines of 128.
        jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % NUM_LANES))),
        # One more entry than there are sequences: the kernel looks one past the last.
        jnp.pad(seq_lens, (0, 1)),
        jnp.pad(query_start_loc, (0, 1), mode="edge"),
        num_seqs,
        out_dtype=out_dtype,
        vmem_limit_bytes=blocks.vmem_limit_bytes,
        interpret=interpret,
        per_head=_per_head_rows(per_head.values()) if per_head else None,
        page_mask=page_mask_words,
        draft_mask=draft_mask,
        kv_scales=kv_scales,
        update=None if update is None else prepare_update(groups, layout, *update),
    )
    first = V_LANE if layout.is_packed else 0
    out = out[:, :num_q_heads, first : first + head_dim]
    if is_quantized(result_dtype):
        scale = 1.0 if out_scale is None else jnp.asarray(out_scale, jnp.float32).reshape(1, -1, 1)
        out = quantize(out, result_dtype, scale)
    result = out.astype(result_dtype)
    if return_lse:
        result = (result, others[-1][:, 0, :num_q_heads])
    return result if update is None else (result, others[0].reshape(kv_pages.shape))


def _for_heads(numbers, num_heads, repeats, factor=1.0):
    """An option, a number or one for each head, as f32[num_heads * repeats]; None stays None."""
    if numbers is None:
        return None
    return jnp.repeat(jnp.broadcast_to(jnp.asarray(numbers, jnp.float32) * factor, (num_heads,)), repeats)


def _per_head_rows(options):
    """Options for each query head as the kernel reads them: f32[len(options), rows, 128]."""
    stacked = jnp.stack(list(options))
    num_heads = stacked.shape[1]
    stacked = jnp.pad(stacked, ((0, 0), (0, padded_rows(num_heads) - num_heads)))
    return jnp.broadcast_to(stacked[:, :, None], (*stacked.shape, NUM_LANES))


def _check(q, kv_pages):
    for name, dtype, allowed in (
        ("q", q.dtype, _FLOAT_DTYPES),
        ("kv_pages", kv_pages.dtype, (*_FLOAT_DTYPES, *QUANTIZED_DTYPES)),
    ):
        if dtype not in allowed:
            names = ", ".join(jnp.dtype(x).name for x in allowed)
            raise ValueError(f"{name} has dtype {dtype}; the TPU kernel takes {names}.")
    if kv_pages.shape[-1] % NUM_LANES:
        raise ValueError(
            f"kv_pages has head_dim {kv_pages.shape[-1]}; the TPU kernel needs a multiple of {NUM_LANES}:"
            " make the cache with head_dim_alignment=128."
        )


def _check_kv_scales(kv_scales, kv_pages, layout):
    if kv_scales is None:
        return
    expected = lines_shape(layout.num_pages, layout.page_size, layout.num_kv_heads)
    fits = is_quantized(kv_pages.dtype) and fit_lines(layout.page_size, layout.num_kv_heads)
    if not fits or kv_scales.shape != expected or kv_scales.dtype != jnp.float32:
        raise ValueError(
            f"kv_scales is {kv_scales.dtype}{list(kv_scales.shape)}; the TPU kernel takes float32 scales of an int8 or"
            f" float8 cache in lines [num_pages, page_size * num_kv_heads / {NUM_LANES}, 2, {NUM_LANES}], with"
            f" page_size * num_kv_heads a multiple of {NUM_LANES}, here {layout.page_size * layout.num_kv_heads}."
        )


def _page_mask_words(page_mask):
    """A page mask as the kernel reads it, i32[S * words and some more], and the words of a sequence."""
    if page_mask is None:
        return None, 0
    num_pages = page_mask.shape[1]
    num_words = -(-num_pages // 32)
    bits = jnp.pad(page_mask, ((0, 0), (0, num_words * 32 - num_pages))).reshape(-1, 32).astype(jnp.uint32)
    words = jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32)[None], axis=1, dtype=jnp.uint32).astype(jnp.int32)
    # The last block of a sequence may reach past its words, the last sequence's past all.
    return jnp.pad(words, (0, num_words + 1)), num_words


def _check_smem(problem, max_num_seqs, num_mask_words):
    needed = smem_bytes(problem, max_num_seqs, num_mask_words)
    if needed > SMEM_BUDGET:
        raise ValueError(
            f"block_tables of {problem.pages_per_seq} pages for each of {max_num_seqs} sequences needs {needed} bytes"
            f" of SMEM, more than {SMEM_BUDGET}; use larger pages or fewer sequences."
        )


def _call(
    config,
    q,
    kv_pages,
    block_tables,
    seq_lens,
    query_start_loc,
    num_seqs,
    *,
    out_dtype,
    vmem_limit_bytes,
    interpret,
    per_head,
    page_mask,
    draft_mask,
    kv_scales,
    update,
):
    scalars, operands = [seq_lens, query_start_loc, num_seqs], [q, block_tables, kv_pages]
    out_shape, aliases = [jax.ShapeDtypeStruct(q.shape, out_dtype)], {}
    if page_mask is not None:
        scalars.append(page_mask)
    if kv_scales is not None:
        operands.insert(0, kv_scales)
    if draft_mask is not None:
        scalars.append(jnp.pad(draft_mask[:, 0] & 1, (0, 1)))
        draft_mask = jnp.pad(draft_mask, ((0, 0), (0, -draft_mask.shape[1] % NUM_LANES)))[:, None]
        operands.insert(0, draft_mask)
    if update is not None:
        slot_mapping, num_slices, new_groups = update
        scalars += [slot_mapping, num_slices]
        operands.insert(-1, new_groups)
        out_shape.append(jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype))
        aliases = {len(scalars) + len(operands) - 1: 1}
    if config.has_lse:
        out_shape.append(jax.ShapeDtypeStruct((len(q), 1, _lse_lanes(q)), jnp.float32))
    if interpret is False:
        # XLA likes to place small operands in VMEM, from where a "copy" to VMEM is a loop of vector loads and stores.
        operands = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in operands]
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    in_specs = [hbm] * len(operands)
    if per_head is not None:
        operands, in_specs = [per_head, *operands], [pl.BlockSpec(memory_space=pltpu.VMEM), *in_specs]
        aliases = {operand + 1: result for operand, result in aliases.items()}
    return pl.pallas_call(
        functools.partial(ragged_paged_attention_kernel, config=config),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=in_specs,
            out_specs=[hbm] * len(out_shape),
            scratch_shapes=_scratch_shapes(config, q, kv_pages, block_tables.shape[1], out_dtype, draft_mask),
        ),
        out_shape=out_shape,
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=True),
        interpret=interpret_params(interpret),
        name="ragged_paged_attention",
    )(*scalars, *operands)


def _lse_lanes(q):
    return -(-q.shape[1] // NUM_LANES) * NUM_LANES


def _scratch_shapes(config, q, kv_pages, pages_per_seq, out_dtype, draft_mask):
    """Scratch in the order of `Refs.ordered`; `block_sizes.vmem_bytes` counts the same buffers."""
    _, num_q_rows, head_dim = q.shape
    smem, vmem, dma = pltpu.SMEM, pltpu.VMEM, pltpu.SemaphoreType.DMA
    groups_per_block = config.tokens_per_block // config.tokens_per_group
    block_rows = config.tokens_per_block * config.num_kv_heads
    values_packing = 4 // kv_pages.dtype.itemsize
    q_block = (config.queries_per_block, num_q_rows, head_dim)
    scratch = [
        smem((2 * pages_per_seq,), jnp.int32),
        smem((2,), jnp.int32),
        vmem((2, groups_per_block, *kv_pages.shape[2:]), kv_pages.dtype),
        vmem((3, *q_block), q.dtype),
        vmem((2, *q_block), out_dtype),
        vmem((num_q_rows, block_rows), jnp.float32),
        vmem((block_rows // values_packing, head_dim), jnp.uint32 if values_packing > 1 else kv_pages.dtype),
        *[dma((n,)) for n in (2, 2, 3, 2)],
    ]
    if not config.decode_only:
        rows = (config.num_kv_heads, config.num_queries_per_kv * config.queries_per_block)
        keys = (config.num_kv_heads, config.tokens_per_block, head_dim)
        scratch += [
            vmem((*rows, head_dim), config.compute_dtype),
            *[vmem(keys, config.compute_dtype)] * (1 if config.is_packed else 2),
            vmem((*rows, NUM_LANES), jnp.float32),
            vmem((*rows, NUM_LANES), jnp.float32),
            vmem((*rows, head_dim), jnp.float32),
        ]
    if config.has_lse:
        scratch.append(vmem((2, config.queries_per_block, 1, _lse_lanes(q)), jnp.float32))
    if config.has_draft_mask:
        scratch.append(vmem((3, config.queries_per_block, 1, draft_mask.shape[2]), jnp.int32))
    if config.has_kv_scales:
        scratch += [
            vmem((2, num_lines(config, config.tokens_per_block), 2, NUM_LANES), jnp.float32),
            vmem((1, block_rows), jnp.float32),
        ]
        if not config.decode_only:
            scratch.append(vmem((2, whole_rows(config.num_kv_heads), config.tokens_per_block), jnp.float32))
    if config.has_update:
        scratch.append(dma((SLICES_IN_FLIGHT,)))
    return scratch
