"""`ModelRunner`: a module with its own cache, driven one compiled step at a time."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from flax_paged.attention import PagedAttention, cache_spec_for, drop_cache, init_cache
from flax_paged.cache import KVCache
from flax_paged.generation.batch import Batch, BatchLimits, Bucket, Buckets, build_batch, first_sampled_rows
from flax_paged.generation.outputs import Logprob, LogprobsOfToken
from flax_paged.generation.sampling import SampledTokens, sample
from flax_paged.generation.scheduler import Schedule, ScheduledSequence
from flax_paged.step import CompiledStep

# A pool whose size is not given may take this much memory.
_DEFAULT_POOL_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step brought for one sequence.

    Fields:
        item: The scheduled sequence.
        token_ids: The token sampled after its last known token, and after each of its drafts.
        first_row: Row of the first of them in `sampled`.
        sampled: All that came back, on the host, if any log-probabilities are wanted.
    """

    item: ScheduledSequence
    token_ids: list[int]
    first_row: int
    sampled: SampledTokens | None

    def logprobs(self, row: int, token_id: int, num_top: int) -> LogprobsOfToken:
        """Return the log-probability of a row's token and of the most likely ones, without their texts."""
        top = zip(self.sampled.top_ids[row, :num_top], self.sampled.top_logprobs[row, :num_top], strict=True)
        found = {token_id: Logprob(float(self.sampled.logprobs[row]), int(self.sampled.ranks[row]))}
        for rank, (top_id, logprob) in enumerate(top, 1):
            found.setdefault(int(top_id), Logprob(float(logprob), rank))
        return found


class LaunchedStep:
    """A step that the device has been given; reading its results waits for it.

    Args:
        items: The scheduled sequences.
        bucket: The step's shape.
        sampled: What the device returns.
    """

    def __init__(self, items: list[ScheduledSequence], bucket: Bucket, sampled: SampledTokens):
        self._items = items
        self._bucket = bucket
        self._sampled = sampled

    def results(self) -> Iterator[StepResult]:
        """Wait for the step and yield each sequence's result."""
        has_logprobs = any(
            item.reports_prompt or (item.samples and item.sequence.params.logprobs is not None) for item in self._items
        )
        token_ids = np.asarray(self._sampled.token_ids).tolist()
        host = jax.device_get(self._sampled) if has_logprobs else None
        for item, first in zip(self._items, first_sampled_rows(self._items, self._bucket), strict=True):
            yield StepResult(item, token_ids[first : first + 1 + len(item.draft_token_ids)], first, host)


class ModelRunner:
    """Runs schedules on a module, compiled once a bucket. Sampling is part of the step; only token ids come back.

    The module given is not changed: the runner makes its own over the same weight arrays, with its own cache.

    Args:
        model: An `nnx.Module` with `PagedAttention` layers, called as `model(tokens, metadata) -> logits`.
        num_pages: Pages in the pool; None for as many as every sequence needs at full length, within 1 GiB.
        page_size: Tokens in a page.
        max_num_seqs: Most sequences in a step.
        max_num_batched_tokens: Most tokens in a step.
        max_model_len: Tokens of the longest sequence.
        max_logprobs: Most likely tokens reported a row; 0 for no log-probabilities of the prompt either.
        max_logit_entries: Most tokens of a sequence whose logits are changed one by one.
        has_drafts: Whether steps may have drafts to verify.
        kv_cache_dtype: Dtype of the cache; None for that of the model.

    Raises:
        ValueError: The model has no `PagedAttention` layer, or does not return logits `[N, V]`.
    """

    def __init__(
        self,
        model: nnx.Module,
        *,
        num_pages: int | None,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_logprobs: int = 20,
        max_logit_entries: int = 512,
        has_drafts: bool = False,
        kv_cache_dtype: Any = None,
    ):
        max_pages_per_seq = -(-max_model_len // page_size)
        own = nnx.merge(*nnx.split(model))
        drop_cache(own)
        if num_pages is None:
            num_pages = _default_num_pages(own, page_size, max_num_seqs * max_pages_per_seq, kv_cache_dtype)
            num_pages = max(num_pages, max_pages_per_seq)
        self.num_pages = num_pages
        self.max_num_seqs = max_num_seqs
        self._limits = BatchLimits(page_size, num_pages, max_model_len, max_logit_entries)
        self.buckets = Buckets(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_pages_per_seq=min(max_pages_per_seq, num_pages),
            page_size=page_size,
            has_all_logits=has_drafts or max_logprobs > 0,
        )
        init_cache(own, cache_spec_for(own, num_pages=num_pages, page_size=page_size, dtype=kv_cache_dtype))
        self.vocab_size = _vocab_size(own, self._batch([], self.buckets.all()[0]))
        self.max_logprobs = min(max_logprobs, self.vocab_size)
        step = functools.partial(_sample_next, max_logprobs=self.max_logprobs)
        self._step = CompiledStep(own, step, name="engine_step")
        self._copy_pages = self._step.with_function(_copy_pages, name="copy_pages")
        self._last_token_ids = jnp.zeros(max_num_seqs, jnp.int32)

    @property
    def num_traces(self) -> int:
        """How many step shapes have been traced."""
        return self._step.num_traces + self._copy_pages.num_traces

    def launch(self, schedule: Schedule) -> LaunchedStep:
        """Give the device a step, without waiting for it. Pending tokens are those of the launch before this one."""
        copies = [copy for item in schedule.items for copy in item.page_copies]
        if copies:
            self._copy(copies)
        bucket = self.buckets.choose(schedule)
        sampled, self._last_token_ids = self._step(self._batch(schedule.items, bucket), self._last_token_ids)
        return LaunchedStep(schedule.items, bucket, sampled)

    def warmup(self, *, progress: bool = True) -> None:
        """Compile everything that a later step could need, on batches without sequences.

        Args:
            progress: Show a progress bar on stderr, if that is a terminal.
        """
        self._copy([(0, 0)])
        quiet = None if progress else True  # None: quiet where stderr is not a terminal
        for bucket in tqdm(self.buckets.all(), desc="Compiling", unit="shape", disable=quiet):
            jax.block_until_ready(self._step(self._batch([], bucket), self._last_token_ids))

    def update_weights(self, weights: nnx.Module | nnx.State) -> None:
        """Take new weights without compiling again; what the cache holds came from the old ones."""
        self._step.update_weights(weights)

    def reset(self) -> None:
        """Start from an empty cache, after a step that failed."""
        self._step.reset_cache()
        self._last_token_ids = jnp.zeros(self.max_num_seqs, jnp.int32)

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        # Padded by repeating the last copy, to the most a step can need: one compilation.
        padded = np.asarray(copies + copies[-1:] * (self.max_num_seqs - len(copies)), np.int32)
        self._copy_pages(padded[:, 0], padded[:, 1])

    def _batch(self, items: list[ScheduledSequence], bucket: Bucket) -> Batch:
        return build_batch(items, bucket, self._limits)


def _sample_next(
    model: nnx.Module, batch: Batch, previous: jax.Array, *, max_logprobs: int
) -> tuple[SampledTokens, jax.Array]:
    """Run the model on a batch and sample. Returns the N sampled rows, and i32[max_num_seqs]: each sequence's last."""
    tokens = jnp.where(batch.is_pending, previous[batch.previous_rows], batch.tokens)
    logits = model(tokens, batch.metadata)
    rows = batch.metadata.logits_rows()
    sampled = sample(logits, batch.sampling, tokens[rows], max_logprobs=max_logprobs)
    if batch.metadata.logits_indices is None:
        last = sampled.token_ids
    else:
        last = sampled.token_ids[jnp.maximum(batch.metadata.query_start_loc[1:] - 1, 0)]
    # One shape for every bucket, as the next step reads its pending tokens from it.
    return sampled, jnp.zeros_like(previous).at[: last.shape[0]].set(last)


def _copy_pages(model: nnx.Module, sources: jax.Array, destinations: jax.Array) -> None:
    """Copy pages in every layer's cache: all are read before any is written."""
    for _, cache in nnx.to_flat_state(nnx.state(model, KVCache)):
        cache[...] = cache[...].at[destinations].set(cache[...][sources])


def _vocab_size(model: nnx.Module, batch: Batch) -> int:
    """Trace the model abstractly on an empty batch, to learn the width of its logits and check its call form."""
    graphdef, state = nnx.split(model)
    logits = jax.eval_shape(lambda state, batch: nnx.merge(graphdef, state)(batch.tokens, batch.metadata), state, batch)
    num_rows = batch.metadata.seq_lens.shape[0]
    if getattr(logits, "ndim", None) != 2 or logits.shape[0] != num_rows:
        raise ValueError(
            f"{type(model).__name__}(tokens, metadata) gave {logits}; expected logits of shape"
            f" [{num_rows}, vocab_size], a row for each sequence."
        )
    return logits.shape[1]


def _default_num_pages(model: nnx.Module, page_size: int, num_wanted: int, dtype: Any) -> int:
    spec = cache_spec_for(model, num_pages=1, page_size=page_size, dtype=dtype)
    num_layers = sum(isinstance(layer, PagedAttention) for _, layer in nnx.iter_modules(model))
    return min(num_wanted, spec.pages_that_fit(_DEFAULT_POOL_BYTES, num_layers))
