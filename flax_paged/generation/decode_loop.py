"""Several decode steps in one compiled call: each step's tokens go into the next without passing the host."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from flax_paged.cache import KVCache
from flax_paged.generation.batch import Batch
from flax_paged.generation.sampling import SampledTokens
from flax_paged.metadata import PagedMetadata

# (model, batch, previous) -> (sampled, last): one step.
Step = Callable[[nnx.Module, Batch, jax.Array], tuple[SampledTokens, jax.Array]]


def run_decode_steps(
    model: nnx.Module,
    batch: Batch,
    previous: jax.Array,
    num_steps: jax.Array,
    *,
    step: Step,
    max_steps: int,
    page_size: int,
) -> tuple[SampledTokens, jax.Array]:
    """Run steps of one token a sequence, one after another.

    The number of steps is a value and not a shape, so a call of fewer steps costs no compilation.

    Args:
        model: The module; its cache is updated.
        batch: The first step, in a decode bucket: token row i is sequence i. The pages of every sequence hold the
            tokens of all steps.
        previous: i32[max_num_seqs]. As in `step`.
        num_steps: i32[]. How many, from 1 to `max_steps`.
        step: One step; `last` has the shape of `previous` and holds each sequence's token.
        max_steps: Most steps of a call. Static.
        page_size: Tokens in a page. Static.

    Returns:
        SampledTokens of `max_steps` * N rows: row `k * N + i` is step k's of sequence i, zero from `num_steps` on; and
        what the last step gave as `last`.
    """
    graphdef, caches, weights = nnx.split(model, KVCache, ...)

    def run(k: jax.Array, caches: nnx.State, previous: jax.Array) -> tuple[nnx.State, jax.Array, SampledTokens]:
        # As if the weights could change on the way: else XLA:CPU widens 16-bit ones before the loop, at each call.
        k, own_weights = jax.lax.optimization_barrier((k, weights))
        module = nnx.merge(graphdef, caches, own_weights)
        sampled, last = step(module, _batch_after(batch, k, page_size), previous)
        return nnx.state(module, KVCache), last, sampled

    def body(k: jax.Array, carry: tuple) -> tuple:
        caches, previous, sampled = carry
        caches, last, new = run(k, caches, previous)
        return caches, last, jax.tree.map(lambda all_, one: all_.at[k].set(one), sampled, new)

    shapes = jax.eval_shape(run, num_steps, caches, previous)[2]
    empty = jax.tree.map(lambda x: jnp.zeros((max_steps, *x.shape), x.dtype), shapes)
    caches, last, sampled = jax.lax.fori_loop(0, num_steps, body, (caches, previous, empty))
    nnx.update(model, caches)
    return jax.tree.map(lambda x: x.reshape(max_steps * x.shape[1], *x.shape[2:]), sampled), last


def _batch_after(batch: Batch, num_steps: jax.Array, page_size: int) -> Batch:
    """Return the decode batch that follows a number of steps after this one."""
    rows = jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
    is_later = num_steps > 0
    return Batch(
        tokens=batch.tokens,
        is_pending=batch.is_pending | is_later,
        previous_rows=jnp.where(is_later, rows, batch.previous_rows),
        metadata=_metadata_after(batch.metadata, num_steps, rows, page_size),
        sampling=dataclasses.replace(batch.sampling, counters=batch.sampling.counters + num_steps.astype(jnp.uint32)),
        adapter_ids=batch.adapter_ids,
    )


def _metadata_after(metadata: PagedMetadata, num_steps: jax.Array, rows: jax.Array, page_size: int) -> PagedMetadata:
    is_live = rows < metadata.num_seqs
    # Padding rows stay where they are, in range.
    positions = metadata.positions + jnp.where(is_live, num_steps, 0)
    pages = jnp.take_along_axis(metadata.block_tables, (positions // page_size)[:, None], axis=1)[:, 0]
    slots = pages * page_size + positions % page_size
    return dataclasses.replace(
        metadata,
        positions=positions,
        seq_lens=jnp.where(is_live, positions + 1, 0),
        slot_mapping=jnp.stack([slots, rows, jnp.ones_like(rows)]),
    )
