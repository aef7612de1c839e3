"""Float64 numpy oracle of ragged paged attention, and the one helper that builds ragged batches.

Nothing here imports the library: layout and masks are written out again from their definitions, so that a mistake in
the library cannot cancel itself out in a test.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

# (query_len, seq_len) lists of facts about other kernels: prefill with context, decode, prefill from nothing, mixed.
B3 = ((192, 328), (128, 180), (64, 255))
_KV16 = (18, 129, 597, 122, 64, 322, 463, 181, 1107, 123, 31, 18, 1229, 229, 87, 1328)
KV16_DECODE = tuple((1, n) for n in _KV16)
KV16_PREFILL = tuple(zip((5, 15, 120, 100, 21, 32, 251, 40, 64, 99, 10, 5, 3, 120, 9, 2), _KV16, strict=True))
KV16_MIXED = tuple(zip((5, 1, 120, 1, 1, 32, 251, 1, 1, 99, 1, 5, 3, 117, 1, 1), _KV16, strict=True))

_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


@dataclasses.dataclass
class RaggedBatch:
    """One step's arrays, numpy, padded. T, S, P and U are the padded sizes; see `make_ragged_batch`.

    Fields:
        q, k, v: This step's queries, keys and values; padding rows hold the poison.
        kv_pages: The pool with every key and value of the live sequences, this step's included.
        kv_pages_before: The pool before the step: slots of this step's tokens still hold the poison.
        keys, values: float64[seq_len, KV, D] of each live sequence, as stored (rounded to the cache's dtype).
    """

    q: np.ndarray  # [T, H, D]
    k: np.ndarray  # [T, KV, D]
    v: np.ndarray  # [T, KV, D]
    kv_pages: np.ndarray  # [num_pages, page_size, 2 * KV, padded D]
    kv_pages_before: np.ndarray  # [num_pages, page_size, 2 * KV, padded D]
    seq_lens: np.ndarray  # i32[S]
    block_tables: np.ndarray  # i32[S, P]
    query_start_loc: np.ndarray  # i32[S + 1]
    num_seqs: np.ndarray  # i32[1]
    positions: np.ndarray  # i32[T]
    slot_mapping: np.ndarray  # i32[3, U]
    num_kv_update_slices: np.ndarray  # i32[1]
    keys: list[np.ndarray]
    values: list[np.ndarray]

    @property
    def args(self) -> tuple[np.ndarray, ...]:
        """The positional arguments of `ragged_paged_attention`."""
        return self.q, self.kv_pages, self.seq_lens, self.block_tables, self.query_start_loc, self.num_seqs

    @property
    def update_args(self) -> tuple[np.ndarray, ...]:
        """The positional arguments of `kv_cache_update`."""
        return self.kv_pages_before, self.k, self.v, self.slot_mapping, self.num_kv_update_slices

    @property
    def num_tokens(self) -> int:
        """Live token rows."""
        return int(self.query_start_loc[self.num_seqs[0]])


def make_ragged_batch(
    lengths: Sequence[tuple[int, int]],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    dtype: Any = np.float32,
    kv_dtype: Any = None,
    padded_head_dim: int | None = None,
    num_padding_tokens: int = 3,
    num_padding_seqs: int = 2,
    num_padding_pages: int = 2,
    num_dead_pages: int = 5,
    shared_prefix_len: int = 0,
    sharpness: float = 1.0,
    poison: float = np.nan,
    seed: int = 0,
) -> RaggedBatch:
    """Build a ragged batch with permuted pages and poison in every dead slot.

    Args:
        lengths: (query_len, seq_len) of each live sequence; seq_len counts the queries.
        num_q_heads: H.
        num_kv_heads: KV.
        head_dim: D.
        page_size: Tokens in a page.
        dtype: Of q, k and v.
        kv_dtype: Of the pages; None means `dtype`.
        padded_head_dim: Of the pages; None means `head_dim`. The padding lanes of live tokens hold zeros.
        num_padding_tokens: Rows of q, k and v after the last query.
        num_padding_seqs: Rows of the tables after the last sequence; their entries are arbitrary but in range.
        num_padding_pages: Table entries beyond what the longest sequence needs.
        num_dead_pages: Pages that no live sequence owns.
        shared_prefix_len: Tokens that all sequences have in common, on shared pages (whole pages of it, and only as far
            as no sequence writes there in this step).
        sharpness: Standard deviation of q; large values make the softmax pick few keys.
        poison: What dead pages, page tails, padding rows and padding lanes of dead slots hold.
        seed: Of the random numbers.
    """
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    kv_dtype = np.dtype(kv_dtype if kv_dtype is not None else dtype)
    num_seqs, num_tokens = len(lengths), sum(query_len for query_len, _ in lengths)
    max_tokens, max_seqs = num_tokens + num_padding_tokens, num_seqs + num_padding_seqs
    shared_pages = min([shared_prefix_len, *(n - q for q, n in lengths)]) // page_size
    tables, num_pages = _permuted_tables(lengths, page_size, shared_pages, num_dead_pages, rng)
    pages_per_seq = max(len(table) for table in tables) + num_padding_pages

    keys, values = _keys_and_values(lengths, num_kv_heads, head_dim, kv_dtype, shared_pages * page_size, rng)
    q = np.full((max_tokens, num_q_heads, head_dim), poison, dtype)
    q[:num_tokens] = (rng.standard_normal((num_tokens, num_q_heads, head_dim)) * sharpness).astype(dtype)
    k = np.full((max_tokens, num_kv_heads, head_dim), poison, dtype)
    v = k.copy()
    query_start_loc = np.full(max_seqs + 1, num_tokens, np.int32)
    query_start_loc[: num_seqs + 1] = np.cumsum([0, *(query_len for query_len, _ in lengths)])
    seq_lens = rng.integers(0, pages_per_seq * page_size + 1, max_seqs).astype(np.int32)
    seq_lens[:num_seqs] = [seq_len for _, seq_len in lengths]
    # Dead table entries point anywhere in range, at poisoned pages or at other sequences' pages.
    block_tables = rng.integers(0, num_pages, (max_seqs, pages_per_seq)).astype(np.int32)
    positions = np.zeros(max_tokens, np.int32)
    padded_head_dim = padded_head_dim or head_dim
    kv_pages = np.full((num_pages, page_size, 2 * num_kv_heads, padded_head_dim), poison, kv_dtype)
    kv_pages_before = kv_pages.copy()
    slices = []
    for i, ((query_len, seq_len), table) in enumerate(zip(lengths, tables, strict=True)):
        block_tables[i, : len(table)] = table
        first, context_len = query_start_loc[i], seq_len - query_len
        rows = slice(first, first + query_len)
        k[rows], v[rows] = keys[i][context_len:].astype(dtype), values[i][context_len:].astype(dtype)
        positions[rows] = np.arange(context_len, seq_len)
        for position in range(seq_len):
            page, offset = table[position // page_size], position % page_size
            for pages in (kv_pages, kv_pages_before) if position < context_len else (kv_pages,):
                pages[page, offset] = 0
                pages[page, offset, 0::2, :head_dim] = keys[i][position]
                pages[page, offset, 1::2, :head_dim] = values[i][position]
        slices += _update_slices(table, context_len, seq_len, int(first), page_size)
    return RaggedBatch(
        q=q, k=k, v=v, kv_pages=kv_pages, kv_pages_before=kv_pages_before,
        seq_lens=seq_lens, block_tables=block_tables, query_start_loc=query_start_loc,
        num_seqs=np.array([num_seqs], np.int32), positions=positions,
        slot_mapping=_padded_slot_mapping(slices, rng), num_kv_update_slices=np.array([len(slices)], np.int32),
        keys=keys, values=values,
    )  # fmt: skip


def ragged_paged_attention_oracle(
    q,
    kv_pages,
    seq_lens,
    block_tables,
    query_start_loc,
    num_seqs,
    *,
    sm_scale=1.0,
    sliding_window=None,
    soft_cap=None,
    sinks=None,
    alibi_slopes=None,
    attention_chunk_size=None,
    causal=True,
    page_mask=None,
    draft_mask=None,
    k_scale=1.0,
    v_scale=1.0,
    kv_scales=None,
    return_lse=False,
):
    """Return float64[T, H, D] from the definition, one kv head of one token at a time; padding rows are zeros.

    Reads exactly the keys that a query sees, so that poison anywhere else cannot reach the answer. With return_lse
    also float64[T, H].
    """
    num_tokens, num_q_heads, head_dim = q.shape
    page_size, num_kv_heads = kv_pages.shape[1], kv_pages.shape[2] // 2
    queries_per_kv = num_q_heads // num_kv_heads
    k_scale, v_scale = (np.broadcast_to(np.float64(scale), num_kv_heads) for scale in (k_scale, v_scale))
    out = np.zeros((num_tokens, num_q_heads, head_dim), np.float64)
    lse = np.full((num_tokens, num_q_heads), -np.inf)
    for i in range(int(num_seqs[0])):
        first, end = int(query_start_loc[i]), int(query_start_loc[i + 1])
        seq_len = int(seq_lens[i])
        keys = np.arange(seq_len)
        for row in range(first, end):
            position = seq_len - (end - row)
            sees = keys <= position if causal else np.full(seq_len, True)
            if sliding_window is not None:
                sees &= abs(position - keys) < sliding_window
            if attention_chunk_size is not None:
                sees &= keys // attention_chunk_size == position // attention_chunk_size
            if page_mask is not None:
                sees &= page_mask[i, keys // page_size]
            if draft_mask is not None:
                context_len = seq_len - (end - first)
                sees[context_len:] &= _bits(draft_mask[row], seq_len - context_len)
            seen = keys[sees]
            slots = block_tables[i, seen // page_size], seen % page_size
            kv = kv_pages[(*slots, slice(None), slice(head_dim))].astype(np.float64)
            if kv_scales is not None:
                kv = kv * kv_scales[slots].astype(np.float64)
            for kv_head in range(num_kv_heads):
                heads = slice(kv_head * queries_per_kv, (kv_head + 1) * queries_per_kv)
                scores = q[row, heads].astype(np.float64) @ kv[:, 2 * kv_head].T * k_scale[kv_head] * sm_scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                if alibi_slopes is not None:
                    scores = scores - alibi_slopes[heads, None] * np.abs(position - seen)
                values = kv[:, 2 * kv_head + 1] * v_scale[kv_head]
                if sinks is not None:
                    scores = np.append(scores, sinks[heads, None], axis=1)
                    values = np.append(values, np.zeros((1, head_dim)), axis=0)
                if len(values):
                    largest = scores.max(axis=1, keepdims=True)
                    weights = np.exp(scores - largest)
                    total = weights.sum(axis=1, keepdims=True)
                    out[row, heads] = weights / total @ values
                    lse[row, heads] = (largest + np.log(total))[:, 0]
    return (out, lse) if return_lse else out


def _bits(words, count):
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")
    return np.append(bits, np.zeros(count, np.uint8))[:count].astype(bool)


def tolerance(dtype: Any) -> float:
    """Return the relative tolerance of a result whose inputs have this dtype."""
    return _TOLERANCE[np.dtype(dtype).name]


def assert_close(actual: Any, expected: np.ndarray, dtype: Any, message: str = "", slack: float = 1.0) -> None:
    """Compare with the oracle's values of order 1; NaN never passes. `slack` widens the dtype's tolerance."""
    actual, limit = np.asarray(actual).astype(np.float64), tolerance(dtype) * slack
    np.testing.assert_allclose(actual, expected, rtol=limit, atol=limit, err_msg=message)


def _permuted_tables(lengths, page_size, shared_pages, num_dead_pages, rng):
    needed = [-(-seq_len // page_size) for _, seq_len in lengths]
    num_pages = shared_pages + sum(n - shared_pages for n in needed) + num_dead_pages
    ids = list(rng.permutation(num_pages))
    shared = [ids.pop() for _ in range(shared_pages)]
    return [np.array(shared + [ids.pop() for _ in range(n - shared_pages)], np.int32) for n in needed], num_pages


def _keys_and_values(lengths, num_kv_heads, head_dim, kv_dtype, shared_len, rng):
    def normal(num):
        return rng.standard_normal((num, num_kv_heads, head_dim)).astype(kv_dtype).astype(np.float64)

    shared = normal(shared_len), normal(shared_len)
    own = [[np.concatenate([common, normal(n - shared_len)]) for common in shared] for _, n in lengths]
    return [pair[0] for pair in own], [pair[1] for pair in own]


def _update_slices(table, context_len, seq_len, first_row, page_size):
    position = context_len
    while position < seq_len:
        length = min(page_size - position % page_size, seq_len - position)
        slot = table[position // page_size] * page_size + position % page_size
        yield slot, first_row + position - context_len, length
        position += length


def _padded_slot_mapping(slices, rng):
    """Columns in random order; the padding columns would destroy live slots if they were ever written."""
    live = np.array(slices, np.int32).reshape(-1, 3)
    rng.shuffle(live)
    padding = live[rng.integers(0, len(live), 3)] if len(live) else np.zeros((3, 3), np.int32)
    padding[:, 1] = 0
    return np.ascontiguousarray(np.concatenate([live, padding]).T)


BF16 = np.dtype(ml_dtypes.bfloat16)
