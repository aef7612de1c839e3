"""What the ragged paged attention kernel for TPU computes.

An item with one query takes the decode path, any other the prefill path; both fold a block of keys into a running
softmax (FlashAttention-2) whose maximum, sum and accumulator are float32. Where the blocks come from is in
tpu_pipeline.py.
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
from flax_paged.ops.ragged_paged_attention.tpu_pipeline import LOG2_E, KernelConfig, Refs

MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)
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
        pipeline.wait_out(refs, slot)
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

    pipeline.q_copy(refs, item, q_slot).wait()
    pipeline.wait_out(refs, out_slot)
    q_ref, out_ref = refs.q.at[q_slot], refs.out.at[out_slot]
    decode = functools.partial(_decode, config, refs, item, q_ref, out_ref, begin_block)
    prefill = functools.partial(_prefill, config, refs, item, q_ref, out_ref, begin_block)
    if config.decode_only:
        cursor = decode(cursor)
    else:
        cursor = lax.cond(item.num_queries == 1, decode, prefill, cursor)
    pipeline.start_out(refs, item, out_slot)
    return num_done + 1, num_blocks_done + item.num_blocks, cursor


# --- Rows of a buffer [..., rows, lanes] ------------------------------------------------------------------------------


def _read_words(config, ref, start=0, stride=1):
    """Rows start, start + stride, ... of a 16-bit buffer seen as words: rows 2i (low) and 2i + 1 (high) share a row.

    The stride is 1, or the number of words that each index of the first dimension has: one head's rows.
    """
    first, lanes = ref.shape[0], ref.shape[-1]
    num_rows = math.prod(ref.shape[:-1])
    if config.interpret:  # the interpreter has no views of refs, so the value is viewed instead
        return pltpu.bitcast(ref[...].reshape(num_rows, lanes), jnp.uint32)[start::stride]
    if lanes != NUM_LANES:  # strided loads take one line of 128 lanes
        words = ref.bitcast(jnp.uint32)
        if stride == 1:
            return words[...].reshape(num_rows // 2, lanes)
        return words[:, start, 0, :] if ref.ndim == 4 else words[:, start, :]
    view = ref.reshape(num_rows, lanes).bitcast(jnp.uint32)
    return view[...] if stride == 1 else view[pl.ds(start, first, stride=stride), :]


def _write_words(config, ref, start, words):
    """Write words [tokens, head_dim] to the rows 2 * start (low) and 2 * start + 1 (high) of every token."""
    tokens, rows, head_dim = ref.shape
    if config.interpret:
        pair = pltpu.bitcast(words, ref.dtype).reshape(tokens, 2, head_dim)
        ref[:, 2 * start, :] = pair[:, 0]
        ref[:, 2 * start + 1, :] = pair[:, 1]
    elif head_dim != NUM_LANES:
        ref.bitcast(jnp.uint32)[:, start, :] = words
    else:
        view = ref.reshape(tokens * rows, head_dim).bitcast(jnp.uint32)
        view[pl.ds(start, tokens, stride=rows // 2), :] = words


def _read_half(config, kv_ref, which, head):
    """Rows [n, lanes] of a 32-bit page buffer at index `which` of its dimension of two, of one head or all (None)."""
    groups, num_heads, _, lanes = kv_ref.shape
    if config.interpret or lanes != NUM_LANES:
        rows = kv_ref[:, :, which, :].reshape(groups * num_heads, lanes) if head is None else kv_ref[:, head, which, :]
        return rows
    view = kv_ref.reshape(groups * num_heads * 2, lanes)
    if head is None:
        return view[pl.ds(which, groups * num_heads, stride=2), :]
    return view[pl.ds(2 * head + which, groups, stride=2 * num_heads), :]


def _is_16_bit(dtype):
    return jnp.dtype(dtype).itemsize == 2


def _high_half(words):
    return words & jnp.uint32(0xFFFF0000)


def _split_words(words, dtype):
    """Words (K low, V high) to the rows of K and of V.

    Packs row i with row i + n/2 instead of with its neighbour, which would need shuffles: result row 2i is word row i,
    result row 2i + 1 is word row i + n/2 (`_key_order`). Attention does not mind the order of its keys.
    """
    n = words.shape[0] // 2
    first, second = words[:n], words[n:]
    low = (first & jnp.uint32(0xFFFF)) | (second << 16)
    high = (first >> 16) | _high_half(second)
    return pltpu.bitcast(low, dtype), pltpu.bitcast(high, dtype)


def _load_kv(config, kv_ref, head):
    """K and V of tokens as rows, of one head or (head None) of every head.

    Where they share the lanes, both are the same rows: zeros in q meet V, and the lanes of the result that come from K
    are not looked at.

    Args:
        config: The static configuration.
        kv_ref: [groups, num_kv_heads, 2, lanes].
        head: KV head, or None.

    Returns:
        K and V, each [rows, lanes], in the order of `_key_order`.
    """
    if _is_16_bit(kv_ref.dtype):
        stride = 1 if head is None else kv_ref.shape[1]
        words = _read_words(config, kv_ref, head or 0, stride)
        if not config.is_packed:
            return _split_words(words, kv_ref.dtype)
        rows = pltpu.bitcast(words, kv_ref.dtype)
        return rows, rows
    first, second = (_read_half(config, kv_ref, which, head) for which in (0, 1))
    if not config.is_packed:
        return first, second
    rows = jnp.concatenate([first, second], axis=0)
    return rows, rows


def _key_order(config, rows, num_rows, num_heads, dtype):
    """Token and head that the rows (an integer array) of `_load_kv` come from; `num_heads` is 1 where it took one head.

    In 16 bits two rows share a word: those of a pair of tokens where they are packed, else the two that `_split_words`
    brought together. In 32 bits the first tokens of all pairs come before the second ones.
    """
    half = num_rows // 2
    row, which = (rows >> 1, rows & 1) if _is_16_bit(dtype) else (lax.rem(rows, half), lax.div(rows, half))
    if config.is_packed:
        return 2 * lax.div(row, num_heads) + which, lax.rem(row, num_heads)
    row = row + half * which
    return lax.div(row, num_heads), lax.rem(row, num_heads)


def _pack_rows(x):
    return pltpu.bitcast(x, jnp.uint32) if _is_16_bit(x.dtype) else x


def _unpack_rows(x, dtype):
    return pltpu.bitcast(x, dtype) if _is_16_bit(dtype) else x


# --- The running softmax ---------------------------------------------------------------------------------------------


def _matmul(a, b, contract_b):
    """`a @ b.T` (contract_b 1) or `a @ b` (0) with a float32 result."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (((1,), (contract_b,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _finish_scores(config, scores):
    """Scale and cap scores, up to the mask; the result is in units of log2."""
    if config.query_scale != config.score_scale:
        scores *= jnp.float32(config.score_scale / config.query_scale)
    if not config.soft_cap:
        return scores
    return jnp.tanh(scores) * jnp.float32(config.soft_cap * LOG2_E)


def _normalize(m, total, acc, sinks):
    """End a running softmax; rows that have seen no key give zeros.

    Args:
        m: f32[rows, 1], the largest score.
        total: f32[rows, 1], the sum of the weights.
        acc: f32[rows, head_dim], the sum of the values with these weights.
        sinks: f32[rows or 1, 1], one more logit without a value, or None.

    Returns:
        f32[rows, head_dim].
    """
    sees_none = m <= MASK_VALUE / 2
    if sinks is None:
        return jnp.where(sees_none, 0.0, acc / jnp.where(sees_none, 1.0, total))
    largest = jnp.maximum(m, sinks)
    # Where no key was seen this is exp2 of a hugely negative number: 0, and so is the result.
    factor = jnp.exp2(m - largest)
    return acc * (factor / (total * factor + jnp.exp2(sinks - largest)))


# --- Decode: one query ------------------------------------------------------------------------------------------------


def _decode(config, refs, item, q_ref, out_ref, begin_block, cursor):
    """One query row for each head, all heads at once.

    All query heads meet all rows (token, kv head) of the block in one product, and the scores of other heads are
    masked. That wastes matrix work, of which there is plenty, and saves the strided loads that would gather one head's
    rows.
    """
    q = (q_ref[0].astype(jnp.float32) * jnp.float32(config.query_scale)).astype(config.compute_dtype)
    num_rows, head_dim = q.shape

    def block(b, carry):
        cursor, *state = carry
        buffer, fetch, cursor = begin_block(b, cursor)
        low, high = pipeline.live_tokens(config, item, b)
        is_edge = (low > 0) | (high < config.tokens_per_block)
        state = lax.cond(
            is_edge,
            lambda *state: _decode_edge_block(config, refs, q, buffer, fetch, low, high, *state),
            lambda *state: _decode_whole_block(config, refs, q, buffer, fetch, *state),
            *state,
        )
        return cursor, *state

    m = jnp.full((num_rows, 1), MASK_VALUE, jnp.float32)
    l = jnp.zeros((num_rows, NUM_LANES), jnp.float32)  # noqa: E741  # summed over lanes at the end
    acc = jnp.zeros((num_rows, head_dim), jnp.float32)
    cursor, m, l, acc = lax.fori_loop(0, item.num_blocks, block, (cursor, m, l, acc))  # noqa: E741
    sinks = jnp.max(refs.sinks[...], axis=1, keepdims=True) if config.has_sinks else None
    out_ref[0] = _normalize(m, jnp.sum(l, axis=1, keepdims=True), acc, sinks).astype(out_ref.dtype)
    return cursor


def _decode_whole_block(config, refs, q, buffer, fetch, m, l, acc):  # noqa: E741
    """Fold a block whose keys are all live, and start to refill the buffer as soon as it is read."""

    def refill():
        if config.pages_per_block > MAX_UNROLLED_PAGES:
            pipeline.start_pages(config, refs, buffer, fetch)
            return
        # Branch-free: the compiler predicates the copies and places them among the vector work.
        for j in range(config.pages_per_block):
            pl.when(j < fetch[1])(lambda j=j: pipeline.page_copy(config, refs, buffer, fetch, j).start())

    return _fold_tokens(config, refs, refs.kv.at[buffer], q, None, m, l, acc, refill=refill)


def _decode_edge_block(config, refs, q, buffer, fetch, low, high, m, l, acc):  # noqa: E741
    """Fold a block that the sequence's end or the window's start cuts: only the chunks that hold live keys, masked."""
    size = config.edge_chunk
    groups = size // config.tokens_per_group

    def chunk(c, state):
        live = (low - c * size, high - c * size)
        return _fold_tokens(config, refs, refs.kv.at[buffer, pl.ds(c * groups, groups)], q, live, *state)

    pipeline.clean_block(config, refs.kv.at[buffer], low, high)
    first = jnp.maximum(lax.div(low, size), 0)
    last = pl.cdiv(jnp.clip(high, 0, config.tokens_per_block), size)
    state = lax.fori_loop(first, last, chunk, (m, l, acc))
    pipeline.start_pages(config, refs, buffer, fetch)
    return state


def _fold_tokens(config, refs, kv_ref, q, live, m, l, acc, refill=lambda: None):  # noqa: E741
    """Fold tokens into the running softmax: all scores, their maximum, then weights and the product with V.

    V is stored between the two passes: reading it from the page buffer again would cost the second pass, which the
    vector units limit, another unpacking.

    Args:
        config: The static configuration.
        refs: The kernel's memory.
        kv_ref: [groups, num_kv_heads, 2, lanes].
        q: [num_q_heads, head_dim], scaled.
        live: Bounds of the live tokens, or None if all are.
        m: f32[num_q_heads, 1].
        l: f32[num_q_heads, 128], of which the sum counts.
        acc: f32[num_q_heads, head_dim].
        refill: Called once the tokens have been read.
    """
    num_heads, size = kv_ref.shape[1], config.tokens_per_group
    num_tokens = kv_ref.shape[0] * size
    tile = _tile_tokens(num_tokens, num_heads)
    rows = tile * num_heads
    tiles = range(0, num_tokens, tile)
    packing = 2 if _is_16_bit(kv_ref.dtype) else 1
    maximum = None
    for start in tiles:
        k, v = _load_kv(config, kv_ref.at[pl.ds(start // size, tile // size)], None)
        refs.values[pl.ds(start * num_heads // packing, rows // packing), :] = _pack_rows(v)
        scores = _finish_scores(config, _matmul(q, k.astype(config.compute_dtype), 1))
        bounds = None if live is None else (live[0] - start, live[1] - start)
        scores = _mask_decode(config, scores, kv_ref.dtype, bounds)
        refs.scores[:, pl.ds(start * num_heads, rows)] = scores
        tile_maximum = _fold_lanes(jnp.maximum, scores)
        maximum = tile_maximum if maximum is None else jnp.maximum(maximum, tile_maximum)

    refill()
    m_new = jnp.maximum(m, jnp.max(maximum, axis=1, keepdims=True))
    alpha = jnp.exp2(m - m_new)
    l, acc = l * alpha, acc * alpha  # noqa: E741
    for start in tiles:
        v = _unpack_rows(refs.values[pl.ds(start * num_heads // packing, rows // packing), :], kv_ref.dtype)
        p = jnp.exp2(refs.scores[:, pl.ds(start * num_heads, rows)] - m_new)
        l += _fold_lanes(jnp.add, p)  # noqa: E741
        acc += _matmul(p.astype(config.compute_dtype), v.astype(config.compute_dtype), 0)
    return m_new, l, acc


def _tile_tokens(num_tokens, num_heads):
    """Tokens whose rows fill whole registers and number about `TILE_ROWS`; a divisor of `num_tokens`."""
    unit = math.lcm(NUM_LANES, 2 * num_heads) // num_heads
    tiles = [n for n in range(unit, num_tokens + 1, unit) if num_tokens % n == 0]
    return max((n for n in tiles if n * num_heads <= TILE_ROWS), default=min(tiles, default=num_tokens))


def _repeat_lanes(x, width):
    """[rows, 128] to [rows, width] by repetition."""
    return jnp.concatenate([x] * (width // NUM_LANES), axis=1)


def _fold_lanes(op, x):
    """[rows, n * 128] to [rows, 128]."""
    return functools.reduce(op, (x[:, i : i + NUM_LANES] for i in range(0, x.shape[1], NUM_LANES)))


def _mask_decode(config, scores, kv_dtype, live):
    """Mask scores [query heads, (token, kv head)] of other kv heads, and of tokens outside the bounds `live`."""
    num_rows, num_keys = scores.shape
    num_heads = config.num_kv_heads
    # The heads of 16-bit rows repeat, so that one period's mask serves for all.
    period = math.lcm(NUM_LANES, 2 * num_heads)
    width = period if _is_16_bit(kv_dtype) and num_keys % period == 0 else num_keys
    key = lax.broadcasted_iota(jnp.int32, (num_rows, width), 1)
    query_head = lax.div(lax.broadcasted_iota(jnp.int32, (num_rows, width), 0), config.num_queries_per_kv)
    _, key_head = _key_order(config, key, num_keys, num_heads, kv_dtype)
    bias = jnp.where(key_head == query_head, jnp.float32(0), jnp.float32(MASK_VALUE))
    scores += jnp.concatenate([bias] * (num_keys // width), axis=1)
    if live is None:
        return scores
    key = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    token, _ = _key_order(config, key, num_keys, num_heads, kv_dtype)
    return jnp.where((token >= live[0]) & (token < live[1]), scores, jnp.float32(MASK_VALUE))


# --- Prefill: a block of queries --------------------------------------------------------------------------------------


def _prefill(config, refs, item, q_ref, out_ref, begin_block, cursor):
    """A block of queries: rows of one kv head are its query heads times the queries, head-major."""
    _load_q_rows(config, refs, q_ref)
    refs.m[...] = jnp.full_like(refs.m, MASK_VALUE)
    refs.l[...] = jnp.zeros_like(refs.l)
    refs.acc[...] = jnp.zeros_like(refs.acc)

    def block(b, cursor):
        buffer, fetch, cursor = begin_block(b, cursor)
        pipeline.clean_block(config, refs.kv.at[buffer], *pipeline.live_tokens(config, item, b))
        for head in range(config.num_kv_heads):
            k, v = _load_kv(config, refs.kv.at[buffer], head)
            refs.k_rows[head] = k.astype(config.compute_dtype)
            if not config.is_packed:
                refs.v_rows[head] = v.astype(config.compute_dtype)
        pipeline.start_pages(config, refs, buffer, fetch)
        start = (item.first_page + b * config.pages_per_block) * config.page_size
        end = start + config.tokens_per_block
        # Every query sees every key of an interior block, so it needs no mask.
        is_edge = end > (item.position + 1 if config.causal else item.key_end)
        last = item.position + item.num_queries - 1
        if config.sliding_window is not None:
            is_edge |= start <= last - config.sliding_window
            if not config.causal:
                is_edge |= end > item.position + config.sliding_window
        if config.attention_chunk_size is not None:
            size = config.attention_chunk_size
            is_edge |= start < last - lax.rem(last, size)
            if not config.causal:
                is_edge |= end > item.position - lax.rem(item.position, size) + size
        pl.when(is_edge)(lambda: _prefill_block(config, refs, item, start))
        pl.when(jnp.logical_not(is_edge))(lambda: _prefill_block(config, refs, item, None))
        return cursor

    cursor = lax.fori_loop(0, item.num_blocks, block, cursor)
    _store_prefill(config, refs, out_ref)
    return cursor


def _load_q_rows(config, refs, q_ref):
    """Queries [queries, heads, head_dim] to scaled rows [kv head, (query head, query), head_dim]."""
    num_queries = config.queries_per_block
    num_heads = config.num_kv_heads * config.num_queries_per_kv
    scale = jnp.float32(config.query_scale)

    def put(head, x):
        kv_head, g = divmod(head, config.num_queries_per_kv)
        refs.q_rows[kv_head, pl.ds(g * num_queries, num_queries), :] = (x * scale).astype(refs.q_rows.dtype)

    if not _is_16_bit(q_ref.dtype):
        for head in range(num_heads):
            put(head, q_ref[:, head, :])
        return
    for pair in range(pl.cdiv(num_heads, 2)):
        words = _read_words(config, q_ref, pair, q_ref.shape[1] // 2)
        put(2 * pair, pltpu.bitcast(words << 16, jnp.float32))
        if 2 * pair + 1 < num_heads:
            put(2 * pair + 1, pltpu.bitcast(_high_half(words), jnp.float32))


def _prefill_block(config, refs, item, start):
    """Fold the keys in `refs.k_rows` and `v_rows`; `start` is the position of the first, or None: no mask needed."""
    mask = None if start is None else _prefill_mask(config, refs.kv.dtype, item, start)
    rows = config.heads_per_chunk * config.queries_per_block

    def chunk(c, head):
        chunk_rows = pl.ds(pl.multiple_of(c * rows, rows), rows)
        scores = _finish_scores(config, _matmul(refs.q_rows[head, chunk_rows, :], refs.k_rows[head], 1))
        if mask is not None:
            scores = jnp.where(mask, scores, jnp.float32(MASK_VALUE))
        # m is the same in all 128 lanes and l is summed over them at the end, so that nothing moves between lanes but
        # the maximum of the scores.
        m = refs.m[head, chunk_rows, :]
        m_new = jnp.maximum(m, jnp.max(scores, axis=1, keepdims=True))
        p = jnp.exp2(scores - _repeat_lanes(m_new, scores.shape[1]))
        alpha = jnp.exp2(m - m_new)
        refs.m[head, chunk_rows, :] = m_new
        refs.l[head, chunk_rows, :] = refs.l[head, chunk_rows, :] * alpha + _fold_lanes(jnp.add, p)
        v_rows = refs.k_rows if config.is_packed else refs.v_rows
        product = _matmul(p.astype(config.compute_dtype), v_rows[head], 0)
        alpha = _repeat_lanes(alpha, product.shape[1])
        refs.acc[head, chunk_rows, :] = refs.acc[head, chunk_rows, :] * alpha + product
        return head

    num_chunks = config.num_queries_per_kv // config.heads_per_chunk
    lax.fori_loop(0, config.num_kv_heads, lambda head, _: (lax.fori_loop(0, num_chunks, chunk, head), None)[1], None)


def _prefill_mask(config, kv_dtype, item, start):
    """bool[chunk rows, keys]: the query sees the key."""
    shape = (config.queries_per_block, config.tokens_per_block)
    row = lax.broadcasted_iota(jnp.int32, shape, 1)
    key = start + _key_order(config, row, config.tokens_per_block, 1, kv_dtype)[0]
    query = item.position + lax.broadcasted_iota(jnp.int32, shape, 0)
    mask = key <= query if config.causal else key < item.key_end
    if config.sliding_window is not None:
        mask &= key > query - config.sliding_window
        if not config.causal:
            mask &= key < query + config.sliding_window
    if config.attention_chunk_size is not None:
        mask &= lax.div(key, config.attention_chunk_size) == lax.div(query, config.attention_chunk_size)
    return jnp.concatenate([mask] * config.heads_per_chunk, axis=0)


def _store_prefill(config, refs, out_ref):
    num_queries = config.queries_per_block
    num_heads = config.num_kv_heads * config.num_queries_per_kv

    def result(head):
        kv_head, g = divmod(min(head, num_heads - 1), config.num_queries_per_kv)
        rows = pl.ds(g * num_queries, num_queries)
        total = jnp.sum(refs.l[kv_head, rows, :], axis=1, keepdims=True)
        m, sinks = jnp.max(refs.m[kv_head, rows, :], axis=1, keepdims=True), None
        if config.has_sinks:
            sinks = jnp.max(refs.sinks[pl.ds(min(head, num_heads - 1), 1), :], axis=1, keepdims=True)
        return _normalize(m, total, refs.acc[kv_head, rows, :], sinks)

    if not _is_16_bit(out_ref.dtype):
        for head in range(num_heads):
            out_ref[:, head, :] = result(head)
        return
    for pair in range(pl.cdiv(num_heads, 2)):
        low, high = (
            pltpu.bitcast(result(head).astype(out_ref.dtype).astype(jnp.float32), jnp.uint32)
            for head in (2 * pair, 2 * pair + 1)
        )
        _write_words(config, out_ref, pair, (low >> 16) | _high_half(high))
