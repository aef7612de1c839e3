"""From a schedule to padded arrays: shape buckets, and the `Batch` that a compiled step takes. Host side, numpy."""

import dataclasses
from collections.abc import Sequence as Sequences
from typing import Any

import jax
import numpy as np

from flax_paged.generation.sampling_inputs import SamplingInputs, SamplingRow, build_sampling_inputs
from flax_paged.generation.scheduler import Schedule, ScheduledSequence
from flax_paged.metadata import PagedMetadata, SequenceSlice, build_metadata

# The smallest buckets. Smaller ones would save little and cost a compilation each.
_MIN_TOKENS = 16
_MIN_CONTEXT = 256  # tokens that the narrowest block table spans


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The padded shape of a step; each is compiled once.

    Fields:
        num_tokens: T.
        num_seqs: S.
        max_pages_per_seq: P.
        is_decode: Whether every sequence has one token, so that T = S.
        has_all_logits: Whether every token row gets logits, N = T, and not only each sequence's last, N = S.
    """

    num_tokens: int
    num_seqs: int
    max_pages_per_seq: int
    is_decode: bool
    has_all_logits: bool = False

    @property
    def num_rows(self) -> int:
        """N, the rows that get logits and are sampled."""
        return self.num_tokens if self.has_all_logits else self.num_seqs


class Buckets:
    """The step shapes of an engine: powers of two up to its limits, the largest being the limits themselves.

    A step in which every sequence has one token uses a decode bucket, T = S. Any other uses a mixed bucket: T tokens,
    as many sequences as the engine allows (at most T), and block tables of full width. Steps that verify drafts or
    report on prompt tokens use mixed buckets with logits for every token.

    Args:
        max_num_seqs: Most sequences in a step.
        max_num_batched_tokens: Most tokens in a step.
        max_pages_per_seq: Pages of the longest sequence.
        page_size: Tokens in a page.
        has_all_logits: Whether there are buckets with logits for every token.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_pages_per_seq: int,
        page_size: int,
        has_all_logits: bool = True,
    ):
        self.num_seqs = _powers_of_two(1, max_num_seqs)
        self.num_tokens = _powers_of_two(min(_MIN_TOKENS, max_num_batched_tokens), max_num_batched_tokens)
        min_pages = min(-(-_MIN_CONTEXT // page_size), max_pages_per_seq)
        self.max_pages_per_seq = _powers_of_two(min_pages, max_pages_per_seq)
        self.has_all_logits = has_all_logits

    def all(self) -> list[Bucket]:
        """Every bucket, the smallest first."""
        decode = [Bucket(s, s, p, True) for s in self.num_seqs for p in self.max_pages_per_seq]
        kinds = [False, True] if self.has_all_logits else [False]
        return decode + [self._mixed(t, has_all_logits) for has_all_logits in kinds for t in self.num_tokens]

    def choose(self, schedule: Schedule) -> Bucket:
        """Return the smallest bucket that holds a schedule."""
        num_tokens, num_seqs = schedule.num_tokens, len(schedule.items)
        has_all_logits = any(item.draft_token_ids or item.reports_prompt for item in schedule.items)
        if num_tokens > num_seqs or has_all_logits:
            return self._mixed(_smallest_fitting(self.num_tokens, num_tokens), has_all_logits)
        seqs = _smallest_fitting(self.num_seqs, num_seqs)
        pages = max(len(item.sequence.pages) for item in schedule.items)
        return Bucket(seqs, seqs, _smallest_fitting(self.max_pages_per_seq, pages), True)

    def _mixed(self, num_tokens: int, has_all_logits: bool) -> Bucket:
        max_seqs, max_pages = self.num_seqs[-1], self.max_pages_per_seq[-1]
        return Bucket(num_tokens, min(num_tokens, max_seqs), max_pages, False, has_all_logits)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """The arrays of one step.

    Fields:
        tokens: i32[T]. Token ids; 0 where the id is not known on the host.
        is_pending: bool[T]. Rows whose id was sampled by the previous step and is taken from its result.
        previous_rows: i32[T]. Row of the previous step's result, where `is_pending`.
        metadata: The ragged batch.
        sampling: Parameters of the N rows to sample.
        adapter_ids: i32[T]. Each token's adapter, 0 for none; None for a model without several.
    """

    tokens: Any  # i32[T]
    is_pending: Any  # bool[T]
    previous_rows: Any  # i32[T]
    metadata: PagedMetadata
    sampling: SamplingInputs
    adapter_ids: Any = None  # i32[T]


@dataclasses.dataclass(frozen=True)
class BatchLimits:
    """Sizes that are the same for every step of an engine.

    Fields:
        page_size: Tokens in a page.
        num_pages: Pages in the pool.
        max_model_len: Tokens of the longest sequence.
        max_logit_entries: Most tokens of a sequence whose logits are changed one by one.
        has_adapters: Whether each token has an adapter id.
        vocab_size: V.
    """

    page_size: int
    num_pages: int
    max_model_len: int
    max_logit_entries: int
    has_adapters: bool = False
    vocab_size: int = 0


def build_batch(items: Sequences[ScheduledSequence], bucket: Bucket, limits: BatchLimits) -> Batch:
    """Lay a schedule out in a bucket.

    Args:
        items: The scheduled sequences, in row order.
        bucket: The shape.
        limits: The engine's sizes.

    Returns:
        A Batch of numpy arrays.
    """
    tokens = np.zeros(bucket.num_tokens, np.int32)
    is_pending = np.zeros(bucket.num_tokens, bool)
    previous_rows = np.zeros(bucket.num_tokens, np.int32)
    adapter_ids = np.zeros(bucket.num_tokens, np.int32) if limits.has_adapters else None
    slices = []
    row = 0
    for item in items:
        sequence, end = item.sequence, item.context_len + item.num_new_tokens
        known = [*sequence.token_ids[item.context_len : end], *item.draft_token_ids]
        tokens[row : row + len(known)] = known
        if len(known) < item.num_new_tokens:
            is_pending[row + len(known)] = True
            previous_rows[row + len(known)] = item.previous_row
        if adapter_ids is not None:
            adapter_ids[row : row + item.num_new_tokens] = sequence.params.adapter_id
        slices.append(SequenceSlice(sequence.pages, item.context_len, item.num_new_tokens))
        row += item.num_new_tokens
    metadata = build_metadata(
        slices,
        page_size=limits.page_size,
        num_pages=limits.num_pages,
        max_num_tokens=bucket.num_tokens,
        max_num_seqs=bucket.num_seqs,
        max_pages_per_seq=bucket.max_pages_per_seq,
        logits="all" if bucket.has_all_logits else "last",
        max_query_len=1 if bucket.is_decode else None,
    )
    sampling = build_sampling_inputs(
        _sampling_rows(items, bucket),
        bucket.num_rows,
        max_history=limits.max_model_len,
        max_entries=limits.max_logit_entries,
        vocab_size=limits.vocab_size,
    )
    return Batch(tokens, is_pending, previous_rows, metadata, sampling, adapter_ids)


def first_sampled_rows(items: Sequences[ScheduledSequence], bucket: Bucket) -> list[int]:
    """Return the row of each item's first sampled token; those that verify its drafts follow."""
    if not bucket.has_all_logits:
        return list(range(len(items)))
    ends = np.cumsum([item.num_new_tokens for item in items])
    return [int(end) - 1 - len(item.draft_token_ids) for item, end in zip(items, ends, strict=True)]


def _sampling_rows(items: Sequences[ScheduledSequence], bucket: Bucket) -> list[SamplingRow]:
    rows = []
    for item, first in zip(items, first_sampled_rows(items, bucket), strict=True):
        sequence, drafts = item.sequence, item.draft_token_ids
        end = item.context_len + item.num_new_tokens
        if item.samples:
            num_tokens = end - len(drafts)
            rows += [SamplingRow(first + i, sequence, num_tokens + i, drafts) for i in range(len(drafts) + 1)]
        if item.reports_prompt:
            row = first + 1 - item.num_new_tokens
            for position in range(item.context_len + 1, min(end + 1, sequence.prompt_len)):
                rows.append(SamplingRow(row, sequence, position, target_id=sequence.token_ids[position]))
                row += 1
    return rows


def _powers_of_two(low: int, high: int) -> list[int]:
    sizes = [low]
    while sizes[-1] < high:
        sizes.append(min(1 << sizes[-1].bit_length(), high))
    return sizes


def _smallest_fitting(sizes: list[int], needed: int) -> int:
    return next(size for size in sizes if size >= needed)
