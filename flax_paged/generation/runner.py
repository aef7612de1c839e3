"""`ModelRunner`: a module with its own cache, driven one compiled step at a time."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from flax_paged.attention import PagedAttention, cache_spec_for, drop_cache, init_cache
from flax_paged.cache import KVCache
from flax_paged.generation.batch import Batch, Bucket, Buckets, build_batch
from flax_paged.generation.sampling import sample
from flax_paged.generation.scheduler import Schedule, ScheduledSequence
from flax_paged.step import CompiledStep

# A pool whose size is not given may take this much memory.
_DEFAULT_POOL_BYTES = 2**30


@dataclasses.dataclass
class LaunchedStep:
    """A step that the device has been given.

    Fields:
        items: What its rows are.
        token_ids: i32[max_num_seqs] on the device. The token sampled in each row; reading it waits for the step.
    """

    items: list[ScheduledSequence]
    token_ids: jax.Array


class ModelRunner:
    """Runs schedules on a module, compiled once a bucket. Sampling is part of the step; only token ids come back.

    The module given is not changed: the runner makes its own over the same weight arrays, with its own cache.

    Args:
        model: An `nnx.Module` with `PagedAttention` layers, called as `model(tokens, metadata) -> logits`.
        num_pages: Pages in the pool; None for as many as every sequence needs at full length, within 1 GiB.
        page_size: Tokens in a page.
        max_num_seqs: Most sequences in a step.
        max_num_batched_tokens: Most tokens in a step.
        max_pages_per_seq: Pages of the longest sequence.
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
        max_pages_per_seq: int,
        kv_cache_dtype: Any = None,
    ):
        own = nnx.merge(*nnx.split(model))
        drop_cache(own)
        if num_pages is None:
            num_pages = _default_num_pages(own, page_size, max_num_seqs * max_pages_per_seq, kv_cache_dtype)
            num_pages = max(num_pages, max_pages_per_seq)
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.buckets = Buckets(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_pages_per_seq=min(max_pages_per_seq, num_pages),
            page_size=page_size,
        )
        init_cache(own, cache_spec_for(own, num_pages=num_pages, page_size=page_size, dtype=kv_cache_dtype))
        self.vocab_size = _vocab_size(own, self._batch([], self.buckets.all()[0]))
        self._step = CompiledStep(own, _sample_next, name="engine_step")
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
        batch = self._batch(schedule.items, self.buckets.choose(schedule))
        self._last_token_ids = self._step(batch, self._last_token_ids)
        return LaunchedStep(schedule.items, self._last_token_ids)

    def warmup(self, *, progress: bool = True) -> None:
        """Compile everything that a later step could need, on batches without sequences.

        Args:
            progress: Show a progress bar on stderr.
        """
        self._copy([(0, 0)])
        for bucket in tqdm(self.buckets.all(), desc="Compiling", unit="shape", disable=not progress):
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
        return build_batch(items, bucket, page_size=self.page_size, num_pages=self.num_pages)


def _sample_next(model: nnx.Module, batch: Batch, previous: jax.Array) -> jax.Array:
    """Run the model on a batch and sample each sequence's next token. Returns i32[max_num_seqs]."""
    tokens = jnp.where(batch.is_pending, previous[batch.previous_rows], batch.tokens)
    token_ids = sample(model(tokens, batch.metadata), batch.sampling)
    # One shape for every bucket, as the next step reads its pending tokens from it.
    return jnp.zeros_like(previous).at[: token_ids.shape[0]].set(token_ids)


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
