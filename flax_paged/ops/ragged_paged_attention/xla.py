"""Ragged paged attention in plain JAX: visits live pages only, a block at a time, with an online softmax in float32.

Three paths, chosen by static shapes and `max_query_len`:

* decode, short: one query a sequence and few keys: gather everything, attend once, no loop (a loop costs more than it
  saves there).
* decode, long or ragged: a flat work list of (sequence, block of keys), several a turn, as many turns as are live.
* queries of several tokens: for each block of a sequence's queries, the blocks of keys up to the causal edge. Sequences
  with a single query in such a step take the decode work list, so that they do not fill a block of queries.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from flax_paged.ops import dispatch
from flax_paged.ops.page_layout import V_LANE, PageLayout

# Fresh buffers larger than a few MB fault in every page at every call on a CPU, so gathered keys and values stay below.
_GATHER_BYTES = 2 * 2**20
_TURN_BYTES = 2 * 2**20
_KEYS_PER_BLOCK = 128
# One query has little to do with a block; smaller ones leave less of a sequence's last block empty.
_DECODE_KEYS_PER_BLOCK = 64
_ITEMS_PER_TURN = 8
_QUERIES_PER_BLOCK = 128
# Finite, so that the difference of two hidden scores is 0 and not NaN.
_HIDDEN = -1e30


def ragged_paged_attention(
    q,
    kv_pages,
    seq_lens,
    block_tables,
    query_start_loc,
    num_seqs,
    *,
    sm_scale,
    sliding_window,
    soft_cap,
    max_query_len=None,
) -> jax.Array:
    """Attend over live pages; see `api.ragged_paged_attention`."""
    num_tokens = q.shape[0]
    with jax.numpy_dtype_promotion("standard"):  # a float32 cache under bfloat16 queries is meant, whatever the setting
        cache = _Cache(kv_pages, block_tables, q.shape[2], dispatch.product_dtype(q, kv_pages))
    scorer = _Scorer(sm_scale, sliding_window, soft_cap)
    is_live = jnp.arange(seq_lens.shape[0], dtype=jnp.int32) < num_seqs
    query_lens = jnp.where(is_live, query_start_loc[1:] - query_start_loc[:-1], 0)

    # One query a sequence. Rows of other sequences are sent past the end: read clamped, not written.
    has_one = query_lens == 1
    rows = jnp.where(has_one, query_start_loc[:-1], num_tokens)
    decode_only = 1 in (max_query_len, num_tokens)
    grouped_q = _group_heads(q[jnp.minimum(rows, num_tokens - 1)], cache.num_kv_heads)
    attend = _decode_short if decode_only and _is_short(cache, sliding_window) else _decode_long
    one_query_out = attend(grouped_q, jnp.where(has_one, seq_lens, 0), cache, scorer).reshape(-1, *q.shape[1:])

    out = jnp.zeros(q.shape, q.dtype)
    if not decode_only:
        query_lens = jnp.where(has_one, 0, query_lens)
        out = _prefill(q, out, seq_lens, query_lens, query_start_loc[:-1], cache, scorer, max_query_len)
    return out.at[rows].set(one_query_out.astype(q.dtype), mode="drop")


@dataclasses.dataclass(frozen=True)
class _Cache:
    """The page pool seen through the block tables, by sequence and key position."""

    kv_pages: jax.Array  # in any layout
    block_tables: jax.Array  # i32[S, P]
    head_dim: int
    compute_dtype: jnp.dtype

    @property
    def layout(self) -> PageLayout:
        return PageLayout.of(self.kv_pages, self.head_dim)

    @property
    def num_kv_heads(self) -> int:
        return self.layout.num_kv_heads

    @property
    def max_seq_len(self) -> int:
        return self.block_tables.shape[1] * self.layout.page_size

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.compute_dtype.itemsize

    def read(self, seqs: jax.Array, first_keys: jax.Array, last_keys: jax.Array, num_keys: int):
        """Read a block of keys and values of each of W sequences.

        Slots past the last key may hold NaN, and a weight of 0 times NaN is NaN: they are never read, the last key is
        read again in their place.

        Args:
            seqs: i32[W], rows of the block tables.
            first_keys: i32[W], position of the block's first key.
            last_keys: i32[W], position of the last key that may be read.
            num_keys: Size L of the block.

        Returns:
            k and v [W, KV, L, D], and the keys' positions i32[W, L], not cut at the last key.
        """
        page_size, num_kv_heads = self.layout.page_size, self.num_kv_heads
        positions = first_keys[:, None] + jnp.arange(num_keys, dtype=jnp.int32)[None]
        slots = jnp.clip(positions, 0, jnp.maximum(last_keys, 0)[:, None])[:, None]  # [W, 1, L]
        pages = self.block_tables[seqs[:, None, None], slots // page_size]
        heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
        tokens = slots % page_size
        # One gather a row of head_dim, straight into head-major order: a transpose afterwards costs more. Page and row
        # in it stay two indices, as the number of a row in the whole pool can pass 2**31.
        if self.layout.is_packed:
            rows = (tokens // 2 * num_kv_heads + heads) * 2 + tokens % 2  # [W, KV, L]
        else:
            rows = (tokens * num_kv_heads + heads) * 2  # of K; that of V comes next
        pages = jnp.broadcast_to(pages, rows.shape)
        pool = self.kv_pages.reshape(self.layout.num_pages, -1, self.layout.num_lanes)
        if self.layout.is_packed:
            kv = pool.at[pages, rows].get(mode="promise_in_bounds")
            return kv[..., : self.head_dim], kv[..., V_LANE : V_LANE + self.head_dim], positions
        k, v = (pool.at[pages, rows + i, : self.head_dim].get(mode="promise_in_bounds") for i in (0, 1))
        return k, v, positions


@dataclasses.dataclass(frozen=True)
class _Scorer:
    """Turns products into weights: scale, cap, mask."""

    sm_scale: float
    sliding_window: int | None
    soft_cap: float | None

    def first_key(self, query_positions: jax.Array) -> jax.Array:
        """Return the oldest key position that a query at this position sees."""
        if self.sliding_window is None:
            return jnp.zeros_like(query_positions)
        return jnp.maximum(query_positions - self.sliding_window + 1, 0)

    def is_visible(self, query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
        """Return the mask, both arguments broadcast."""
        mask = key_positions <= query_positions
        if self.sliding_window is not None:
            mask &= key_positions > query_positions - self.sliding_window
        return mask

    def scores(self, products: jax.Array, mask: jax.Array) -> jax.Array:
        """Return float32 scores, hidden ones very low; the cap comes before the mask."""
        scores = products * self.sm_scale
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        return jnp.where(mask, scores, _HIDDEN)


def _group_heads(q, num_kv_heads):
    return q.reshape(q.shape[0], num_kv_heads, q.shape[1] // num_kv_heads, q.shape[2])  # [N, KV, G, D]


def _is_short(cache, sliding_window):
    num_keys = min(cache.max_seq_len, sliding_window or cache.max_seq_len)
    return cache.block_tables.shape[0] * num_keys * cache.bytes_per_token <= _GATHER_BYTES


def _einsum(subscripts, a, b, dtype):
    """Product of `dtype` operands summed in float32; float32 operands are not rounded to bf16 on a TPU."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    a, b = a.astype(dtype), b.astype(dtype)
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


def _attend_once(q, k, v, mask, cache, scorer):
    """Attend one query a row: q [W, KV, G, D], k and v [W, KV, L, D], mask [W, L] -> max, sum, weighted values."""
    scores = scorer.scores(_einsum("wkgd,wkld->wkgl", q, k, cache.compute_dtype), mask[:, None, None])
    largest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    return largest, weights.sum(axis=-1, keepdims=True), _einsum("wkgl,wkld->wkgd", weights, v, cache.compute_dtype)


def _decode_short(q, seq_lens, cache, scorer):
    """Attend one query a sequence, q [S, KV, G, D], over all keys at once; seq_len 0 gives rubbish."""
    num_keys = min(cache.max_seq_len, scorer.sliding_window or cache.max_seq_len)
    seqs = jnp.arange(q.shape[0], dtype=jnp.int32)
    k, v, positions = cache.read(seqs, scorer.first_key(seq_lens - 1), seq_lens - 1, num_keys)
    mask = scorer.is_visible((seq_lens - 1)[:, None], positions)
    _, total, values = _attend_once(q, k, v, mask, cache, scorer)
    return values / total


def _decode_long(q, seq_lens, cache, scorer):
    """Attend one query a sequence, q [S, KV, G, D], block by block of live keys; seq_len 0 gives rubbish."""
    num_seqs = q.shape[0]
    last_keys = seq_lens - 1
    first_keys = scorer.first_key(last_keys)
    num_blocks = -(-(seq_lens - first_keys) // _DECODE_KEYS_PER_BLOCK)
    ends = jnp.cumsum(num_blocks, dtype=jnp.int32)
    width = _items_per_turn(cache, num_seqs)

    def turn(i, state):
        largest, total, values = state
        items = i * width + jnp.arange(width, dtype=jnp.int32)
        # Items past the last get sequence `num_seqs`: read clamped, not merged.
        seqs = jnp.searchsorted(ends, items, side="right", method="compare_all").astype(jnp.int32)
        safe = jnp.minimum(seqs, num_seqs - 1)
        blocks = items - (ends[safe] - num_blocks[safe])
        first_of_block = first_keys[safe] + blocks * _DECODE_KEYS_PER_BLOCK
        k, v, positions = cache.read(safe, first_of_block, last_keys[safe], _DECODE_KEYS_PER_BLOCK)
        mask = scorer.is_visible(last_keys[safe][:, None], positions)
        item_largest, item_total, item_values = _attend_once(q[safe], k, v, mask, cache, scorer)

        new_largest = largest.at[seqs].max(item_largest, mode="drop")
        old_factor, item_factor = jnp.exp(largest - new_largest), jnp.exp(item_largest - new_largest[safe])
        total = (total * old_factor).at[seqs].add(item_total * item_factor, mode="drop")
        values = (values * old_factor).at[seqs].add(item_values * item_factor, mode="drop")
        return new_largest, total, values

    largest = jnp.full((*q.shape[:3], 1), _HIDDEN, jnp.float32)
    state = largest, jnp.zeros_like(largest), jnp.zeros(q.shape, jnp.float32)
    _, total, values = lax.fori_loop(0, -(-ends[-1] // width), turn, state)
    return values / total


def _items_per_turn(cache, num_seqs):
    fits = _TURN_BYTES // (_DECODE_KEYS_PER_BLOCK * cache.bytes_per_token)
    live = num_seqs * -(-cache.max_seq_len // _DECODE_KEYS_PER_BLOCK)
    return max(1, min(fits, live, _ITEMS_PER_TURN))


def _prefill(q, out, seq_lens, query_lens, first_rows, cache, scorer, max_query_len):
    """Attend blocks of several queries of one sequence, writing their rows of `out`; query_len 0 is skipped."""
    num_tokens, num_seqs = q.shape[0], seq_lens.shape[0]
    block = min(_QUERIES_PER_BLOCK, num_tokens, max_query_len or num_tokens)
    num_blocks = -(-query_lens // block)
    ends = jnp.cumsum(num_blocks, dtype=jnp.int32)

    def attend_item(i, out):
        seq = jnp.minimum(jnp.searchsorted(ends, i, side="right", method="compare_all").astype(jnp.int32), num_seqs - 1)
        first_row = first_rows[seq] + (i - (ends[seq] - num_blocks[seq])) * block
        end_row = jnp.minimum(first_row + block, first_rows[seq] + query_lens[seq])
        # A slice keeps its size at the end of q, so it may start before the block: those rows are not written.
        start = jnp.minimum(first_row, num_tokens - block)
        rows = start + jnp.arange(block, dtype=jnp.int32)
        is_mine = (rows >= first_row) & (rows < end_row)
        positions = rows - first_rows[seq] + seq_lens[seq] - query_lens[seq]
        first_position, last_position = positions[0] + first_row - start, positions[0] + end_row - 1 - start
        block_q = lax.dynamic_slice_in_dim(q, start, block)
        new = _attend_query_block(block_q, seq, positions, first_position, last_position, cache, scorer)
        old = lax.dynamic_slice_in_dim(out, start, block)
        new = jnp.where(is_mine[:, None, None], new.astype(out.dtype), old)
        return lax.dynamic_update_slice_in_dim(out, new, start, axis=0)

    return lax.fori_loop(0, ends[-1], attend_item, out)


def _attend_query_block(q, seq, positions, first_position, last_position, cache, scorer):
    """Attend queries [B, H, D] of one sequence over the blocks of keys that they see; returns float32 [B, H, D]."""
    num_queries, num_q_heads, head_dim = q.shape
    num_kv_heads = cache.num_kv_heads
    rows_q = _group_heads(q, num_kv_heads).transpose(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)  # [KV, G * B, D]
    row_positions = jnp.tile(positions, num_q_heads // num_kv_heads)[:, None]
    first_key = scorer.first_key(first_position)

    def visit(i, state):
        largest, total, values = state
        first_of_block = first_key + i * _KEYS_PER_BLOCK
        k, v, key_positions = cache.read(seq[None], first_of_block[None], last_position[None], _KEYS_PER_BLOCK)
        mask = scorer.is_visible(row_positions, key_positions)[None]  # [1, G * B, L]
        scores = scorer.scores(_einsum("krd,kld->krl", rows_q, k[0], cache.compute_dtype), mask)
        new_largest = jnp.maximum(largest, scores.max(axis=-1, keepdims=True))
        # A row that has seen no key yet weighs them all 1; the factor of its first visible key, 0, wipes that out.
        weights, factor = jnp.exp(scores - new_largest), jnp.exp(largest - new_largest)
        values = values * factor + _einsum("krl,kld->krd", weights, v[0], cache.compute_dtype)
        return new_largest, total * factor + weights.sum(axis=-1, keepdims=True), values

    largest = jnp.full((*rows_q.shape[:2], 1), _HIDDEN, jnp.float32)
    state = largest, jnp.zeros_like(largest), jnp.zeros(rows_q.shape, jnp.float32)
    num_blocks = -(-(last_position + 1 - first_key) // _KEYS_PER_BLOCK)
    _, total, values = lax.fori_loop(0, num_blocks, visit, state)
    out = (values / total).reshape(num_kv_heads, -1, num_queries, head_dim)
    return out.transpose(2, 0, 1, 3).reshape(q.shape)
