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

from flax_paged.attention import cache_spec_for, drop_cache, init_cache, num_caches
from flax_paged.cache import KVCache
from flax_paged.generation.batch import Batch, BatchLimits, Bucket, Buckets, build_batch, first_sampled_rows
from flax_paged.generation.decode_loop import run_decode_steps
from flax_paged.generation.outputs import Logprob, LogprobsOfToken
from flax_paged.generation.sampling import SampledTokens, sample
from flax_paged.generation.scheduler import Schedule, ScheduledSequence
from flax_paged.generation.swap_space import SwapSpace
from flax_paged.nn.lora import StackedLoRA
from flax_paged.ops import copy_pages
from flax_paged.step import CompiledStep

# A pool whose size is not given may take this much memory.
_DEFAULT_POOL_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step brought for one sequence.

    Fields:
        item: The scheduled sequence.
        token_ids: The tokens sampled: after its last token and each of its drafts, or in each step of the call.
        rows: The row of each in `sampled`.
        sampled: All that came back, on the host, if any log-probabilities are wanted.
    """

    item: ScheduledSequence
    token_ids: list[int]
    rows: range
    sampled: SampledTokens | None

    def accepted(self) -> Iterator[tuple[int, int]]:
        """Yield row and id of each token that counts: behind a draft that was wrong, none does."""
        drafts = self.item.draft_token_ids
        for i, (row, token_id) in enumerate(zip(self.rows, self.token_ids, strict=True)):
            yield row, token_id
            if i < len(drafts) and token_id != drafts[i]:
                return

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
        schedule: What it does.
        bucket: Its shape.
        sampled: What the device returns.
    """

    def __init__(self, schedule: Schedule, bucket: Bucket, sampled: SampledTokens):
        self._items = schedule.items
        self._num_steps = schedule.num_decode_steps
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
            rows = range(first, first + 1 + len(item.draft_token_ids))
            if self._num_steps > 1:
                rows = range(first, self._num_steps * self._bucket.num_rows, self._bucket.num_rows)
            yield StepResult(item, token_ids[rows.start : rows.stop : rows.step], rows, host)


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
        decode_steps_per_call: Most decode steps in a compiled call.
        kv_cache_dtype: Dtype of the cache; None for that of the model.
        swap_space: Bytes of host memory for the pages of preempted sequences.

    Raises:
        ValueError: The model has no `PagedAttention` layer or does not return logits `[N, V]`, or `swap_space` holds no
            page.
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
        decode_steps_per_call: int = 1,
        kv_cache_dtype: Any = None,
        swap_space: int = 0,
    ):
        max_pages_per_seq = -(-max_model_len // page_size)
        own = nnx.merge(*nnx.split(model))
        drop_cache(own)
        if num_pages is None:
            num_pages = default_num_pages(
                own,
                page_size=page_size,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                kv_cache_dtype=kv_cache_dtype,
            )
        self.num_pages = num_pages
        self.max_num_seqs = max_num_seqs
        self.num_adapters = _num_adapters(own)
        self._limits = BatchLimits(page_size, num_pages, max_model_len, max_logit_entries, self.num_adapters > 0)
        self.buckets = Buckets(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_pages_per_seq=min(max_pages_per_seq, num_pages),
            page_size=page_size,
            has_all_logits=has_drafts or max_logprobs > 0,
        )
        spec = cache_spec_for(own, num_pages=num_pages, page_size=page_size, dtype=kv_cache_dtype)
        init_cache(own, spec)
        self.vocab_size = _vocab_size(own, self._batch([], self.buckets.all()[0]))
        self._limits = dataclasses.replace(self._limits, vocab_size=self.vocab_size)
        self.max_logprobs = min(max_logprobs, self.vocab_size)
        step = functools.partial(_sample_next, max_logprobs=self.max_logprobs)
        self._step = CompiledStep(own, step, name="engine_step")
        self._decode_steps = None
        if decode_steps_per_call > 1:
            decode_steps = functools.partial(
                run_decode_steps, step=step, max_steps=decode_steps_per_call, page_size=page_size
            )
            self._decode_steps = self._step.with_function(decode_steps, name="engine_decode_steps")
        self._copy_pages = self._step.with_function(_copy_pages, name="copy_pages")
        self.num_swap_slots = spec.pages_that_fit(swap_space, num_caches(own))
        if swap_space and not self.num_swap_slots:
            page_nbytes = spec.page_nbytes * num_caches(own)
            raise ValueError(f"{swap_space=} bytes hold no page of all layers: expected at least {page_nbytes}, or 0.")
        self._swap_space = None
        if self.num_swap_slots:
            self._swap_space = SwapSpace(self._step, num_pages=num_pages, num_slots=self.num_swap_slots)
        self._last_token_ids = jnp.zeros(max_num_seqs, jnp.int32)

    @property
    def num_traces(self) -> int:
        """How many step shapes have been traced."""
        steps = (self._step, self._decode_steps, self._copy_pages, self._swap_space)
        return sum(step.num_traces for step in steps if step is not None)

    def swap(self, schedule: Schedule) -> None:
        """Move the pages that a step needs moved to or from host memory, without waiting for the steps before it."""
        if schedule.swap_outs:
            self._swap_space.swap_out(schedule.swap_outs)
        if schedule.swap_ins:
            self._swap_space.swap_in(schedule.swap_ins)

    def launch(self, schedule: Schedule) -> LaunchedStep:
        """Give the device a step, without waiting for it. Pending tokens are those of the launch before this one."""
        copies = [copy for item in schedule.items for copy in item.page_copies]
        if copies:
            self._copy(copies)
        bucket = self.buckets.choose(schedule)
        batch = self._batch(schedule.items, bucket)
        sampled, self._last_token_ids = self._run(batch, bucket, schedule.num_decode_steps)
        return LaunchedStep(schedule, bucket, sampled)

    def warmup(self, *, progress: bool = True) -> None:
        """Compile everything that a later step could need, on batches without sequences.

        Args:
            progress: Show a progress bar on stderr, if that is a terminal.
        """
        self._copy([(0, 0)])
        if self._swap_space is not None:
            self._swap_space.warmup()
        quiet = None if progress else True  # None: quiet where stderr is not a terminal
        for bucket in tqdm(self.buckets.all(), desc="Compiling", unit="shape", disable=quiet):
            jax.block_until_ready(self._run(self._batch([], bucket), bucket, 1))

    def update_weights(self, weights: nnx.Module | nnx.State) -> None:
        """Take new weights without compiling again; what the cache holds came from the old ones."""
        self._step.update_weights(weights)

    def reset(self) -> None:
        """Start from an empty cache, after a step that failed."""
        self._step.reset_cache()
        if self._swap_space is not None:
            self._swap_space.reset()
        self._last_token_ids = jnp.zeros(self.max_num_seqs, jnp.int32)

    def _run(self, batch: Batch, bucket: Bucket, num_steps: int) -> tuple[SampledTokens, jax.Array]:
        if self._decode_steps is not None and bucket.is_decode:
            return self._decode_steps(batch, self._last_token_ids, np.int32(num_steps))
        return self._step(batch, self._last_token_ids)

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
    options = {} if batch.adapter_ids is None else {"adapter_ids": batch.adapter_ids}
    logits = model(tokens, batch.metadata, **options)
    rows = batch.metadata.logits_rows()
    sampled = sample(logits, batch.sampling, tokens[rows], max_logprobs=max_logprobs)
    if batch.metadata.logits_indices is None:
        last = sampled.token_ids
    else:
        last = sampled.token_ids[jnp.maximum(batch.metadata.query_start_loc[1:] - 1, 0)]
    # One shape for every bucket, as the next step reads its pending tokens from it.
    return sampled, jnp.zeros_like(previous).at[: last.shape[0]].set(last)


def _copy_pages(model: nnx.Module, sources: jax.Array, destinations: jax.Array) -> None:
    """Copy pages in every layer's cache."""
    for _, cache in nnx.to_flat_state(nnx.state(model, KVCache)):
        cache[...] = copy_pages(cache[...], sources, destinations)


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


def _num_adapters(model: nnx.Module) -> int:
    """Return how many adapters a model has of which each request uses one; 0 if it has at most one, used by all."""
    return max(
        (layer.num_adapters for _, layer in nnx.iter_modules(model) if isinstance(layer, StackedLoRA)), default=0
    )


def default_num_pages(
    model: nnx.Module, *, page_size: int, max_num_seqs: int, max_model_len: int, kv_cache_dtype: Any = None
) -> int:
    """Return the size of a pool that nobody has chosen.

    Args:
        model: A module with `PagedAttention` layers.
        page_size: Tokens in a page.
        max_num_seqs: Most sequences in a step.
        max_model_len: Tokens of the longest sequence.
        kv_cache_dtype: Dtype of the cache; None for that of the model.

    Returns:
        As many pages as every sequence needs at full length, within 1 GiB, but enough for one.
    """
    max_pages_per_seq = -(-max_model_len // page_size)
    spec = cache_spec_for(model, num_pages=1, page_size=page_size, dtype=kv_cache_dtype)
    fitting = spec.pages_that_fit(_DEFAULT_POOL_BYTES, num_caches(model))
    return max(min(max_num_seqs * max_pages_per_seq, fitting), max_pages_per_seq)
