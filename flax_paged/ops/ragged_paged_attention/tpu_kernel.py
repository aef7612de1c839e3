"""What the ragged paged attention kernel for TPU computes.

An item with one query takes the decode path, any other the prefill path; both fold a block of keys into a running
softmax (FlashAttention-2) whose maximum, sum and accumulator are float32. Where the blocks come from is in
tpu_pipeline.py, how their rows are read in tpu_rows.py, and how products become scores in tpu_scores.py.
"""

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_paged.ops.kv_cache_update.tpu import start_slices, wait_for_slices
from flax_paged.ops.page_layout import NUM_LANES
from flax_paged.ops.ragged_paged_attention import tpu_pipeline as pipeline
from flax_paged.ops.ragged_paged_attention.tpu_pipeline import KernelConfig, Refs
from flax_paged.ops.ragged_paged_attention.tpu_rows import (
    high_half,
    is_16_bit,
    load_kv,
    pack_rows,
    read_words,
    rows_per_word,
    unpack_rows,
    write_words,
)
from flax_paged.ops.ragged_paged_attention.tpu_scales import decode_scales, load_head_scales, num_lines
from flax_paged.ops.ragged_paged_attention.tpu_scores import (
    MASK_VALUE,
    Keys,
    decode_scores,
    fold_lanes,
    is_edge_block,
    log_sum_exp,
    normalize,
    per_head,
    prefill_mask,
    prefill_scores,
    repeat_lanes,
)

# Rows of K or V that the decode path hands to the matrix unit at a time.
TILE_ROWS = 256
# Above this many pages a block, their copies are issued by a loop.
MAX_UNROLLED_PAGES = 128


def ragged_paged_attention_kernel(*refs, config: KernelConfig):
    """Attend over the paged cache, after writing the step's keys and values to it if so configured."""
    refs = Refs.ordered(refs, config)
    num_seqs = refs.num_seqs[0]
    if config.has_update:
        start_slices(*refs.update)
    for slot in range(2):
        refs.out_rows[slot] = 0
    pl.when(num_seqs > 0)(lambda: pipeline.table_copy(refs, 0).start())
    # The page buffers hold finite numbers at all times (`clean_block` does the rest): a masked key has weight zero, and
    # zero times NaN would be NaN.
    refs.kv[...] = jnp.zeros_like(refs.kv)
    if config.has_update:
        wait_for_slices(*refs.update)

    # What is fetched next, two blocks ahead of the one at work: sequence, item, slot of the item's queries, index in
    # refs.table of its next page, number of pages left. This one stands before the first item.
    cursor = tuple(jnp.int32(x) for x in (0, -1, 2, 0, 0))
    for buffer in range(2):
        fetch, cursor = pipeline.fetch(config, refs, cursor)
        pipeline.start_pages(config, refs, buffer, fetch)

    def sequence(s, carry):
        num_items = pipeline.num_items(config, refs, s)
        return lax.fori_loop(0, num_items, lambda i, carry: _attend_item(config, refs, s, i, *carry), carry)

    lax.fori_loop(0, num_seqs, sequence, (jnp.int32(0), jnp.int32(0), cursor))
    for slot in range(2):
        pipeline.wait_out(config, refs, slot)
    pipeline.zero_padding_rows(config, refs, refs.query_start_loc[num_seqs])


def _attend_item(config, refs, s, i, num_done, num_blocks_done, cursor):
    """Attend with one item; returns the running counts, whose remainders choose the buffers, and the cursor."""
    item = pipeline.describe_item(config, refs, s, i)
    q_slot, out_slot = lax.rem(num_done, 3), lax.rem(num_done, 2)

    def begin_block(b, cursor):
        """Wait for block `b` of the item; returns its buffer, what to fetch into it once it is read, and the cursor."""
        buffer = lax.rem(num_blocks_done + b, 2)
        fetch, cursor = pipeline.fetch(config, refs, cursor)
        pipeline.wait_pages(config, refs, item, b, buffer)
        return buffer, fetch, cursor

    pipeline.wait_q(config, refs, item, q_slot)
    pipeline.wait_out(config, refs, out_slot)
    decode = functools.partial(_decode, config, refs, item, q_slot, out_slot, begin_block)
    prefill = functools.partial(_prefill, config, refs, item, q_slot, out_slot, begin_block)
    if config.decode_only:
        cursor = decode(cursor)
    else:
        cursor = lax.cond(pipeline.takes_decode_path(config, item), decode, prefill, cursor)
    pipeline.start_out(config, refs, item, out_slot)
    return num_done + 1, num_blocks_done + item.num_blocks, cursor


def _matmul(a, b, contract_b):
    """`a @ b.T` (contract_b 1) or `a @ b` (0) with a float32 result."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (((1,), (contract_b,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


# --- Decode: one query ------------------------------------------------------------------------------------------------


def _decode(config, refs, item, q_slot, out_slot, begin_block, cursor):
    """One query row for each head, all heads at once.

    All query heads meet all rows (token, kv head) of the block in one product, and the scores of other heads are
    masked. That wastes matrix work, of which there is plenty, and saves the strided loads that would gather one head's
    rows.
    """
    q = (refs.q[q_slot, 0].astype(jnp.float32) * jnp.float32(config.query_scale)).astype(config.compute_dtype)
    num_rows, head_dim = q.shape

    def block(b, carry):
        cursor, *state = carry
        buffer, fetch, cursor = begin_block(b, cursor)
        start = pipeline.block_start(config, item, b)
        is_cut = (item.key_start > start) | (item.key_end < start + config.tokens_per_block)
        state = lax.cond(
            is_cut,
            lambda *state: _decode_edge_block(config, refs, q, buffer, fetch, Keys(item, start, True), *state),
            lambda *state: _decode_whole_block(config, refs, q, buffer, fetch, Keys(item, start, False), *state),
            *state,
        )
        return cursor, *state

    m = jnp.full((num_rows, 1), MASK_VALUE, jnp.float32)
    l = jnp.zeros((num_rows, NUM_LANES), jnp.float32)  # noqa: E741  # summed over lanes at the end
    acc = jnp.zeros((num_rows, head_dim), jnp.float32)
    cursor, m, l, acc = lax.fori_loop(0, item.num_blocks, block, (cursor, m, l, acc))  # noqa: E741
    total = jnp.sum(l, axis=1, keepdims=True)
    sinks = jnp.max(per_head(config, refs, "sinks", NUM_LANES), axis=1, keepdims=True) if config.has("sinks") else None
    out = normalize(m, total, acc, sinks)
    if config.has("v_scale"):
        out *= per_head(config, refs, "v_scale", head_dim)
    refs.out[out_slot, 0] = out.astype(refs.out.dtype)
    if config.has_lse:
        refs.lse[out_slot, 0] = _column_to_row(log_sum_exp(m, total, sinks), refs.lse.shape[3])
    return cursor


def _column_to_row(column, width):
    """[n, 1] to [1, width], by the diagonal of a square."""
    shape = (column.shape[0], width)
    is_diagonal = lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.sum(jnp.where(is_diagonal, column, 0.0), axis=0, keepdims=True)


def _decode_whole_block(config, refs, q, buffer, fetch, keys, m, l, acc):  # noqa: E741
    """Fold a block whose keys are all live, and start to refill the buffer as soon as it is read."""

    def refill():
        if config.pages_per_block > MAX_UNROLLED_PAGES:
            pipeline.start_pages(config, refs, buffer, fetch)
            return
        # Branch-free: the compiler predicates the copies and places them among the vector work.
        for j in range(config.pages_per_block):
            pl.when(j < fetch[1])(lambda j=j: pipeline.start_page(config, refs, buffer, fetch, j))

    scales_ref = refs.scales.at[buffer] if config.has_kv_scales else None
    return _fold_tokens(config, refs, refs.kv.at[buffer], q, keys, m, l, acc, scales_ref=scales_ref, refill=refill)


def _decode_edge_block(config, refs, q, buffer, fetch, keys, m, l, acc):  # noqa: E741
    """Fold a block that the sequence's end or the window's start cuts: only the chunks that hold live keys, masked."""
    size = config.edge_chunk
    groups = size // config.tokens_per_group
    low, high = keys.live_bounds()

    def chunk(c, state):
        scales_ref = None
        if config.has_kv_scales:
            scales_ref = refs.scales.at[buffer, pl.ds(c * num_lines(config, size), num_lines(config, size))]
        kv_ref = refs.kv.at[buffer, pl.ds(c * groups, groups)]
        return _fold_tokens(config, refs, kv_ref, q, keys.after(c * size), *state, scales_ref=scales_ref)

    pipeline.clean_block(config, refs.kv.at[buffer], low, high)
    first = jnp.maximum(lax.div(low, size), 0)
    last = pl.cdiv(jnp.clip(high, 0, config.tokens_per_block), size)
    state = lax.fori_loop(first, last, chunk, (m, l, acc))
    pipeline.start_pages(config, refs, buffer, fetch)
    return state


def _fold_tokens(config, refs, kv_ref, q, keys, m, l, acc, *, scales_ref=None, refill=lambda: None):  # noqa: E741
    """Fold tokens into the running softmax: all scores, their maximum, then weights and the product with V.

    V is stored between the two passes: reading it from the page buffer again would cost the second pass, which the
    vector units limit, another unpacking.

    Args:
        config: The static configuration.
        refs: The kernel's memory.
        kv_ref: Groups of tokens of the page buffer, as in `load_kv`.
        q: [num_q_heads, head_dim], scaled.
        keys: Where they stand.
        m: f32[num_q_heads, 1].
        l: f32[num_q_heads, 128], of which the sum counts.
        acc: f32[num_q_heads, head_dim].
        scales_ref: f32[lines, 2, 128], the tokens' scales, or None.
        refill: Called once the tokens have been read.
    """
    num_heads, size = config.num_kv_heads, config.tokens_per_group
    num_tokens = kv_ref.shape[0] * size
    packing = rows_per_word(kv_ref.dtype)
    tile = _tile_tokens(num_tokens, num_heads, packing)
    rows = tile * num_heads
    tiles = range(0, num_tokens, tile)
    maximum = None
    for start in tiles:
        k, v = load_kv(config, kv_ref.at[pl.ds(start // size, tile // size)], None)
        refs.values[pl.ds(start * num_heads // packing, rows // packing), :] = pack_rows(v)
        products = _matmul(q, k.astype(config.compute_dtype), 1)
        k_scale = None
        if config.has_kv_scales:
            lines = pl.ds(num_lines(config, start), num_lines(config, tile))
            k_scale, v_scale = decode_scales(config, refs, scales_ref.at[lines], keys.after(start))
            refs.value_scales[:, pl.ds(start * num_heads, rows)] = v_scale
        scores = decode_scores(config, refs, products, kv_ref.dtype, keys.after(start), k_scale)
        refs.scores[:, pl.ds(start * num_heads, rows)] = scores
        tile_maximum = fold_lanes(jnp.maximum, scores)
        maximum = tile_maximum if maximum is None else jnp.maximum(maximum, tile_maximum)

    refill()
    m_new = jnp.maximum(m, jnp.max(maximum, axis=1, keepdims=True))
    alpha = jnp.exp2(m - m_new)
    l, acc = l * alpha, acc * alpha  # noqa: E741
    for start in tiles:
        v = unpack_rows(refs.values[pl.ds(start * num_heads // packing, rows // packing), :], kv_ref.dtype)
        p = jnp.exp2(refs.scores[:, pl.ds(start * num_heads, rows)] - m_new)
        l += fold_lanes(jnp.add, p)  # noqa: E741
        if config.has_kv_scales:
            p *= refs.value_scales[:, pl.ds(start * num_heads, rows)]
        acc += _matmul(p.astype(config.compute_dtype), v.astype(config.compute_dtype), 0)
    return m_new, l, acc


def _tile_tokens(num_tokens, num_heads, packing):
    """Tokens whose rows fill whole registers and number about `TILE_ROWS`; a divisor of `num_tokens`."""
    unit = math.lcm(NUM_LANES, max(packing, 2) * num_heads) // num_heads
    tiles = [n for n in range(unit, num_tokens + 1, unit) if num_tokens % n == 0]
    return max((n for n in tiles if n * num_heads <= TILE_ROWS), default=min(tiles, default=num_tokens))


# --- Prefill: a block of queries --------------------------------------------------------------------------------------


def _prefill(config, refs, item, q_slot, out_slot, begin_block, cursor):
    """A block of queries: rows of one kv head are its query heads times the queries, head-major."""
    _load_q_rows(config, refs, refs.q.at[q_slot])
    refs.m[...] = jnp.full_like(refs.m, MASK_VALUE)
    refs.l[...] = jnp.zeros_like(refs.l)
    refs.acc[...] = jnp.zeros_like(refs.acc)

    def block(b, cursor):
        buffer, fetch, cursor = begin_block(b, cursor)
        start = pipeline.block_start(config, item, b)
        pipeline.clean_block(config, refs.kv.at[buffer], item.key_start - start, item.key_end - start)
        for head in range(config.num_kv_heads):
            k, v = load_kv(config, refs.kv.at[buffer], head)
            refs.k_rows[head] = k.astype(config.compute_dtype)
            if not config.is_packed:
                refs.v_rows[head] = v.astype(config.compute_dtype)
        if config.has_kv_scales:
            load_head_scales(config, refs, refs.scales.at[buffer], Keys(item, start, True))
        pipeline.start_pages(config, refs, buffer, fetch)
        if config.num_mask_words:
            _prefill_block(config, refs, Keys(item, start, True), q_slot)
            return cursor
        # Every query sees every key of an interior block, so it needs no mask.
        is_edge = is_edge_block(config, item, start)
        pl.when(is_edge)(lambda: _prefill_block(config, refs, Keys(item, start, True), q_slot))
        pl.when(jnp.logical_not(is_edge))(lambda: _prefill_block(config, refs, Keys(item, start, False), q_slot))
        return cursor

    cursor = lax.fori_loop(0, item.num_blocks, block, cursor)
    _store_prefill(config, refs, out_slot)
    return cursor


def _load_q_rows(config, refs, q_ref):
    """Queries [queries, heads, head_dim] to scaled rows [kv head, (query head, query), head_dim]."""
    num_queries = config.queries_per_block
    num_heads = config.num_kv_heads * config.num_queries_per_kv
    scale = jnp.float32(config.query_scale)

    def put(head, x):
        kv_head, g = divmod(head, config.num_queries_per_kv)
        refs.q_rows[kv_head, pl.ds(g * num_queries, num_queries), :] = (x * scale).astype(refs.q_rows.dtype)

    if not is_16_bit(q_ref.dtype):
        for head in range(num_heads):
            put(head, q_ref[:, head, :])
        return
    for pair in range(pl.cdiv(num_heads, 2)):
        words = read_words(config, q_ref, pair, q_ref.shape[1] // 2)
        put(2 * pair, pltpu.bitcast(words << 16, jnp.float32))
        if 2 * pair + 1 < num_heads:
            put(2 * pair + 1, pltpu.bitcast(high_half(words), jnp.float32))


def _prefill_block(config, refs, keys, q_slot):
    """Fold the keys in `refs.k_rows` and `v_rows`."""
    mask = prefill_mask(config, refs, keys, q_slot)
    rows = config.heads_per_chunk * config.queries_per_block

    def chunk(c, head):
        chunk_rows = pl.ds(pl.multiple_of(c * rows, rows), rows)
        products = _matmul(refs.q_rows[head, chunk_rows, :], refs.k_rows[head], 1)
        first_query_head = head * config.num_queries_per_kv + c * config.heads_per_chunk
        k_scale, v_scale = (
            (refs.head_scales[which, pl.ds(head, 1), :] if config.has_kv_scales else None) for which in (0, 1)
        )
        scores = prefill_scores(config, refs, products, mask, first_query_head, k_scale)
        # m is the same in all 128 lanes and l is summed over them at the end, so that nothing moves between lanes but
        # the maximum of the scores.
        m = refs.m[head, chunk_rows, :]
        m_new = jnp.maximum(m, jnp.max(scores, axis=1, keepdims=True))
        p = jnp.exp2(scores - repeat_lanes(m_new, scores.shape[1]))
        alpha = jnp.exp2(m - m_new)
        refs.m[head, chunk_rows, :] = m_new
        refs.l[head, chunk_rows, :] = refs.l[head, chunk_rows, :] * alpha + fold_lanes(jnp.add, p)
        p = p if v_scale is None else p * v_scale
        v_rows = refs.k_rows if config.is_packed else refs.v_rows
        product = _matmul(p.astype(config.compute_dtype), v_rows[head], 0)
        alpha = repeat_lanes(alpha, product.shape[1])
        refs.acc[head, chunk_rows, :] = refs.acc[head, chunk_rows, :] * alpha + product
        return head

    num_chunks = config.num_queries_per_kv // config.heads_per_chunk
    lax.fori_loop(0, config.num_kv_heads, lambda head, _: (lax.fori_loop(0, num_chunks, chunk, head), None)[1], None)


def _store_prefill(config, refs, out_slot):
    """Bring the results of all heads to the buffer from which they are copied to HBM."""
    out_ref = refs.out.at[out_slot]
    num_heads = config.num_kv_heads * config.num_queries_per_kv

    def result(head):
        m, total, acc, sinks = _end_of_softmax(config, refs, min(head, num_heads - 1))
        out = normalize(m, total, acc, sinks)
        if config.has("v_scale"):
            out *= per_head(config, refs, "v_scale", out.shape[1], min(head, num_heads - 1))
        return out

    if config.has_lse:
        _store_lse(config, refs, out_slot)
    if not is_16_bit(out_ref.dtype):
        for head in range(num_heads):
            out_ref[:, head, :] = result(head)
        return
    for pair in range(pl.cdiv(num_heads, 2)):
        low, high = (
            pltpu.bitcast(result(head).astype(out_ref.dtype).astype(jnp.float32), jnp.uint32)
            for head in (2 * pair, 2 * pair + 1)
        )
        write_words(config, out_ref, pair, (low >> 16) | high_half(high))


def _end_of_softmax(config, refs, head):
    """The arguments of `normalize` for all queries of a head."""
    kv_head, g = divmod(head, config.num_queries_per_kv)
    rows = pl.ds(g * config.queries_per_block, config.queries_per_block)
    total = jnp.sum(refs.l[kv_head, rows, :], axis=1, keepdims=True)
    m, sinks = jnp.max(refs.m[kv_head, rows, :], axis=1, keepdims=True), None
    if config.has("sinks"):
        sinks = jnp.max(per_head(config, refs, "sinks", NUM_LANES, head), axis=1, keepdims=True)
    return m, total, refs.acc[kv_head, rows, :], sinks


def _store_lse(config, refs, out_slot):
    """Heads go to lanes: [queries, num_q_heads]."""
    shape = (config.queries_per_block, refs.lse.shape[3])
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    lse = jnp.zeros(shape, jnp.float32)
    for head in range(config.num_kv_heads * config.num_queries_per_kv):
        m, total, _, sinks = _end_of_softmax(config, refs, head)
        lse = jnp.where(lane == head, log_sum_exp(m, total, sinks), lse)
    refs.lse[out_slot, :, 0, :] = lse
