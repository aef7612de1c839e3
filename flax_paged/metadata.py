"""`PagedMetadata`, the pytree that tells a model which tokens belong to which sequence and page, and its builder."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

# i32 array on the host (numpy, as built) or on a device (inside the step).
Array = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedMetadata:
    """One step's ragged batch, padded to a bucket's shape.

    T, S, P and U are the padded numbers of tokens, sequences, pages per sequence and cache-update slices. The live
    counts (`num_seqs`, `num_kv_update_slices`, `query_start_loc[num_seqs]`) decide what is read; padding holds values
    that are in range.

    Fields:
        positions: i32[T]. Absolute position of each token in its sequence, from 0.
        slot_mapping: i32[3, U]. Columns are (first slot in the flattened cache, first new token, length); a slice never
            crosses a page.
        num_kv_update_slices: i32[1]. Live columns of `slot_mapping`.
        block_tables: i32[S, P]. Page ids of each sequence in order.
        seq_lens: i32[S]. Keys visible to the sequence's last query: its context plus this step's tokens.
        query_start_loc: i32[S + 1]. Cumulative query lengths; sequence i owns token rows [i, i + 1).
        num_seqs: i32[1]. Live rows of `seq_lens` and `block_tables`.
        logits_indices: i32[N] or None. Token rows whose logits are wanted; None means each sequence's last token.
        num_shared_pages: i32[1] or None. Full pages of context that every live sequence begins with, which a layer then
            reads once for all of them (cascade attention); None for a step that does not ask for it.
        max_query_len: Static. An upper bound on this step's tokens per sequence, or None; 1 selects the decode path.
        num_slices_per_kv_cache_update_block: Static. Slices that the TPU cache-update kernel keeps in flight; None lets
            the attention kernel write them.
    """

    positions: Array  # i32[T]
    slot_mapping: Array  # i32[3, U]
    num_kv_update_slices: Array  # i32[1]
    block_tables: Array  # i32[S, P]
    seq_lens: Array  # i32[S]
    query_start_loc: Array  # i32[S + 1]
    num_seqs: Array  # i32[1]
    logits_indices: Array | None = None  # i32[N]
    num_shared_pages: Array | None = None  # i32[1]
    max_query_len: int | None = dataclasses.field(default=None, metadata={"static": True})
    num_slices_per_kv_cache_update_block: int | None = dataclasses.field(default=None, metadata={"static": True})

    def logits_rows(self) -> jax.Array:
        """Token rows whose logits the model returns: `logits_indices`, or each sequence's last row. i32[N]."""
        if self.logits_indices is not None:
            return self.logits_indices
        # A padding sequence has no rows; row 0 keeps its index in range.
        return jax.numpy.maximum(self.query_start_loc[1:] - 1, 0)


class SequenceSlice(NamedTuple):
    """One sequence's share of a step.

    Args:
        pages: Page ids of the sequence in order; at least enough for `context_len + num_new_tokens` tokens.
        context_len: Tokens already in the cache before this step.
        num_new_tokens: Tokens of this step, at least 1.
    """

    pages: Sequence[int]
    context_len: int
    num_new_tokens: int


def slot_mapping_width(max_num_tokens: int, max_num_seqs: int, page_size: int) -> int:
    """Number of columns U that hold the cache-update slices of any batch within a bucket.

    A run of n tokens touches at most `n // page_size + 2` pages, and no more than n.
    """
    return min(max_num_tokens, 2 * max_num_seqs + max_num_tokens // page_size)


def build_metadata(
    sequences: Sequence[SequenceSlice],
    *,
    page_size: int,
    num_pages: int,
    max_num_tokens: int,
    max_num_seqs: int,
    max_pages_per_seq: int,
    logits: Literal["last", "all"] = "last",
    max_query_len: int | None = None,
    cascade: bool = False,
) -> PagedMetadata:
    """Build one step's metadata on the host and pad it to a bucket.

    Tokens of the sequences are expected one after another, in the order of `sequences`.

    Args:
        sequences: Each live sequence's pages, context length and number of new tokens.
        page_size: Tokens in a page.
        num_pages: Pages in the pool; page ids are below it.
        max_num_tokens: T, padded number of tokens.
        max_num_seqs: S, padded number of sequences.
        max_pages_per_seq: P, padded number of pages of a sequence.
        logits: "last" for the last token of each sequence, "all" for every token (logits_indices of shape [T]).
        max_query_len: Static bound passed on to the kernels; must cover every sequence.
        cascade: Have layers read the pages that all sequences begin with once for all of them. How many there are does
            not change the compiled step. Worth it for many sequences with a long prefix in common.

    Returns:
        PagedMetadata of numpy int32 arrays.

    Raises:
        ValueError: The batch does not fit the bucket, a page id is out of range, a sequence has too few pages or no new
            tokens, or a page is written by two sequences.
    """
    num_seqs = len(sequences)
    num_tokens = sum(sequence.num_new_tokens for sequence in sequences)
    if num_seqs > max_num_seqs:
        raise ValueError(f"{num_seqs} sequences do not fit max_num_seqs={max_num_seqs}; use a larger bucket.")
    if num_tokens > max_num_tokens:
        raise ValueError(f"{num_tokens} new tokens do not fit max_num_tokens={max_num_tokens}; use a larger bucket.")
    if logits not in ("last", "all"):
        raise ValueError(f"logits={logits!r}: expected 'last' or 'all'.")

    positions = np.zeros(max_num_tokens, np.int32)
    block_tables = np.zeros((max_num_seqs, max_pages_per_seq), np.int32)
    seq_lens = np.zeros(max_num_seqs, np.int32)
    query_start_loc = np.full(max_num_seqs + 1, num_tokens, np.int32)
    slices: list[tuple[int, int, int]] = []
    written_pages: set[int] = set()
    row = 0
    for i, sequence in enumerate(sequences):
        pages, context_len, num_new_tokens = sequence
        _check_sequence(i, sequence, page_size, num_pages, max_pages_per_seq, max_query_len)
        query_start_loc[i] = row
        seq_lens[i] = context_len + num_new_tokens
        block_tables[i, : len(pages)] = pages
        positions[row : row + num_new_tokens] = np.arange(context_len, context_len + num_new_tokens)
        for slice_ in _update_slices(pages, context_len, num_new_tokens, row, page_size):
            page = slice_[0] // page_size
            if page in written_pages:
                raise ValueError(f"sequences[{i}] writes page {page}, which another slice of this step writes too.")
            written_pages.add(page)
            slices.append(slice_)
        row += num_new_tokens

    slot_mapping = np.zeros((3, slot_mapping_width(max_num_tokens, max_num_seqs, page_size)), np.int32)
    if slices:
        slot_mapping[:, : len(slices)] = np.asarray(slices, np.int32).T
    return PagedMetadata(
        positions=positions,
        slot_mapping=slot_mapping,
        num_kv_update_slices=np.array([len(slices)], np.int32),
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        num_seqs=np.array([num_seqs], np.int32),
        logits_indices=np.arange(max_num_tokens, dtype=np.int32) if logits == "all" else None,
        num_shared_pages=np.array([_num_shared_pages(sequences, page_size)], np.int32) if cascade else None,
        max_query_len=max_query_len,
    )


class CrossSlice(NamedTuple):
    """One sequence's share of a step of cross attention.

    Args:
        pages: Page ids of the other sequence, whose keys are attended to, in order.
        num_keys: Tokens of the other sequence; all are seen.
        num_queries: Tokens of this sequence in this step.
        writes_keys: Whether the other sequence's keys and values come with this step, to be written.
    """

    pages: Sequence[int]
    num_keys: int
    num_queries: int
    writes_keys: bool = False


def build_cross_metadata(
    sequences: Sequence[CrossSlice],
    *,
    page_size: int,
    num_pages: int,
    max_num_tokens: int,
    max_num_keys: int,
    max_num_seqs: int,
    max_pages_per_seq: int,
) -> PagedMetadata:
    """Build one step's metadata of cross attention: of a `PagedAttention` of type "encoder_decoder".

    Queries are expected one sequence after another, and so are the new keys and values of those that write.

    Args:
        sequences: Each live sequence's pages of the other sequence, and counts.
        page_size: Tokens in a page.
        num_pages: Pages in the pool; page ids are below it.
        max_num_tokens: T, padded number of queries.
        max_num_keys: Padded number of new keys; 0 where no sequence writes.
        max_num_seqs: S, padded number of sequences.
        max_pages_per_seq: P, padded number of pages of a sequence.

    Returns:
        PagedMetadata of numpy int32 arrays. `positions` are zeros: there is no distance between the two sequences.

    Raises:
        ValueError: The batch does not fit the bucket, a page id is out of range, a sequence has too few pages, or two
            sequences write a page.
    """
    written = [s for s in sequences if s.writes_keys]
    counts = {
        "max_num_seqs": (len(sequences), max_num_seqs),
        "max_num_tokens": (sum(s.num_queries for s in sequences), max_num_tokens),
        "max_num_keys": (sum(s.num_keys for s in written), max_num_keys),
    }
    for name, (count, largest) in counts.items():
        if count > largest:
            raise ValueError(f"{count} do not fit {name}={largest}; use a larger bucket.")
    for i, s in enumerate(sequences):
        if s.num_queries < 0:
            raise ValueError(f"sequences[{i}].num_queries={s.num_queries}: expected 0 or more.")
    # The keys are a ragged batch of their own, written from nothing: the plain builder checks and slices it.
    keys = build_metadata(
        [SequenceSlice(s.pages, 0, s.num_keys) for s in sequences],
        page_size=page_size,
        num_pages=num_pages,
        max_num_tokens=max(sum(s.num_keys for s in sequences), 1),
        max_num_seqs=max_num_seqs,
        max_pages_per_seq=max_pages_per_seq,
    )
    slot_mapping = np.zeros((3, max(slot_mapping_width(max_num_keys, max_num_seqs, page_size), 1)), np.int32)
    slices, row = [], 0
    for s in written:
        slices += _update_slices(s.pages, 0, s.num_keys, row, page_size)
        row += s.num_keys
    if slices:
        slot_mapping[:, : len(slices)] = np.asarray(slices, np.int32).T
    query_start_loc = np.cumsum([0, *(s.num_queries for s in sequences)], dtype=np.int32)
    padding = np.full(max_num_seqs - len(sequences), query_start_loc[-1], np.int32)
    return dataclasses.replace(
        keys,
        positions=np.zeros(max_num_tokens, np.int32),
        slot_mapping=slot_mapping,
        num_kv_update_slices=np.array([len(slices)], np.int32),
        query_start_loc=np.concatenate([query_start_loc, padding]),
    )


def _check_sequence(
    i: int,
    sequence: SequenceSlice,
    page_size: int,
    num_pages: int,
    max_pages_per_seq: int,
    max_query_len: int | None,
) -> None:
    pages, context_len, num_new_tokens = sequence
    where = f"sequences[{i}]"
    if num_new_tokens < 1:
        raise ValueError(f"{where}.num_new_tokens={num_new_tokens}: expected at least 1; leave idle sequences out.")
    if context_len < 0:
        raise ValueError(
            f"{where}.context_len={context_len}: a query of {num_new_tokens} tokens is longer than its sequence of"
            f" {context_len + num_new_tokens}; expected a context of 0 or more."
        )
    if max_query_len is not None and num_new_tokens > max_query_len:
        raise ValueError(f"{where}.num_new_tokens={num_new_tokens} is more than max_query_len={max_query_len}.")
    if len(pages) > max_pages_per_seq:
        raise ValueError(f"{where} has {len(pages)} pages, more than max_pages_per_seq={max_pages_per_seq}.")
    num_needed = -(-(context_len + num_new_tokens) // page_size)
    if len(pages) < num_needed:
        raise ValueError(
            f"{where} has {len(pages)} pages of {page_size} tokens, but its {context_len} + {num_new_tokens} tokens"
            f" need {num_needed}."
        )
    lowest, highest = min(pages), max(pages)
    if lowest < 0 or highest >= num_pages:
        page = lowest if lowest < 0 else highest
        raise ValueError(f"{where}.pages holds page id {page}: expected 0 <= id < num_pages={num_pages}.")


def _num_shared_pages(sequences: Sequence[SequenceSlice], page_size: int) -> int:
    """Count the pages that all of several sequences begin with, none of this step's tokens in them."""
    if len(sequences) < 2:
        return 0
    num_full = min(sequence.context_len for sequence in sequences) // page_size
    columns = zip(*(sequence.pages[:num_full] for sequence in sequences), strict=True)
    return sum(1 for _ in itertools.takewhile(lambda pages: len(set(pages)) == 1, columns))


def _update_slices(pages: Sequence[int], context_len: int, num_new_tokens: int, row: int, page_size: int):
    """Yield (first slot, first new token, length) of each page that the new tokens touch."""
    position, end = context_len, context_len + num_new_tokens
    while position < end:
        page_index, offset = divmod(position, page_size)
        length = min(page_size - offset, end - position)
        yield int(pages[page_index]) * page_size + offset, row + position - context_len, length
        position += length
