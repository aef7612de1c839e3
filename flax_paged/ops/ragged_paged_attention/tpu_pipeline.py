"""What the ragged paged attention kernel for TPU moves, and when: its memory, its items and its copies.

One program walks over *items*: a sequence's block of queries. Each item walks over blocks of its live pages, which a
cursor fetches from HBM ahead of the work. What is computed with them is in tpu_kernel.py.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LOG2_E = math.log2(math.e)


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
    is_packed: bool  # K and V share the lanes (`ops.page_layout`)
    edge_chunk: int  # tokens of a partly live block that the decode path handles at a time
    compute_dtype: Any
    interpret: bool
    tokens_per_group: int  # tokens under one index of the pages' second dimension
    has_update: bool = False  # write new keys and values before attending
    attention_chunk_size: int | None = None
    per_head: tuple[str, ...] = ()  # options with a number for each query head, in the order of `Refs.per_head`
    has_lse: bool = False
    num_mask_words: int = 0  # words of a sequence's page mask; 0 without one
    num_draft_words: int = 0  # words of a query's draft mask; 0 without one
    has_kv_scales: bool = False  # a scale for each token and KV head

    def has(self, name: str) -> bool:
        """Whether an option with a number for each query head is in use."""
        return name in self.per_head

    @property
    def has_draft_mask(self) -> bool:
        """Whether there is a draft mask."""
        return self.num_draft_words > 0

    @property
    def tokens_per_block(self) -> int:
        """Keys in one block of pages."""
        return self.pages_per_block * self.page_size

    @property
    def hides_old_keys(self) -> bool:
        """Whether an item's first key may lie within a page."""
        return self.sliding_window is not None or self.attention_chunk_size is not None

    @property
    def score_scale(self) -> float:
        """Factor that brings q·k to units of log2, or makes it ready for tanh where there is a soft cap."""
        return self.sm_scale / self.soft_cap if self.soft_cap else self.sm_scale * LOG2_E

    @property
    def score_factor(self) -> float:
        """The part of `score_scale` that the scores take."""
        return self.score_scale / self.query_scale if self.query_scale else 1.0

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
    context_len: Any  # keys of its sequence before this step
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
    kv_pages_hbm: Any  # [num_pages, groups_per_page, num_kv_heads, 2, head_dim]; see `token_groups`
    block_tables_hbm: Any  # i32[max_num_seqs, pages_per_seq]
    out_hbm: Any  # [num_tokens, num_q_heads, head_dim]
    table: Any  # i32[2 * pages_per_seq, padded], SMEM: page ids of this sequence and the next
    out_rows: Any  # i32[2], SMEM: rows of `out` on their way to HBM, by slot
    kv: Any  # [2, groups_per_block, num_kv_heads, 2, head_dim]
    q: Any  # [3, queries_per_block, num_q_heads, head_dim]: the item at work and up to two fetched ahead
    out: Any  # [2, queries_per_block, num_q_heads, head_dim]
    scores: Any  # f32[num_q_heads, tokens_per_block * num_kv_heads]
    values: Any  # [tokens_per_block * num_kv_heads, head_dim], two rows to a word where they have 16 bits
    table_sems: Any  # one for each slot of the buffers above
    kv_sems: Any
    q_sems: Any
    out_sems: Any
    # Prefill only.
    q_rows: Any = None  # [num_kv_heads, num_queries_per_kv * queries_per_block, head_dim], scaled
    k_rows: Any = None  # [num_kv_heads, tokens_per_block, head_dim]
    v_rows: Any = None  # the same; packed: K and V are in k_rows
    m: Any = None  # f32[num_kv_heads, num_queries_per_kv * queries_per_block, 128]
    l: Any = None  # noqa: E741  # the same
    acc: Any = None  # f32[num_kv_heads, num_queries_per_kv * queries_per_block, head_dim]
    # With some of "sinks", "slopes" (both in units of log2), "k_scale" (with what q does not take of `score_scale`) and
    # "v_scale" only.
    per_head: Any = None  # f32[len(config.per_head), num_q_heads, 128], the same in all lanes
    # With log-sum-exp only; heads are in lanes.
    lse_hbm: Any = None  # f32[num_tokens, 1, num_q_heads, padded to 128 * n]
    lse: Any = None  # f32[2, queries_per_block, 1, num_q_heads, padded]
    # With page mask only.
    page_mask: Any = None  # i32[max_num_seqs * num_mask_words + more], SMEM: bit b of word w stands for page 32 w + b
    # With draft mask only.
    sees_itself: Any = None  # i32[num_tokens + 1], SMEM: bit 0 of the mask, for sequences of one query
    draft_hbm: Any = None  # i32[num_tokens, 1, words, padded to 128 * n]
    draft: Any = None  # i32[3, queries_per_block, 1, words, padded], of the items in `q`
    # With scales for each token and KV head only.
    kv_scales_hbm: Any = None  # f32[num_pages, lines_per_page, 2, 128], see `ops.scales_layout`
    scales: Any = None  # f32[2, lines_per_block, 2, 128]
    value_scales: Any = None  # f32[1, tokens_per_block * num_kv_heads], those of the rows in `values`
    head_scales: Any = None  # f32[2, num_kv_heads, padded, tokens_per_block], of K and V; prefill only
    # With update only.
    slot_mapping: Any = None  # i32[3 * U], SMEM
    num_slices: Any = None  # i32[1], SMEM
    new_groups_hbm: Any = None  # [num_groups, num_kv_heads, 2, head_dim]
    update_sems: Any = None

    @classmethod
    def ordered(cls, refs, config: KernelConfig):
        """Name the kernel's arguments, which come as prefetched scalars, inputs, outputs, scratch."""
        has_update = config.has_update
        names = ["seq_lens", "query_start_loc", "num_seqs"]
        names += ["page_mask"] if config.num_mask_words else []
        names += ["sees_itself"] if config.has_draft_mask else []
        names += ["slot_mapping", "num_slices"] if has_update else []
        names += ["per_head"] if config.per_head else []
        names += ["draft_hbm"] if config.has_draft_mask else []
        names += ["kv_scales_hbm"] if config.has_kv_scales else []
        names += ["q_hbm", "block_tables_hbm"]
        # With update, kv_pages is an aliased output: named twice, the output is kept.
        names += ["new_groups_hbm"] if has_update else []
        names += ["kv_pages_hbm", "out_hbm"]
        names += ["kv_pages_hbm"] if has_update else []
        names += ["lse_hbm"] if config.has_lse else []
        names += ["table", "out_rows", "kv", "q", "out", "scores", "values"]
        names += ["table_sems", "kv_sems", "q_sems", "out_sems"]
        if not config.decode_only:
            names += ["q_rows", "k_rows"] + ([] if config.is_packed else ["v_rows"]) + ["m", "l", "acc"]
        names += ["lse"] if config.has_lse else []
        names += ["draft"] if config.has_draft_mask else []
        if config.has_kv_scales:
            names += ["scales", "value_scales"] + ([] if config.decode_only else ["head_scales"])
        names += ["update_sems"] if has_update else []
        return cls(**dict(zip(names, refs, strict=True)))

    @property
    def update(self):
        """The arguments of `start_slices` and `wait_for_slices`."""
        return self.slot_mapping, self.num_slices, self.new_groups_hbm, self.kv_pages_hbm, self.update_sems


# --- Items -----------------------------------------------------------------------------------------------------------


def num_items(config, refs, s):
    """Blocks of queries of sequence `s`; at least one, so that every sequence has a place in the pipeline."""
    num_queries = refs.query_start_loc[s + 1] - refs.query_start_loc[s]
    return jnp.maximum(pl.cdiv(num_queries, config.queries_per_block), 1)


def describe_item(config, refs, s, i):
    """Block `i` of the queries of sequence `s`."""
    query_start = refs.query_start_loc[s]
    query_len = refs.query_start_loc[s + 1] - query_start
    seq_len = refs.seq_lens[s]
    first = i * config.queries_per_block
    num_queries = jnp.minimum(config.queries_per_block, query_len - first)
    position = seq_len - query_len + first
    key_end = position + num_queries if config.causal else seq_len
    if config.has_draft_mask:  # a single query may not see itself; the decode path has no other mask for it
        key_end -= jnp.where(query_len == 1, 1 - refs.sees_itself[query_start], 0)
    if not config.causal:  # a window looks both ways, a chunk has an end
        if config.sliding_window is not None:
            key_end = jnp.minimum(key_end, position + num_queries - 1 + config.sliding_window)
        if config.attention_chunk_size is not None:
            last = position + num_queries - 1
            chunk_end = last - lax.rem(last, config.attention_chunk_size) + config.attention_chunk_size
            key_end = jnp.minimum(key_end, chunk_end)
    key_start = jnp.int32(0)
    if config.sliding_window is not None:
        key_start = jnp.maximum(position - config.sliding_window + 1, 0)
    if config.attention_chunk_size is not None:
        key_start = jnp.maximum(key_start, position - lax.rem(position, config.attention_chunk_size))
    first_page = lax.div(key_start, config.page_size)
    last_page = pl.cdiv(key_end, config.page_size)
    num_blocks = jnp.maximum(pl.cdiv(last_page - first_page, config.pages_per_block), 1)
    return Item(
        s,
        query_start + first,
        num_queries,
        position,
        seq_len - query_len,
        key_start,
        key_end,
        first_page,
        last_page,
        num_blocks,
    )


def takes_decode_path(config, item):
    """Whether an item has a single query; with a draft mask, whether its sequence has."""
    is_single = item.num_queries == 1
    return is_single & (item.position == item.context_len) if config.has_draft_mask else is_single


def page_mask_bits(config, refs, s, page):
    """A word of the page mask of sequence `s` that begins at a page, whose bit is the lowest."""
    index, shift = s * config.num_mask_words + lax.div(page, 32), lax.rem(page, 32)
    upper = lax.shift_left(lax.shift_left(refs.page_mask[index + 1], 1), 31 - shift)
    return lax.shift_right_logical(refs.page_mask[index], shift) | upper


def block_start(config, item, b):
    """Position of the first key of block `b`."""
    return (item.first_page + b * config.pages_per_block) * config.page_size


# --- Data movement ---------------------------------------------------------------------------------------------------


def fetch(config, refs, cursor):
    """Advance the cursor by one block; returns the block's pages for `start_pages`, and the cursor.

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
    is_last = i + 1 >= num_items(config, refs, jnp.minimum(s, num_seqs))
    s, i = jnp.where(is_last, s + 1, s), jnp.where(is_last, 0, i + 1)
    slot = jnp.where(slot == 2, 0, slot + 1)
    is_live = s < num_seqs
    item = describe_item(config, refs, jnp.minimum(s, num_seqs), i)

    @pl.when(is_live & (i == 0))
    def _():
        table_copy(refs, s).wait()
        pl.when(s + 1 < num_seqs)(lambda: table_copy(refs, s + 1).start())

    pl.when(is_live)(lambda: _start(q_copies(config, refs, item, slot)))
    first = lax.rem(s, 2) * _table_stride(refs) + item.first_page
    return s, i, slot, first, jnp.where(is_live, item.last_page - item.first_page, 0)


def table_copy(refs, s):
    """Copy of a sequence's page ids into SMEM, which has room for two."""
    slot, pages_per_seq = lax.rem(s, 2), refs.block_tables_hbm.shape[1]
    target = refs.table.at[pl.ds(slot * _table_stride(refs), pages_per_seq)]
    return pltpu.make_async_copy(refs.block_tables_hbm.at[s], target, refs.table_sems.at[slot])


def _table_stride(refs):
    return refs.table.shape[0] // 2


def q_copies(config, refs, item, slot):
    """Copies of an item's queries, and of their draft masks, into VMEM."""
    source, target, sem = pl.ds(item.query_row, item.num_queries), pl.ds(0, item.num_queries), refs.q_sems.at[slot]
    copies = [pltpu.make_async_copy(refs.q_hbm.at[source], refs.q.at[slot, target], sem)]
    if config.has_draft_mask:
        copies.append(pltpu.make_async_copy(refs.draft_hbm.at[source], refs.draft.at[slot, target], sem))
    return copies


def wait_q(config, refs, item, slot):
    """Wait for an item's queries."""
    _wait(q_copies(config, refs, item, slot))


def start_page(config, refs, buffer, fetch, j):
    """Start to fetch the `j`-th page of a block, unless the page mask hides it: then its id is negative."""
    size, index = refs.kv_pages_hbm.shape[1], fetch[0] + j

    def start():
        source, target = refs.kv_pages_hbm.at[refs.table[index]], refs.kv.at[buffer, pl.ds(j * size, size)]
        pltpu.make_async_copy(source, target, refs.kv_sems.at[buffer]).start()
        if config.has_kv_scales:
            lines = refs.kv_scales_hbm.shape[1]
            source, target = refs.kv_scales_hbm.at[refs.table[index]], refs.scales.at[buffer, pl.ds(j * lines, lines)]
            pltpu.make_async_copy(source, target, refs.kv_sems.at[buffer]).start()

    if config.num_mask_words:
        pl.when(refs.table[index] >= 0)(start)
    else:
        start()


def start_pages(config, refs, buffer, fetch):
    """Start to fetch a block's pages into a buffer."""
    lax.fori_loop(0, fetch[1], lambda j, _: start_page(config, refs, buffer, fetch, j), None)


def wait_pages(config, refs, item, b, buffer):
    """Wait for all pages of a block at once: the semaphore counts bytes."""
    first = item.first_page + b * config.pages_per_block
    num_pages = jnp.minimum(config.pages_per_block, item.last_page - first)

    def wait(num_pages):
        target = refs.kv.at[buffer, pl.ds(0, num_pages * refs.kv_pages_hbm.shape[1])]
        pltpu.make_async_copy(target, target, refs.kv_sems.at[buffer]).wait()
        if config.has_kv_scales:
            target = refs.scales.at[buffer, pl.ds(0, num_pages * refs.kv_scales_hbm.shape[1])]
            pltpu.make_async_copy(target, target, refs.kv_sems.at[buffer]).wait()

    if config.num_mask_words:

        def is_fetched(j):
            return page_mask_bits(config, refs, item.sequence, first + j) & 1

        num_pages = lax.fori_loop(0, num_pages, lambda j, n: n + is_fetched(j), jnp.int32(0))
    pl.when(num_pages > 0)(lambda: wait(num_pages))


def clean_block(config, kv_ref, low, high):
    """Zero the fetched tokens before `low` and from `high` on, which share a page with live ones and may hold NaN."""
    size = config.tokens_per_group

    def zero(group, _):
        kv_ref[group] = jnp.zeros_like(kv_ref[group])

    def cut(bound, is_low):
        """Zero tokens of the group that a bound cuts."""
        place = 1 if size == 2 else lax.rem(bound, size)
        pl.when(lax.rem(bound, size) > 0)(lambda: _zero_tokens(config, kv_ref, lax.div(bound, size), place, is_low))

    low = jnp.clip(low, 0, config.tokens_per_block)
    high = jnp.clip(high, 0, config.tokens_per_block)
    end = jnp.minimum(pl.cdiv(high, config.page_size) * config.page_size, config.tokens_per_block)
    if config.hides_old_keys:
        lax.fori_loop(0, lax.div(low, size), zero, None)
    lax.fori_loop(pl.cdiv(high, size), lax.div(end, size), zero, None)
    if size > 1:
        if config.hides_old_keys:
            cut(low, is_low=True)
        cut(high, is_low=False)


def _zero_tokens(config, kv_ref, group, place, is_before):
    """Zero the tokens of a group before a place in it, or from there on; in narrow dtypes they are parts of words."""
    bits = 8 * kv_ref.dtype.itemsize
    if bits == 32:  # two tokens
        which = 0 if is_before else 1
        kv_ref[group, :, which, :] = jnp.zeros_like(kv_ref[group, :, which, :])
    elif config.interpret:  # the interpreter has no views of refs
        token = lax.broadcasted_iota(jnp.int32, kv_ref.shape[1:], 1)
        kv_ref[group] = jnp.where((token < place) == is_before, jnp.zeros_like(kv_ref[group]), kv_ref[group])
    else:
        words = kv_ref.bitcast(jnp.int32)
        before = lax.shift_left(jnp.int32(1), jnp.int32(bits) * place) - 1
        words[group] = words[group] & (~before if is_before else before)


def _out_copies(config, refs, slot, row, num_rows):
    """Copies of the first rows of a result, which share a semaphore."""
    source, target, sem = pl.ds(0, num_rows), pl.ds(row, num_rows), refs.out_sems.at[slot]
    copies = [pltpu.make_async_copy(refs.out.at[slot, source], refs.out_hbm.at[target], sem)]
    if config.has_lse:
        copies.append(pltpu.make_async_copy(refs.lse.at[slot, source], refs.lse_hbm.at[target], sem))
    return copies


def _start(copies):
    for copy in copies:
        copy.start()


def _wait(copies):
    for copy in copies:
        copy.wait()


def start_out(config, refs, item, slot):
    """Start to bring an item's result to HBM."""
    refs.out_rows[slot] = item.num_queries
    pl.when(item.num_queries > 0)(
        lambda: _start(_out_copies(config, refs, slot, item.query_row, item.num_queries))
    )  # fmt: skip


def wait_out(config, refs, slot):
    """Wait until the buffer's last result has left."""
    num_rows = refs.out_rows[slot]
    pl.when(num_rows > 0)(lambda: _wait(_out_copies(config, refs, slot, 0, num_rows)))


def zero_padding_rows(config, refs, first_row):
    """Fill the rows of the result from `first_row` on with zeros; no other result may be on its way."""
    refs.out[0] = jnp.zeros_like(refs.out[0])
    if config.has_lse:
        refs.lse[0] = jnp.full_like(refs.lse[0], -jnp.inf)
    num_rows = refs.out_hbm.shape[0]
    step = config.queries_per_block

    def copies(j):
        row = first_row + j * step
        return _out_copies(config, refs, 0, row, jnp.minimum(step, num_rows - row))

    num_copies = pl.cdiv(num_rows - first_row, step)
    lax.fori_loop(0, num_copies, lambda j, _: _start(copies(j)), None)
    lax.fori_loop(0, num_copies, lambda j, _: _wait(copies(j)), None)
