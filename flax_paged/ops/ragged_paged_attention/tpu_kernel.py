"""Body of the ragged paged attention kernel for TPU.

One program walks over *items*: a sequence's block of queries. Each item walks over blocks of its live pages, fetched
from HBM one block ahead. An item with one query takes the decode path, any other the prefill path; both fold a block
into a running softmax (FlashAttention-2) whose maximum, sum and accumulator are float32.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LOG2_E = math.log2(math.e)
MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)
NUM_LANES = 128


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """What the kernel knows at trace time."""

    num_kv_heads: int
    num_queries_per_kv: int
    page_size: int
    pages_per_block: int
    queries_per_block: int
    heads_per_chunk: int  # query heads that the prefill path puts through one matrix product
    sm_scale: float
    sliding_window: int | None
    soft_cap: float | None
    causal: bool
    decode_only: bool
    compute_dtype: Any
    interpret: bool

    @property
    def tokens_per_block(self) -> int:
        """Keys in one block of pages."""
        return self.pages_per_block * self.page_size

    @property
    def score_scale(self) -> float:
        """Factor that brings q·k to units of log2, or makes it ready for tanh where there is a soft cap."""
        return self.sm_scale / self.soft_cap if self.soft_cap else self.sm_scale * LOG2_E

    @property
    def query_scale(self) -> float:
        """The part of `score_scale` that q can take without rounding; the scores take the rest in float32.

        A bfloat16 q times any factor but a power of two is off by 2**-9, which a sharp softmax turns into 5 %.
        """
        if jnp.dtype(self.compute_dtype) == jnp.float32 or self.score_scale == 0:
            return self.score_scale
        return math.copysign(2.0 ** math.floor(math.log2(abs(self.score_scale))), self.score_scale)


@dataclasses.dataclass(frozen=True)
class Item:
    """A block of one sequence's queries and the keys that it attends to (traced scalars)."""

    sequence: Any
    query_row: Any  # row of its first query in q and out
    num_queries: Any
    position: Any  # of its first query
    key_start: Any  # keys [key_start, key_end) are seen by some query
    key_end: Any
    first_page: Any  # pages [first_page, last_page) hold them
    last_page: Any
    num_blocks: Any  # of pages; at least one, which may be empty


@dataclasses.dataclass(frozen=True)
class Refs:
    """The kernel's memory, so that helpers take one argument."""

    seq_lens: Any  # i32[max_num_seqs], SMEM
    query_start_loc: Any  # i32[max_num_seqs + 1], SMEM
    num_seqs: Any  # i32[1], SMEM
    q_hbm: Any  # [num_tokens, num_q_heads, head_dim]
    kv_pages_hbm: Any  # [num_pages, page_size, 2 * num_kv_heads, head_dim]
    block_tables_hbm: Any  # i32[max_num_seqs, pages_per_seq]
    out_hbm: Any  # [num_tokens, num_q_heads, head_dim]
    table: Any  # i32[2, pages_per_seq], SMEM: page ids of this sequence and the next
    out_rows: Any  # i32[2], SMEM: rows of `out` on their way to HBM, by slot
    kv: Any  # [2, tokens_per_block, padded 2 * num_kv_heads, head_dim]
    q: Any  # [2, queries_per_block, num_q_heads, head_dim]
    out: Any  # [2, queries_per_block, num_q_heads, head_dim]
    table_sems: Any  # one for each slot of the double buffers
    kv_sems: Any
    q_sems: Any
    out_sems: Any
    # Prefill only.
    q_rows: Any = None  # [num_kv_heads, num_queries_per_kv * queries_per_block, head_dim], scaled
    k_rows: Any = None  # [num_kv_heads, tokens_per_block, head_dim]
    v_rows: Any = None  # the same
    m: Any = None  # f32[num_kv_heads, num_queries_per_kv * queries_per_block, 128]
    l: Any = None  # noqa: E741  # the same
    acc: Any = None  # f32[num_kv_heads, num_queries_per_kv * queries_per_block, head_dim]


def ragged_paged_attention_kernel(*refs, config: KernelConfig):
    """Attend over the paged cache; `refs` are the fields of `Refs`, in their order."""
    refs = Refs(*refs)
    num_seqs = refs.num_seqs[0]
    if refs.kv.shape[2] != refs.kv_pages_hbm.shape[2]:
        # No page ever fills the padding rows: what they hold must not be NaN.
        refs.kv[...] = jnp.zeros_like(refs.kv)
    refs.out_rows[0] = 0
    refs.out_rows[1] = 0

    @pl.when(num_seqs > 0)
    def _():
        _table_copy(refs, 0).start()
        _table_copy(refs, 0).wait()
        _start_item(config, refs, _describe_item(config, refs, 0, 0), 0, 0)

    def sequence(s, counts):
        @pl.when(s + 1 < num_seqs)
        def _():
            _table_copy(refs, s + 1).start()

        num_items = _num_items(config, refs, s)
        return lax.fori_loop(0, num_items, lambda i, c: _attend_item(config, refs, s, i, num_items, *c), counts)

    num_done, _ = lax.fori_loop(0, num_seqs, sequence, (jnp.int32(0), jnp.int32(0)))
    for slot in range(2):
        _wait_out(refs, slot)
    del num_done
    _zero_padding_rows(config, refs, refs.query_start_loc[num_seqs])


# --- Items -----------------------------------------------------------------------------------------------------------


def _num_items(config, refs, s):
    """Blocks of queries of sequence `s`; at least one, so that every sequence has a place in the pipeline."""
    num_queries = refs.query_start_loc[s + 1] - refs.query_start_loc[s]
    return jnp.maximum(pl.cdiv(num_queries, config.queries_per_block), 1)


def _describe_item(config, refs, s, i):
    query_start = refs.query_start_loc[s]
    query_len = refs.query_start_loc[s + 1] - query_start
    seq_len = refs.seq_lens[s]
    first = i * config.queries_per_block
    num_queries = jnp.minimum(config.queries_per_block, query_len - first)
    position = seq_len - query_len + first
    key_end = position + num_queries if config.causal else seq_len
    key_start = jnp.int32(0)
    if config.sliding_window is not None:
        key_start = jnp.maximum(position - config.sliding_window + 1, 0)
    first_page = lax.div(key_start, config.page_size)
    last_page = pl.cdiv(key_end, config.page_size)
    num_blocks = jnp.maximum(pl.cdiv(last_page - first_page, config.pages_per_block), 1)
    return Item(
        s, query_start + first, num_queries, position, key_start, key_end, first_page, last_page, num_blocks
    )


def _attend_item(config, refs, s, i, num_items, num_done, num_blocks_done):
    """Attend with one item; returns the running counts, whose low bits choose the buffers."""
    item = _describe_item(config, refs, s, i)
    slot = lax.rem(num_done, 2)

    def begin_block(b):
        """Start the next fetch, wait for this block, return its buffer."""
        buffer = lax.rem(num_blocks_done + b, 2)
        _start_next(config, refs, item, i, num_items, b, 1 - slot, 1 - buffer)
        _wait_pages(config, refs, item, b, buffer)
        return refs.kv.at[buffer]

    _q_copy(refs, item, slot).wait()
    _wait_out(refs, slot)
    if config.decode_only:
        _decode(config, refs, item, slot, begin_block)
    else:
        pl.when(item.num_queries == 1)(lambda: _decode(config, refs, item, slot, begin_block))
        pl.when(item.num_queries != 1)(lambda: _prefill(config, refs, item, slot, begin_block))
    _start_out(refs, item, slot)
    return num_done + 1, num_blocks_done + item.num_blocks


# --- Data movement ---------------------------------------------------------------------------------------------------


def _table_copy(refs, s):
    slot = lax.rem(s, 2)
    return pltpu.make_async_copy(refs.block_tables_hbm.at[s], refs.table.at[slot], refs.table_sems.at[slot])


def _q_copy(refs, item, slot):
    rows = pl.ds(item.query_row, item.num_queries)
    return pltpu.make_async_copy(
        refs.q_hbm.at[rows], refs.q.at[slot, pl.ds(0, item.num_queries)], refs.q_sems.at[slot]
    )


def _start_item(config, refs, item, slot, buffer):
    """Start to fetch an item's queries and its first block of pages."""
    _q_copy(refs, item, slot).start()
    _start_pages(config, refs, item, 0, buffer)


def _start_next(config, refs, item, i, num_items, b, slot, buffer):
    """Start to fetch what follows block `b` of the item: its next block, or the next item's beginning."""
    s = item.sequence
    is_last_block = b + 1 == item.num_blocks
    is_last_item = i + 1 == num_items

    pl.when(jnp.logical_not(is_last_block))(lambda: _start_pages(config, refs, item, b + 1, buffer))

    @pl.when(is_last_block & jnp.logical_not(is_last_item))
    def _():
        _start_item(config, refs, _describe_item(config, refs, s, i + 1), slot, buffer)

    @pl.when(is_last_block & is_last_item & (s + 1 < refs.num_seqs[0]))
    def _():
        _table_copy(refs, s + 1).wait()
        _start_item(config, refs, _describe_item(config, refs, s + 1, 0), slot, buffer)


def _num_pages(config, item, b):
    """Live pages of block `b`: only these are fetched."""
    return jnp.minimum(config.pages_per_block, item.last_page - item.first_page - b * config.pages_per_block)


def _kv_tokens(refs, buffer, start, size):
    """Tokens of a buffer, without the rows that pad the cache's heads to a tile."""
    return refs.kv.at[buffer, pl.ds(start, size), pl.ds(0, refs.kv_pages_hbm.shape[2])]


def _start_pages(config, refs, item, b, buffer):
    first = item.first_page + b * config.pages_per_block
    table_slot = lax.rem(item.sequence, 2)

    def start(j, _):
        page = refs.table[table_slot, first + j]
        target = _kv_tokens(refs, buffer, pl.multiple_of(j * config.page_size, config.page_size), config.page_size)
        pltpu.make_async_copy(refs.kv_pages_hbm.at[page], target, refs.kv_sems.at[buffer]).start()

    lax.fori_loop(0, _num_pages(config, item, b), start, None)


def _wait_pages(config, refs, item, b, buffer):
    """Wait for all pages of a block at once: the semaphore counts bytes."""
    num_pages = _num_pages(config, item, b)

    @pl.when(num_pages > 0)
    def _():
        target = _kv_tokens(refs, buffer, 0, num_pages * config.page_size)
        pltpu.make_async_copy(target, target, refs.kv_sems.at[buffer]).wait()


def _out_copy(refs, slot, row, num_rows):
    return pltpu.make_async_copy(
        refs.out.at[slot, pl.ds(0, num_rows)], refs.out_hbm.at[pl.ds(row, num_rows)], refs.out_sems.at[slot]
    )


def _start_out(refs, item, slot):
    refs.out_rows[slot] = item.num_queries
    pl.when(item.num_queries > 0)(lambda: _out_copy(refs, slot, item.query_row, item.num_queries).start())


def _wait_out(refs, slot):
    """Wait until the buffer's last result has left."""
    num_rows = refs.out_rows[slot]
    pl.when(num_rows > 0)(lambda: _out_copy(refs, slot, 0, num_rows).wait())


def _zero_padding_rows(config, refs, first_row):
    refs.out[0] = jnp.zeros_like(refs.out[0])
    num_rows = refs.out_hbm.shape[0]
    step = config.queries_per_block

    def copy(j):
        row = first_row + j * step
        return _out_copy(refs, 0, row, jnp.minimum(step, num_rows - row))

    num_copies = pl.cdiv(num_rows - first_row, step)
    lax.fori_loop(0, num_copies, lambda j, _: copy(j).start(), None)
    lax.fori_loop(0, num_copies, lambda j, _: copy(j).wait(), None)


# --- Rows of a buffer [tokens, rows, head_dim] ------------------------------------------------------------------------


def _read_rows(config, ref, start, stride):
    """Rows start, start + stride, ... of a 32-bit buffer seen as [tokens * rows, head_dim]."""
    tokens, rows, head_dim = ref.shape
    count = tokens * rows // stride
    if config.interpret:  # the interpreter has no views of refs
        return ref[...].reshape(tokens * rows, head_dim)[start::stride]
    view = ref.reshape(tokens * rows, head_dim)
    return view[...] if stride == 1 else view[pl.ds(start, count, stride=stride), :]


def _read_words(config, ref, start, stride):
    """The same for a 16-bit buffer whose neighbouring rows share 32-bit words: rows 2i (low) and 2i + 1 (high)."""
    tokens, rows, head_dim = ref.shape
    count = tokens * rows // 2 // stride
    if config.interpret:
        words = pltpu.bitcast(ref[...].reshape(tokens * rows, head_dim), jnp.uint32)
        return words[start::stride]
    view = ref.reshape(tokens * rows, head_dim).bitcast(jnp.uint32)
    return view[...] if stride == 1 else view[pl.ds(start, count, stride=stride), :]


def _write_words(config, ref, start, stride, words):
    """The opposite of `_read_words`."""
    tokens, rows, head_dim = ref.shape
    if config.interpret:
        pair = pltpu.bitcast(words, ref.dtype).reshape(words.shape[0], 2, head_dim)
        ref[:, 2 * start, :] = pair[:, 0]
        ref[:, 2 * start + 1, :] = pair[:, 1]
    else:
        ref.reshape(tokens * rows, head_dim).bitcast(jnp.uint32)[pl.ds(start, words.shape[0], stride=stride), :] = words


def _write_rows(config, ref, start, stride, values):
    tokens, rows, head_dim = ref.shape
    if config.interpret:
        ref[:, start, :] = values
    else:
        ref.reshape(tokens * rows, head_dim)[pl.ds(start, values.shape[0], stride=stride), :] = values


def _is_16_bit(dtype):
    return jnp.dtype(dtype).itemsize == 2


def _high_half(words):
    return words & jnp.uint32(0xFFFF0000)


def _split_words(words, dtype):
    """Words (K low, V high) to the rows of K and of V.

    Packs row i with row i + n/2 instead of with its neighbour, which would need shuffles: result row 2i is word row i,
    result row 2i + 1 is word row i + n/2 (`_row_in_words`). Attention does not mind the order of its keys.
    """
    n = words.shape[0] // 2
    first, second = words[:n], words[n:]
    low = (first & jnp.uint32(0xFFFF)) | (second << 16)
    high = (first >> 16) | _high_half(second)
    return pltpu.bitcast(low, dtype), pltpu.bitcast(high, dtype)


def _load_kv(config, kv_ref, head, is_live):
    """K and V of a block as rows, of one head or (head None) of every head, token-major.

    Args:
        config: The static configuration.
        kv_ref: [tokens_per_block, padded 2 * num_kv_heads, head_dim].
        head: KV head, or None.
        is_live: Maps rows to whether they are keys of the sequence; the others are set to zero. None takes all.

    Returns:
        K and V, each [rows, head_dim], rows in the order of `_row_in_words` for 16-bit caches.
    """
    num_heads = kv_ref.shape[1] // 2
    start, stride = (0, 1) if head is None else (head, num_heads)
    heads_per_row = num_heads if head is None else 1

    def clean(x):
        if is_live is None:
            return x
        token = lax.broadcasted_iota(jnp.int32, x.shape, 0) // heads_per_row
        return jnp.where(is_live(token), x, jnp.zeros_like(x))

    if _is_16_bit(kv_ref.dtype):
        k, v = _split_words(clean(_read_words(config, kv_ref, start, stride)), kv_ref.dtype)
    else:
        k = clean(_read_rows(config, kv_ref, 2 * start, 2 * stride))
        v = clean(_read_rows(config, kv_ref, 2 * start + 1, 2 * stride))
    return k.astype(config.compute_dtype), v.astype(config.compute_dtype)


def _row_in_words(rows, num_rows, dtype):
    """Which row of the buffer (token-major) a row of `_load_kv` came from."""
    if _is_16_bit(dtype):
        return (rows >> 1) + (rows & 1) * (num_rows // 2)
    return rows


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


def _softmax_update(config, scores, v, m, l, acc):  # noqa: E741
    """Fold masked scores [rows, keys] of a block into maximum and sum [rows, 1] and accumulator [rows, head_dim]."""
    m_new = jnp.maximum(m, jnp.max(scores, axis=1, keepdims=True))
    p = jnp.exp2(scores - m_new)
    alpha = jnp.exp2(m - m_new)
    l_new = l * alpha + jnp.sum(p, axis=1, keepdims=True)
    return m_new, l_new, acc * alpha + _matmul(p.astype(config.compute_dtype), v, 0)


def _live_keys(config, item, b):
    """Bounds of the item's keys within block `b`, in tokens of the block, and whether they cut it."""
    start = (item.first_page + b * config.pages_per_block) * config.page_size
    low, high = item.key_start - start, item.key_end - start
    return start, low, high


# --- Decode: one query ------------------------------------------------------------------------------------------------


def _decode(config, refs, item, slot, begin_block):
    """One query row for each head, all heads at once.

    All query heads meet all rows (token, kv head) of the block in one product, and the scores of other heads are masked.
    That wastes matrix work of which there is plenty, and saves the strided loads that would gather one head's rows.
    """
    num_q_heads = config.num_kv_heads * config.num_queries_per_kv
    q = refs.q[slot, 0].astype(jnp.float32) * jnp.float32(config.query_scale)
    q = q.astype(config.compute_dtype)
    num_rows = q.shape[0]
    head_dim = q.shape[1]
    del num_q_heads
    head_bias = _head_bias(config, refs, num_rows)

    def block(b, carry):
        kv_ref = begin_block(b)
        _, low, high = _live_keys(config, item, b)
        is_edge = (low > 0) | (high < config.tokens_per_block)
        return lax.cond(
            is_edge,
            lambda: _decode_block(config, kv_ref, q, head_bias, (low, high), *carry),
            lambda: _decode_block(config, kv_ref, q, head_bias, None, *carry),
        )

    m = jnp.full((num_rows, 1), MASK_VALUE, jnp.float32)
    l = jnp.zeros((num_rows, 1), jnp.float32)  # noqa: E741
    acc = jnp.zeros((num_rows, head_dim), jnp.float32)
    m, l, acc = lax.fori_loop(0, item.num_blocks, block, (m, l, acc))  # noqa: E741
    refs.out[slot, 0] = (acc / l).astype(refs.out.dtype)


def _head_bias(config, refs, num_rows):
    """f32[num_rows, keys]: 0 where the row's query head reads that kv head, very negative elsewhere."""
    num_heads = refs.kv.shape[2] // 2
    num_keys = config.tokens_per_block * num_heads
    packing = 2 if _is_16_bit(refs.kv.dtype) else 1
    # The pattern repeats, so one vector register's width is enough wherever the period divides it.
    width = NUM_LANES if NUM_LANES % (num_heads * packing) == 0 and num_keys % NUM_LANES == 0 else num_keys
    key = lax.broadcasted_iota(jnp.int32, (num_rows, width), 1)
    key_head = lax.rem(key // packing, num_heads)
    query_head = lax.broadcasted_iota(jnp.int32, (num_rows, width), 0) // config.num_queries_per_kv
    bias = jnp.where(key_head == query_head, jnp.float32(0), jnp.float32(MASK_VALUE))
    return jnp.concatenate([bias] * (num_keys // width), axis=1)


def _decode_block(config, kv_ref, q, head_bias, live, m, l, acc):  # noqa: E741
    is_live = None if live is None else lambda token: (token >= live[0]) & (token < live[1])
    k, v = _load_kv(config, kv_ref, None, is_live)
    scores = _finish_scores(config, _matmul(q, k, 1)) + head_bias
    if live is not None:
        row = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        token = _row_in_words(row, scores.shape[1], kv_ref.dtype) // (kv_ref.shape[1] // 2)
        scores = jnp.where(is_live(token), scores, jnp.float32(MASK_VALUE))
    return _softmax_update(config, scores, v, m, l, acc)


# --- Prefill: a block of queries --------------------------------------------------------------------------------------


def _prefill(config, refs, item, slot, begin_block):
    """A block of queries: rows of one kv head are its query heads times the queries, head-major."""
    _load_q_rows(config, refs, slot)
    refs.m[...] = jnp.full_like(refs.m, MASK_VALUE)
    refs.l[...] = jnp.zeros_like(refs.l)
    refs.acc[...] = jnp.zeros_like(refs.acc)

    def block(b, _):
        kv_ref = begin_block(b)
        start, low, high = _live_keys(config, item, b)
        end = start + config.tokens_per_block
        # Every query sees every key of an interior block, so it needs no mask.
        is_edge = end > (item.position + 1 if config.causal else item.key_end)
        if config.sliding_window is not None:
            is_edge |= start <= item.position + item.num_queries - 1 - config.sliding_window
        pl.when(is_edge)(lambda: _prefill_block(config, refs, kv_ref, item, start, (low, high)))
        pl.when(jnp.logical_not(is_edge))(lambda: _prefill_block(config, refs, kv_ref, item, start, None))

    lax.fori_loop(0, item.num_blocks, block, None)
    _store_prefill(config, refs, slot)


def _load_q_rows(config, refs, slot):
    """Queries [queries, heads, head_dim] to scaled rows [kv head, (query head, query), head_dim]."""
    q_ref = refs.q.at[slot]
    num_queries = config.queries_per_block
    num_heads = config.num_kv_heads * config.num_queries_per_kv
    scale = jnp.float32(config.query_scale)

    def put(head, x):
        kv_head, g = divmod(head, config.num_queries_per_kv)
        refs.q_rows[kv_head, pl.ds(g * num_queries, num_queries), :] = (x * scale).astype(refs.q_rows.dtype)

    if not _is_16_bit(q_ref.dtype):
        for head in range(num_heads):
            put(head, _read_rows(config, q_ref, head, q_ref.shape[1]))
        return
    for pair in range(pl.cdiv(num_heads, 2)):
        words = _read_words(config, q_ref, pair, q_ref.shape[1] // 2)
        put(2 * pair, pltpu.bitcast(words << 16, jnp.float32))
        if 2 * pair + 1 < num_heads:
            put(2 * pair + 1, pltpu.bitcast(_high_half(words), jnp.float32))


def _prefill_block(config, refs, kv_ref, item, start, live):
    is_live = None if live is None else lambda token: (token >= live[0]) & (token < live[1])
    for head in range(config.num_kv_heads):
        k, v = _load_kv(config, kv_ref, head, is_live)
        refs.k_rows[head] = k
        refs.v_rows[head] = v
    mask = None if live is None else _prefill_mask(config, kv_ref, item, start, live)
    rows = config.heads_per_chunk * config.queries_per_block

    def chunk(c, head):
        chunk_rows = pl.ds(pl.multiple_of(c * rows, rows), rows)
        scores = _finish_scores(config, _matmul(refs.q_rows[head, chunk_rows, :], refs.k_rows[head], 1))
        if mask is not None:
            scores = jnp.where(mask, scores, jnp.float32(MASK_VALUE))
        m, l, acc = _softmax_update(  # noqa: E741
            config,
            scores,
            refs.v_rows[head],
            refs.m[head, chunk_rows, :1],
            refs.l[head, chunk_rows, :1],
            refs.acc[head, chunk_rows, :],
        )
        refs.m[head, chunk_rows, :] = jnp.broadcast_to(m, (rows, NUM_LANES))
        refs.l[head, chunk_rows, :] = jnp.broadcast_to(l, (rows, NUM_LANES))
        refs.acc[head, chunk_rows, :] = acc
        return head

    num_chunks = config.num_queries_per_kv // config.heads_per_chunk
    lax.fori_loop(0, config.num_kv_heads, lambda head, _: (lax.fori_loop(0, num_chunks, chunk, head), None)[1], None)


def _prefill_mask(config, kv_ref, item, start, live):
    """bool[chunk rows, keys]: the query sees the key."""
    shape = (config.queries_per_block, config.tokens_per_block)
    row = lax.broadcasted_iota(jnp.int32, shape, 1)
    token = _row_in_words(row, config.tokens_per_block, kv_ref.dtype)
    query = item.position + lax.broadcasted_iota(jnp.int32, shape, 0)
    mask = token < live[1]
    if config.causal:
        mask &= start + token <= query
    if config.sliding_window is not None:
        mask &= start + token > query - config.sliding_window
    return jnp.concatenate([mask] * config.heads_per_chunk, axis=0)


def _store_prefill(config, refs, slot):
    out_ref = refs.out.at[slot]
    num_queries = config.queries_per_block
    num_heads = config.num_kv_heads * config.num_queries_per_kv

    def result(head):
        kv_head, g = divmod(min(head, num_heads - 1), config.num_queries_per_kv)
        rows = pl.ds(g * num_queries, num_queries)
        return refs.acc[kv_head, rows, :] / refs.l[kv_head, rows, :1]

    if not _is_16_bit(out_ref.dtype):
        for head in range(num_heads):
            _write_rows(config, out_ref, head, out_ref.shape[1], result(head))
        return
    for pair in range(pl.cdiv(num_heads, 2)):
        low, high = (
            pltpu.bitcast(result(head).astype(out_ref.dtype).astype(jnp.float32), jnp.uint32)
            for head in (2 * pair, 2 * pair + 1)
        )
        _write_words(config, out_ref, pair, out_ref.shape[1] // 2, (low >> 16) | _high_half(high))
