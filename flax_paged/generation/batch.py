"""From a schedule to padded arrays: shape buckets, and the `Batch` that a compiled step takes. Host side, numpy."""

import dataclasses
from collections.abc import Sequence as Sequences
from typing import Any

import jax
import numpy as np

from flax_paged.generation.sampling import SamplingInputs
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
    """

    num_tokens: int
    num_seqs: int
    max_pages_per_seq: int
    is_decode: bool


class Buckets:
    """The step shapes of an engine: powers of two up to its limits, the largest being the limits themselves.

    A step in which every sequence has one token uses a decode bucket, T = S. Any other uses a mixed bucket: T tokens,
    as many sequences as the engine allows (at most T), and block tables of full width.

    Args:
        max_num_seqs: Most sequences in a step.
        max_num_batched_tokens: Most tokens in a step.
        max_pages_per_seq: Pages of the longest sequence.
        page_size: Tokens in a page.
    """

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int, max_pages_per_seq: int, page_size: int):
        self.num_seqs = _powers_of_two(1, max_num_seqs)
        self.num_tokens = _powers_of_two(min(_MIN_TOKENS, max_num_batched_tokens), max_num_batched_tokens)
        min_pages = min(-(-_MIN_CONTEXT // page_size), max_pages_per_seq)
        self.max_pages_per_seq = _powers_of_two(min_pages, max_pages_per_seq)

    def all(self) -> list[Bucket]:
        """Every bucket, the smallest first."""
        max_seqs, max_pages = self.num_seqs[-1], self.max_pages_per_seq[-1]
        decode = [Bucket(s, s, p, True) for s in self.num_seqs for p in self.max_pages_per_seq]
        return decode + [Bucket(t, min(t, max_seqs), max_pages, False) for t in self.num_tokens]

    def choose(self, schedule: Schedule) -> Bucket:
        """Return the smallest bucket that holds a schedule."""
        num_tokens, num_seqs = schedule.num_tokens, len(schedule.items)
        if num_tokens > num_seqs:
            tokens = _smallest_fitting(self.num_tokens, num_tokens)
            return Bucket(tokens, min(tokens, self.num_seqs[-1]), self.max_pages_per_seq[-1], False)
        seqs = _smallest_fitting(self.num_seqs, num_seqs)
        pages = max(len(item.sequence.pages) for item in schedule.items)
        return Bucket(seqs, seqs, _smallest_fitting(self.max_pages_per_seq, pages), True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """The arrays of one step.

    Fields:
        tokens: i32[T]. Token ids; 0 where the id is not known on the host.
        is_pending: bool[T]. Rows whose id was sampled by the previous step and is taken from its result.
        previous_rows: i32[T]. Row of the previous step's result, where `is_pending`.
        metadata: The ragged batch.
        sampling: Parameters of the N = S rows to sample.
    """

    tokens: Any  # i32[T]
    is_pending: Any  # bool[T]
    previous_rows: Any  # i32[T]
    metadata: PagedMetadata
    sampling: SamplingInputs


def build_batch(items: Sequences[ScheduledSequence], bucket: Bucket, *, page_size: int, num_pages: int) -> Batch:
    """Lay a schedule out in a bucket.

    Args:
        items: The scheduled sequences, in row order. Called after `Scheduler.schedule`, so a sequence that samples
            counts the token it samples as pending already.
        bucket: The shape.
        page_size: Tokens in a page.
        num_pages: Pages in the pool.

    Returns:
        A Batch of numpy arrays.
    """
    tokens = np.zeros(bucket.num_tokens, np.int32)
    is_pending = np.zeros(bucket.num_tokens, bool)
    previous_rows = np.zeros(bucket.num_tokens, np.int32)
    slices = []
    row = 0
    for item in items:
        known = item.sequence.token_ids[item.context_len : item.context_len + item.num_new_tokens]
        tokens[row : row + len(known)] = known
        if len(known) < item.num_new_tokens:
            is_pending[row + len(known)] = True
            previous_rows[row + len(known)] = item.previous_row
        slices.append(SequenceSlice(item.sequence.pages, item.context_len, item.num_new_tokens))
        row += item.num_new_tokens
    metadata = build_metadata(
        slices,
        page_size=page_size,
        num_pages=num_pages,
        max_num_tokens=bucket.num_tokens,
        max_num_seqs=bucket.num_seqs,
        max_pages_per_seq=bucket.max_pages_per_seq,
        max_query_len=1 if bucket.is_decode else None,
    )
    return Batch(tokens, is_pending, previous_rows, metadata, _sampling_inputs(items, bucket.num_seqs))


def _sampling_inputs(items: Sequences[ScheduledSequence], num_rows: int) -> SamplingInputs:
    inputs = SamplingInputs(
        temperature=np.zeros(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.ones(num_rows, np.float32),
        min_p=np.zeros(num_rows, np.float32),
        seeds=np.zeros((num_rows, 2), np.uint32),
        counters=np.zeros(num_rows, np.uint32),
    )
    for row, item in enumerate(items):
        sequence, params = item.sequence, item.sequence.params
        if not item.samples or params.is_greedy:
            continue
        inputs.temperature[row] = params.temperature
        inputs.top_k[row] = max(params.top_k, 0)
        inputs.top_p[row] = params.top_p
        inputs.min_p[row] = params.min_p
        inputs.seeds[row] = sequence.seed >> 32, sequence.seed & 0xFFFFFFFF
        inputs.counters[row] = item.context_len + item.num_new_tokens - sequence.prompt_len
    return inputs


def _powers_of_two(low: int, high: int) -> list[int]:
    sizes = [low]
    while sizes[-1] < high:
        sizes.append(min(1 << sizes[-1].bit_length(), high))
    return sizes


def _smallest_fitting(sizes: list[int], needed: int) -> int:
    return next(size for size in sizes if size >= needed)
