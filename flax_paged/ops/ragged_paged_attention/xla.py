"""Ragged paged attention in plain JAX: visits live pages only, a block at a time, with an online softmax in float32.

Three paths, chosen by static shapes and `max_query_len`:

* decode, short: one query a sequence and few keys: gather everything, attend once, no loop (a loop costs more than it
  saves there).
* decode, long or ragged: a flat work list of (sequence, block of keys), several a turn, as many turns as are live.
* queries of several tokens: for each block of a sequence's queries, the blocks of keys up to the causal edge. Sequences
  with a single query in such a step take the decode work list, so that they do not fill a block of queries.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from flax_paged.ops import dispatch
from flax_paged.ops.page_layout import PageLayout
from flax_paged.ops.quantization import is_quantized
from flax_paged.ops.ragged_paged_attention.page_reader import KeyBlock, PageReader, visible_pages
from flax_paged.ops.ragged_paged_attention.rules import HIDDEN, AttentionRules, normalize, sees_draft

# Fresh buffers larger than a few MB fault in every page at every call on a CPU, so gathered keys and values stay below.
_GATHER_BYTES = 2 * 2**20
_TURN_BYTES = 2 * 2**20
_KEYS_PER_BLOCK = 128
# One query has little to do with a block; smaller ones leave less of a sequence's last block empty.
_DECODE_KEYS_PER_BLOCK = 64
_ITEMS_PER_TURN = 8
_QUERIES_PER_BLOCK = 128


def ragged_paged_attention(
    q,
    kv_pages,
    seq_lens,
    block_tables,
    query_start_loc,
    num_seqs,
    *,
    rules: AttentionRules,
    finish: Callable[[jax.Array], jax.Array],
    kv_scales=None,
    k_scale=None,
    v_scale=None,
    page_mask=None,
    draft_mask=None,
    max_query_len=None,
) -> tuple[jax.Array, jax.Array]:
    """Attend over live pages; see `api.ragged_paged_attention`.

    Returns:
        The result [T, H, D] as `finish` makes it, and the logarithm of the softmax's denominator f32[T, H].
    """
    num_tokens, num_q_heads, _ = q.shape
    page_numbers, num_slots = None, seq_lens
    if page_mask is not None:
        page_size = PageLayout.of(kv_pages, q.shape[2]).page_size
        block_tables, page_numbers, num_slots = visible_pages(block_tables, seq_lens, page_mask, page_size)
    dtype = q.dtype if is_quantized(kv_pages.dtype) else dispatch.product_dtype(q, kv_pages)
    reader = PageReader(kv_pages, block_tables, q.shape[2], dtype, page_numbers, kv_scales, k_scale, v_scale)
    is_live = jnp.arange(seq_lens.shape[0], dtype=jnp.int32) < num_seqs
    query_lens = jnp.where(is_live, query_start_loc[1:] - query_start_loc[:-1], 0)

    # One query a sequence. Rows of other sequences are sent past the end: read clamped, not written.
    has_one = query_lens == 1
    rows = jnp.where(has_one, query_start_loc[:-1], num_tokens)
    safe_rows = jnp.minimum(rows, num_tokens - 1)
    decode_only = 1 in (max_query_len, num_tokens)
    decoding = _Attention(
        reader,
        rules,
        jnp.where(has_one, seq_lens, 0),
        jnp.where(has_one, num_slots, 0),
        None if draft_mask is None else draft_mask[safe_rows],
    )
    decode = _decode_short if decode_only and decoding.is_short else _decode_long
    one_out, one_lse = decode(_group_heads(q[safe_rows], reader.num_kv_heads), decoding)

    out = finish(jnp.zeros(q.shape, jnp.float32))
    lse = jnp.full((num_tokens, num_q_heads), -jnp.inf, jnp.float32)
    if not decode_only:
        attention = _Attention(reader, rules, seq_lens, num_slots, draft_mask)
        query_lens = jnp.where(has_one, 0, query_lens)
        out, lse = _prefill(q, (out, lse), query_lens, query_start_loc[:-1], attention, finish, max_query_len)
    out = out.at[rows].set(finish(one_out.reshape(-1, *q.shape[1:])), mode="drop")
    return out, lse.at[rows].set(one_lse.reshape(-1, num_q_heads), mode="drop")


@dataclasses.dataclass(frozen=True)
class _Attention:
    """What one call attends to, and how."""

    reader: PageReader
    rules: AttentionRules
    seq_lens: jax.Array  # i32[S]
    num_slots: jax.Array  # i32[S], of the pages that the reader's tables hold
    draft_mask: jax.Array | None  # i32[rows, W]

    @property
    def longest_span(self) -> int:
        """Static bound on the keys that one query sees."""
        bounds = [self.rules.attention_chunk_size, self.rules.sliding_window]
        if self.reader.page_numbers is not None or not self.rules.causal:
            bounds = []  # slots are not positions; a window looks both ways
        return min([self.reader.max_seq_len, *(bound for bound in bounds if bound is not None)])

    @property
    def is_short(self) -> bool:
        """Whether the keys of every sequence, one query each, may be gathered at once."""
        num_seqs = self.reader.block_tables.shape[0]
        return num_seqs * self.longest_span * self.reader.bytes_per_token <= _GATHER_BYTES

    def span(self, first_positions, last_positions, seqs=slice(None)):
        """Return the first and last slot that queries at these positions see."""
        if self.reader.page_numbers is not None:
            return jnp.zeros_like(self.num_slots[seqs]), self.num_slots[seqs] - 1
        return self.rules.oldest_key(first_positions), self.rules.newest_key(last_positions, self.seq_lens[seqs])

    def mask(self, positions, block: KeyBlock, words, context_lens):
        """Return bool[W, R, L] for queries at positions i32[W, R]; `words` [R, W] and context_lens for drafts."""
        mask = block.is_live[:, None] & self.rules.is_visible(positions[:, :, None], block.positions[:, None])
        if words is not None:
            index = jnp.broadcast_to(block.positions - context_lens[:, None], (len(words), block.positions.shape[1]))
            mask &= sees_draft(words, index).reshape(mask.shape)
        return mask

    def visit(self, q, positions, block: KeyBlock, mask, largest=HIDDEN):
        """Attend rows of queries over one block of keys.

        Args:
            q: [W, KV, R, D].
            positions: i32[W, R / G] of the queries; the rows of a group follow one another.
            block: L keys of each of the W.
            mask: bool[W, R / G, L].
            largest: f32[W, KV, R, 1], the largest score so far.

        Returns:
            f32[W, KV, R, 1] the largest score, f32[W, KV, R, 1] the weights' sum, f32[W, KV, R, D] weighted values.
        """
        dtype = self.reader.compute_dtype
        num_rows = q.shape[2] // positions.shape[1]
        products = _einsum("wkrd,wkld->wkrl", q, block.k, dtype)
        if block.k_scale is not None:
            products = products * block.k_scale
        slopes, distance = self._head_rows(self.rules.alibi_slopes, q), None
        if slopes is not None:
            distance = jnp.tile(positions[:, :, None] - block.positions[:, None], (1, num_rows, 1))[:, None]
        scores = self.rules.scores(products, jnp.tile(mask, (1, num_rows, 1))[:, None], slopes, distance)
        largest = jnp.maximum(largest, scores.max(axis=-1, keepdims=True))
        # A row that has seen no key yet weighs them all 1; the factor of its first visible key, 0, wipes that out.
        weights = jnp.exp(scores - largest)
        total = weights.sum(axis=-1, keepdims=True)
        if block.v_scale is not None:
            weights = weights * block.v_scale
        return largest, total, _einsum("wkrl,wkld->wkrd", weights, block.v, dtype)

    def normalize(self, largest, total, values):
        """End the softmax: the result f32[W, KV, R, D] and the logarithm of its denominator f32[W, KV, R, 1]."""
        return normalize(largest, total, values, self._head_rows(self.rules.sinks, values))

    def _head_rows(self, per_head, q):
        """Spread numbers of query heads f32[H] over the rows of q [W, KV, R, D]: f32[1, KV, R, 1]."""
        if per_head is None:
            return None
        num_kv_heads, num_rows = q.shape[1:3]
        per_head = per_head.reshape(num_kv_heads, -1)
        return jnp.repeat(per_head, num_rows // per_head.shape[1], axis=1)[None, ..., None]


def _group_heads(q, num_kv_heads):
    return q.reshape(q.shape[0], num_kv_heads, q.shape[1] // num_kv_heads, q.shape[2])  # [N, KV, G, D]


def _einsum(subscripts, a, b, dtype):
    """Product of `dtype` operands summed in float32; float32 operands are not rounded to bf16 on a TPU."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    a, b = a.astype(dtype), b.astype(dtype)
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


def _decode_short(q, attention):
    """Attend one query a sequence, q [S, KV, G, D], over all keys at once."""
    positions = attention.seq_lens - 1
    first_slots, last_slots = attention.span(positions, positions)
    seqs = jnp.arange(q.shape[0], dtype=jnp.int32)
    block = attention.reader.read(seqs, first_slots, last_slots, attention.longest_span)
    mask = attention.mask(positions[:, None], block, attention.draft_mask, positions)
    return attention.normalize(*attention.visit(q, positions[:, None], block, mask))


def _decode_long(q, attention):
    """Attend one query a sequence, q [S, KV, G, D], block by block of live keys."""
    num_seqs = q.shape[0]
    positions = attention.seq_lens - 1
    first_slots, last_slots = attention.span(positions, positions)
    num_blocks = -(-(last_slots + 1 - first_slots) // _DECODE_KEYS_PER_BLOCK)
    ends = jnp.cumsum(num_blocks, dtype=jnp.int32)
    width = _items_per_turn(attention.reader, num_seqs)

    def turn(i, state):
        largest, total, values = state
        items = i * width + jnp.arange(width, dtype=jnp.int32)
        # Items past the last get sequence `num_seqs`: read clamped, not merged.
        seqs = jnp.searchsorted(ends, items, side="right", method="compare_all").astype(jnp.int32)
        safe = jnp.minimum(seqs, num_seqs - 1)
        blocks = items - (ends[safe] - num_blocks[safe])
        first_of_block = first_slots[safe] + blocks * _DECODE_KEYS_PER_BLOCK
        block = attention.reader.read(safe, first_of_block, last_slots[safe], _DECODE_KEYS_PER_BLOCK)
        words = None if attention.draft_mask is None else attention.draft_mask[safe]
        mask = attention.mask(positions[safe][:, None], block, words, positions[safe])
        item_largest, item_total, item_values = attention.visit(q[safe], positions[safe][:, None], block, mask)

        new_largest = largest.at[seqs].max(item_largest, mode="drop")
        old_factor, item_factor = jnp.exp(largest - new_largest), jnp.exp(item_largest - new_largest[safe])
        total = (total * old_factor).at[seqs].add(item_total * item_factor, mode="drop")
        values = (values * old_factor).at[seqs].add(item_values * item_factor, mode="drop")
        return new_largest, total, values

    largest = jnp.full((*q.shape[:3], 1), HIDDEN, jnp.float32)
    state = largest, jnp.zeros_like(largest), jnp.zeros(q.shape, jnp.float32)
    return attention.normalize(*lax.fori_loop(0, -(-ends[-1] // width), turn, state))


def _items_per_turn(reader, num_seqs):
    fits = _TURN_BYTES // (_DECODE_KEYS_PER_BLOCK * reader.bytes_per_token)
    live = num_seqs * -(-reader.max_seq_len // _DECODE_KEYS_PER_BLOCK)
    return max(1, min(fits, live, _ITEMS_PER_TURN))


def _prefill(q, results, query_lens, first_rows, attention, finish, max_query_len):
    """Attend blocks of several queries of one sequence, writing their rows of the results; query_len 0 is skipped."""
    num_tokens, num_seqs = q.shape[0], query_lens.shape[0]
    size = min(_QUERIES_PER_BLOCK, num_tokens, max_query_len or num_tokens)
    num_blocks = -(-query_lens // size)
    ends = jnp.cumsum(num_blocks, dtype=jnp.int32)

    def attend_item(i, results):
        seq = jnp.minimum(jnp.searchsorted(ends, i, side="right", method="compare_all").astype(jnp.int32), num_seqs - 1)
        first_row = first_rows[seq] + (i - (ends[seq] - num_blocks[seq])) * size
        end_row = jnp.minimum(first_row + size, first_rows[seq] + query_lens[seq])
        # A slice keeps its size at the end of q, so it may start before the block: those rows are not written.
        start = jnp.minimum(first_row, num_tokens - size)
        rows = start + jnp.arange(size, dtype=jnp.int32)
        is_mine = (rows >= first_row) & (rows < end_row)
        positions = rows - first_rows[seq] + attention.seq_lens[seq] - query_lens[seq]
        ends_of_block = positions[0] + first_row - start, positions[0] + end_row - 1 - start
        context_len = attention.seq_lens[seq] - query_lens[seq]
        out, lse = _attend_query_block(q, start, seq, positions, ends_of_block, context_len, attention)

        def write(array, new):
            old = lax.dynamic_slice_in_dim(array, start, size)
            new = jnp.where(is_mine.reshape(-1, *[1] * (new.ndim - 1)), new, old)
            return lax.dynamic_update_slice_in_dim(array, new, start, axis=0)

        return write(results[0], finish(out)), write(results[1], lse)

    return lax.fori_loop(0, ends[-1], attend_item, results)


def _attend_query_block(q, start, seq, positions, ends_of_block, context_len, attention):
    """Attend B queries of one sequence over the blocks of keys that they see; returns f32 [B, H, D] and [B, H]."""
    size, (num_q_heads, head_dim) = positions.shape[0], q.shape[1:]
    num_kv_heads = attention.reader.num_kv_heads
    block_q = _group_heads(lax.dynamic_slice_in_dim(q, start, size), num_kv_heads)
    rows_q = block_q.transpose(1, 2, 0, 3).reshape(1, num_kv_heads, -1, head_dim)  # [1, KV, G * B, D]
    words = attention.draft_mask
    if words is not None:
        words = lax.dynamic_slice_in_dim(words, start, size)
    first_slot, last_slot = attention.span(*(position[None] for position in ends_of_block), seqs=seq[None])

    def visit(i, state):
        largest, total, values = state
        block = attention.reader.read(seq[None], first_slot + i * _KEYS_PER_BLOCK, last_slot, _KEYS_PER_BLOCK)
        mask = attention.mask(positions[None], block, words, context_len[None])
        new_largest, new_total, new_values = attention.visit(rows_q, positions[None], block, mask, largest)
        factor = jnp.exp(largest - new_largest)
        return new_largest, total * factor + new_total, values * factor + new_values

    largest = jnp.full((*rows_q.shape[:3], 1), HIDDEN, jnp.float32)
    state = largest, jnp.zeros_like(largest), jnp.zeros(rows_q.shape, jnp.float32)
    num_blocks = -(-(last_slot[0] + 1 - first_slot[0]) // _KEYS_PER_BLOCK)
    out, lse = attention.normalize(*lax.fori_loop(0, num_blocks, visit, state))
    out, lse = (x.reshape(num_kv_heads, -1, size, x.shape[-1]).transpose(2, 0, 1, 3) for x in (out, lse))
    return out.reshape(size, num_q_heads, head_dim), lse.reshape(size, num_q_heads)
