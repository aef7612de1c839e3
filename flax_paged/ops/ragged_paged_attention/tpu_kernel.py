"""Body of the ragged paged attention kernel for TPU.

One program walks over *items*: a sequence's block of queries. Each item walks over blocks of its live pages, fetched
from HBM one block ahead. An item with one query takes the decode path, any other the prefill path; both fold a block
into a running softmax (FlashAttention-2) whose maximum, sum and accumulator are float32.
"""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_paged.ops.kv_cache_update.tpu import start_slices, wait_for_slices

LOG2_E = math.log2(math.e)
MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)
NUM_LANES = 128
# Rows of K or V that the decode path hands to the matrix unit at a time.
TILE_ROWS = 256
# Above this many pages a block, their copies are issued by a loop.
MAX_UNROLLED_PAGES = 128


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
    edge_chunk: int  # tokens of a partly live block that the decode path handles at a time
    compute_dtype: Any
    interpret: bool
    has_update: bool = False  # write new keys and values before attending

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
    table: Any  # i32[2 * pages_per_seq, padded], SMEM: page ids of this sequence and the next
    out_rows: Any  # i32[2], SMEM: rows of `out` on their way to HBM, by slot
    kv: Any  # [2, tokens_per_block, padded 2 * num_kv_heads, head_dim]
    q: Any  # [3, queries_per_block, num_q_heads, head_dim]: the item at work and up to two fetched ahead
    out: Any  # [2, queries_per_block, num_q_heads, head_dim]
    scores: Any  # f32[num_q_heads, tokens_per_block * padded num_kv_heads]
    values: Any  # [tokens_per_block * padded num_kv_heads, head_dim], two rows to a word where they have 16 bits
    table_sems: Any  # one for each slot of the buffers above
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
    # With update only.
    slot_mapping: Any = None  # i32[3 * U], SMEM
    num_slices: Any = None  # i32[1], SMEM
    new_rows_hbm: Any = None  # [num_tokens, 2 * num_kv_heads, head_dim]
    update_sems: Any = None

    @classmethod
    def ordered(cls, refs, *, decode_only, has_update):
        """Name the kernel's arguments, which come as prefetched scalars, inputs, outputs, scratch."""
        names = ["seq_lens", "query_start_loc", "num_seqs"]
        names += ["slot_mapping", "num_slices"] if has_update else []
        names += ["q_hbm", "block_tables_hbm"]
        # With update, kv_pages is an aliased output: named twice, the output is kept.
        names += ["new_rows_hbm"] if has_update else []
        names += ["kv_pages_hbm", "out_hbm"]
        names += ["kv_pages_hbm"] if has_update else []
        names += ["table", "out_rows", "kv", "q", "out", "scores", "values"]
        names += ["table_sems", "kv_sems", "q_sems", "out_sems"]
        names += [] if decode_only else ["q_rows", "k_rows", "v_rows", "m", "l", "acc"]
        names += ["update_sems"] if has_update else []
        return cls(**dict(zip(names, refs, strict=True)))

    @property
    def update(self):
        """The arguments of `start_slices` and `wait_for_slices`."""
        return self.slot_mapping, self.num_slices, self.new_rows_hbm, self.kv_pages_hbm, self.update_sems


def ragged_paged_attention_kernel(*refs, config: KernelConfig):
    """Attend over the paged cache, after writing the step's keys and values to it if so configured."""
    refs = Refs.ordered(refs, decode_only=config.decode_only, has_update=config.has_update)
    num_seqs = refs.num_seqs[0]
    if config.has_update:
        start_slices(*refs.update)
    for slot in range(2):
        refs.out_rows[slot] = 0
    pl.when(num_seqs > 0)(lambda: _table_copy(refs, 0).start())
    # The page buffers hold finite numbers at all times (`_clean_block` does the rest): a masked key has weight zero,
    # and zero times NaN would be NaN.
    refs.kv[...] = jnp.zeros_like(refs.kv)
    if config.has_update:
        wait_for_slices(*refs.update)

    # What is fetched next, two blocks ahead of the one at work: sequence, item, slot of the item's queries, index in
    # refs.table of its next page, number of pages left. This one stands before the first item.
    cursor = tuple(jnp.int32(x) for x in (0, -1, 2, 0, 0))
    for buffer in range(2):
        fetch, cursor = _fetch(config, refs, cursor)
        _start_pages(config, refs, buffer, fetch)

    def sequence(s, carry):
        num_items = _num_items(config, refs, s)
        return lax.fori_loop(0, num_items, lambda i, carry: _attend_item(config, refs, s, i, *carry), carry)

    lax.fori_loop(0, num_seqs, sequence, (jnp.int32(0), jnp.int32(0), cursor))
    for slot in range(2):
        _wait_out(refs, slot)
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


def _attend_item(config, refs, s, i, num_done, num_blocks_done, cursor):
    """Attend with one item; returns the running counts, whose remainders choose the buffers, and the cursor."""
    item = _describe_item(config, refs, s, i)
    q_slot, out_slot = lax.rem(num_done, 3), lax.rem(num_done, 2)

    def begin_block(b, cursor):
        """Wait for block `b` of the item; returns its buffer, what to fetch into it once it is read, and the cursor."""
        buffer = lax.rem(num_blocks_done + b, 2)
        fetch, cursor = _fetch(config, refs, cursor)
        _wait_pages(config, refs, item, b, buffer)
        return buffer, fetch, cursor

    _q_copy(refs, item, q_slot).wait()
    _wait_out(refs, out_slot)
    q_ref, out_ref = refs.q.at[q_slot], refs.out.at[out_slot]
    decode = functools.partial(_decode, config, refs, item, q_ref, out_ref, begin_block)
    prefill = functools.partial(_prefill, config, refs, item, q_ref, out_ref, begin_block)
    if config.decode_only:
        cursor = decode(cursor)
    else:
        cursor = lax.cond(item.num_queries == 1, decode, prefill, cursor)
    _start_out(refs, item, out_slot)
    return num_done + 1, num_blocks_done + item.num_blocks, cursor


def _live_tokens(config, item, b):
    """Bounds of the item's keys in block `b`, counted from the block's first token; they may lie outside of it."""
    start = (item.first_page + b * config.pages_per_block) * config.page_size
    return item.key_start - start, item.key_end - start


# --- Data movement ---------------------------------------------------------------------------------------------------


def _fetch(config, refs, cursor):
    """Advance the cursor by one block; returns the block's pages for `_start_pages`, and the cursor.

    A block that opens an item starts the copy of the item's queries, too.
    """
    num_pages_left = cursor[4]
    s, i, slot, first, num_pages_left = lax.cond(
        num_pages_left <= 0, lambda *cursor: _open_item(config, refs, *cursor), lambda *cursor: cursor, *cursor
    )
    fetch = first, jnp.minimum(config.pages_per_block, num_pages_left)
    return fetch, (s, i, slot, first + config.pages_per_block, num_pages_left - config.pages_per_block)


def _open_item(config, refs, s, i, slot, *_):
    """Move the cursor to the beginning of the next item; past the last sequence there are no more pages."""
    num_seqs = refs.num_seqs[0]
    is_last = i + 1 >= _num_items(config, refs, jnp.minimum(s, num_seqs))
    s, i = jnp.where(is_last, s + 1, s), jnp.where(is_last, 0, i + 1)
    slot = jnp.where(slot == 2, 0, slot + 1)
    is_live = s < num_seqs
    item = _describe_item(config, refs, jnp.minimum(s, num_seqs), i)

    @pl.when(is_live & (i == 0))
    def _():
        _table_copy(refs, s).wait()
        pl.when(s + 1 < num_seqs)(lambda: _table_copy(refs, s + 1).start())

    pl.when(is_live)(lambda: _q_copy(refs, item, slot).start())
    first = lax.rem(s, 2) * _table_stride(refs) + item.first_page
    return s, i, slot, first, jnp.where(is_live, item.last_page - item.first_page, 0)


def _table_copy(refs, s):
    """Copy of a sequence's page ids into SMEM, which has room for two."""
    slot, pages_per_seq = lax.rem(s, 2), refs.block_tables_hbm.shape[1]
    target = refs.table.at[pl.ds(slot * _table_stride(refs), pages_per_seq)]
    return pltpu.make_async_copy(refs.block_tables_hbm.at[s], target, refs.table_sems.at[slot])


def _table_stride(refs):
    return refs.table.shape[0] // 2


def _q_copy(refs, item, slot):
    rows = pl.ds(item.query_row, item.num_queries)
    return pltpu.make_async_copy(
        refs.q_hbm.at[rows], refs.q.at[slot, pl.ds(0, item.num_queries)], refs.q_sems.at[slot]
    )


def _page_copy(config, refs, buffer, fetch, j):
    """Copy of the `j`-th page of a block."""
    tokens = j * config.page_size
    if not isinstance(j, int):
        tokens = pl.multiple_of(tokens, config.page_size)
    return pltpu.make_async_copy(
        refs.kv_pages_hbm.at[refs.table[fetch[0] + j]],
        _kv_tokens(refs, buffer, tokens, config.page_size),
        refs.kv_sems.at[buffer],
    )


def _start_pages(config, refs, buffer, fetch):
    """Start to fetch a block's pages into a buffer."""
    lax.fori_loop(0, fetch[1], lambda j, _: _page_copy(config, refs, buffer, fetch, j).start(), None)


def _kv_tokens(refs, buffer, start, size):
    """Tokens of a buffer, without the rows that pad the cache's heads to a tile."""
    return refs.kv.at[buffer, pl.ds(start, size), pl.ds(0, refs.kv_pages_hbm.shape[2])]


def _wait_pages(config, refs, item, b, buffer):
    """Wait for all pages of a block, at once where that works: the semaphore counts bytes."""
    num_pages = jnp.minimum(config.pages_per_block, item.last_page - item.first_page - b * config.pages_per_block)

    def wait(num_tokens):
        target = _kv_tokens(refs, buffer, 0, num_tokens)
        pltpu.make_async_copy(target, target, refs.kv_sems.at[buffer]).wait()

    if refs.kv_pages_hbm.shape[2] == refs.kv.shape[2]:
        pl.when(num_pages > 0)(lambda: wait(num_pages * config.page_size))
    else:
        # The compiler of JAX 0.10 crashes on a part of the rows of a variable number of tokens.
        lax.fori_loop(0, num_pages, lambda j, _: wait(config.page_size), None)


def _clean_block(config, kv_ref, low, high):
    """Zero the fetched tokens before `low` and from `high` on, which share a page with live ones and may hold NaN."""

    def zero(token, _):
        kv_ref[token] = jnp.zeros_like(kv_ref[token])

    if config.sliding_window is not None:
        lax.fori_loop(0, jnp.minimum(low, config.tokens_per_block), zero, None)
    high = jnp.maximum(high, 0)
    end = jnp.minimum(pl.cdiv(high, config.page_size) * config.page_size, config.tokens_per_block)
    lax.fori_loop(high, end, zero, None)


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


def _read_words(config, ref, start=0, stride=1):
    """Rows start, start + stride, ... of a 16-bit buffer seen as words: rows 2i (low) and 2i + 1 (high) share a row.

    The stride is 1, or the number of words that a token has: one head's rows.
    """
    tokens, rows, head_dim = ref.shape
    if config.interpret:  # the interpreter has no views of refs, so the value is viewed instead
        return pltpu.bitcast(ref[...].reshape(tokens * rows, head_dim), jnp.uint32)[start::stride]
    if stride != 1 and head_dim != NUM_LANES:  # strided loads take one line of 128 lanes
        return ref.bitcast(jnp.uint32)[:, start, :]
    view = ref.reshape(tokens * rows, head_dim).bitcast(jnp.uint32)
    return view[...] if stride == 1 else view[pl.ds(start, tokens, stride=stride), :]


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

    Args:
        config: The static configuration.
        kv_ref: [tokens, padded 2 * num_kv_heads, head_dim].
        head: KV head, or None.

    Returns:
        K and V, each [rows, head_dim], in the order of `_key_order`.
    """
    num_heads = kv_ref.shape[1] // 2
    if _is_16_bit(kv_ref.dtype):
        words = _read_words(config, kv_ref) if head is None else _read_words(config, kv_ref, head, num_heads)
        return _split_words(words, kv_ref.dtype)
    heads = range(num_heads) if head is None else [head]
    return tuple(jnp.concatenate([kv_ref[:, 2 * h + i, :] for h in heads], axis=0) for i in range(2))


def _key_order(rows, num_tokens, num_heads, dtype):
    """Token and head that the rows (an integer array) of `_load_kv` come from; `num_heads` is 1 where it took one head.

    16-bit caches: token-major, packed by `_split_words`. 32-bit caches: head-major.
    """
    if not _is_16_bit(dtype):
        return lax.rem(rows, num_tokens), rows // num_tokens
    word = (rows >> 1) + (rows & 1) * (num_tokens * num_heads // 2)
    return word // num_heads, lax.rem(word, num_heads)


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
        low, high = _live_tokens(config, item, b)
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
    out_ref[0] = (acc / jnp.sum(l, axis=1, keepdims=True)).astype(out_ref.dtype)
    return cursor


def _decode_whole_block(config, refs, q, buffer, fetch, m, l, acc):  # noqa: E741
    """Fold a block whose keys are all live, and start to refill the buffer as soon as it is read."""

    def refill():
        if config.pages_per_block > MAX_UNROLLED_PAGES:
            _start_pages(config, refs, buffer, fetch)
            return
        # Branch-free: the compiler predicates the copies and places them among the vector work.
        for j in range(config.pages_per_block):
            pl.when(j < fetch[1])(lambda j=j: _page_copy(config, refs, buffer, fetch, j).start())

    return _fold_tokens(config, refs, refs.kv.at[buffer], q, None, m, l, acc, refill=refill)


def _decode_edge_block(config, refs, q, buffer, fetch, low, high, m, l, acc):  # noqa: E741
    """Fold a block that the sequence's end or the window's start cuts: only the chunks that hold live keys, masked."""
    size = config.edge_chunk

    def chunk(c, state):
        start = pl.multiple_of(c * size, size)
        live = (low - start, high - start)
        return _fold_tokens(config, refs, refs.kv.at[buffer, pl.ds(start, size)], q, live, *state)

    _clean_block(config, refs.kv.at[buffer], low, high)
    first = jnp.maximum(lax.div(low, size), 0)
    last = pl.cdiv(jnp.clip(high, 0, config.tokens_per_block), size)
    state = lax.fori_loop(first, last, chunk, (m, l, acc))
    _start_pages(config, refs, buffer, fetch)
    return state


def _fold_tokens(config, refs, kv_ref, q, live, m, l, acc, refill=lambda: None):  # noqa: E741
    """Fold tokens into the running softmax: all scores, their maximum, then weights and the product with V.

    V is stored between the two passes: reading it from the page buffer again would cost the second pass, which the
    vector units limit, another unpacking.

    Args:
        config: The static configuration.
        refs: The kernel's memory.
        kv_ref: [tokens, padded 2 * num_kv_heads, head_dim].
        q: [num_q_heads, head_dim], scaled.
        live: Bounds of the live tokens, or None if all are.
        m: f32[num_q_heads, 1].
        l: f32[num_q_heads, 128], of which the sum counts.
        acc: f32[num_q_heads, head_dim].
        refill: Called once the tokens have been read.
    """
    num_tokens, num_heads = kv_ref.shape[0], kv_ref.shape[1] // 2
    tile = _tile_tokens(num_tokens, num_heads)
    rows = tile * num_heads
    tiles = range(0, num_tokens, tile)
    packing = 2 if _is_16_bit(kv_ref.dtype) else 1
    maximum = None
    for start in tiles:
        k, v = _load_kv(config, kv_ref.at[pl.ds(start, tile)], None)
        refs.values[pl.ds(start * num_heads // packing, rows // packing), :] = _pack_rows(v)
        scores = _finish_scores(config, _matmul(q, k.astype(config.compute_dtype), 1))
        scores = _mask_decode(config, scores, kv_ref, None if live is None else (live[0] - start, live[1] - start))
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
    """Largest divisor of the tokens whose rows fill whole registers and number at most `TILE_ROWS`; else all tokens."""
    for tile in range(min(TILE_ROWS // num_heads, num_tokens), 0, -1):
        if num_tokens % tile == 0 and tile * num_heads % NUM_LANES == 0:
            return tile
    return num_tokens


def _repeat_lanes(x, width):
    """[rows, 128] to [rows, width] by repetition."""
    return jnp.concatenate([x] * (width // NUM_LANES), axis=1)


def _fold_lanes(op, x):
    """[rows, n * 128] to [rows, 128]."""
    return functools.reduce(op, (x[:, i : i + NUM_LANES] for i in range(0, x.shape[1], NUM_LANES)))


def _mask_decode(config, scores, kv_ref, live):
    """Mask scores [query heads, (token, kv head)] of other kv heads, and of tokens outside the bounds `live`."""
    num_rows, num_keys = scores.shape
    num_heads = kv_ref.shape[1] // 2
    num_tokens = num_keys // num_heads
    # The pattern of 16-bit caches repeats, so that one register's width is enough wherever the period divides it.
    is_periodic = _is_16_bit(kv_ref.dtype) and NUM_LANES % (2 * num_heads) == 0
    width = NUM_LANES if is_periodic else num_keys
    key = lax.broadcasted_iota(jnp.int32, (num_rows, width), 1)
    query_head = lax.broadcasted_iota(jnp.int32, (num_rows, width), 0) // config.num_queries_per_kv
    _, key_head = _key_order(key, num_tokens, num_heads, kv_ref.dtype)
    bias = jnp.where(key_head == query_head, jnp.float32(0), jnp.float32(MASK_VALUE))
    scores += jnp.concatenate([bias] * (num_keys // width), axis=1)
    if live is None:
        return scores
    key = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    token, _ = _key_order(key, num_tokens, num_heads, kv_ref.dtype)
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
        _clean_block(config, refs.kv.at[buffer], *_live_tokens(config, item, b))
        for head in range(config.num_kv_heads):
            k, v = _load_kv(config, refs.kv.at[buffer], head)
            refs.k_rows[head], refs.v_rows[head] = k.astype(config.compute_dtype), v.astype(config.compute_dtype)
        _start_pages(config, refs, buffer, fetch)
        start = (item.first_page + b * config.pages_per_block) * config.page_size
        end = start + config.tokens_per_block
        # Every query sees every key of an interior block, so it needs no mask.
        is_edge = end > (item.position + 1 if config.causal else item.key_end)
        if config.sliding_window is not None:
            is_edge |= start <= item.position + item.num_queries - 1 - config.sliding_window
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
        product = _matmul(p.astype(config.compute_dtype), refs.v_rows[head], 0)
        alpha = _repeat_lanes(alpha, product.shape[1])
        refs.acc[head, chunk_rows, :] = refs.acc[head, chunk_rows, :] * alpha + product
        return head

    num_chunks = config.num_queries_per_kv // config.heads_per_chunk
    lax.fori_loop(0, config.num_kv_heads, lambda head, _: (lax.fori_loop(0, num_chunks, chunk, head), None)[1], None)


def _prefill_mask(config, kv_dtype, item, start):
    """bool[chunk rows, keys]: the query sees the key."""
    shape = (config.queries_per_block, config.tokens_per_block)
    row = lax.broadcasted_iota(jnp.int32, shape, 1)
    key = start + _key_order(row, config.tokens_per_block, 1, kv_dtype)[0]
    query = item.position + lax.broadcasted_iota(jnp.int32, shape, 0)
    mask = key <= query if config.causal else key < item.key_end
    if config.sliding_window is not None:
        mask &= key > query - config.sliding_window
    return jnp.concatenate([mask] * config.heads_per_chunk, axis=0)


def _store_prefill(config, refs, out_ref):
    num_queries = config.queries_per_block
    num_heads = config.num_kv_heads * config.num_queries_per_kv

    def result(head):
        kv_head, g = divmod(min(head, num_heads - 1), config.num_queries_per_kv)
        rows = pl.ds(g * num_queries, num_queries)
        return refs.acc[kv_head, rows, :] / jnp.sum(refs.l[kv_head, rows, :], axis=1, keepdims=True)

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
