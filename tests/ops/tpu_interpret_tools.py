"""Runs the TPU kernels in interpret mode, both ways that find faults."""

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from oracle import RaggedBatch

from flax_paged.ops import to_standard_layout, to_tpu_layout
from flax_paged.ops.kv_cache_update.tpu import kv_cache_update_tpu
from flax_paged.ops.ragged_paged_attention.tpu import ragged_paged_attention_tpu
from flax_paged.ops.tpu_platform import interpret_params, race_detection_params

# "waits": DMA moves data when it is waited for, unwritten memory is NaN, reads out of bounds raise. Finds missing
# waits.
# "races": finds buffers that are overwritten while they are read.
MODES = ("waits", "races")

# Shared, so that calls of equal shapes and options compile once.
ATTEND = jax.jit(
    ragged_paged_attention_tpu,
    static_argnames=(
        "sm_scale", "sliding_window", "soft_cap", "num_kv_pages_per_block", "num_queries_per_block", "max_query_len",
        "interpret", "attention_chunk_size", "causal", "return_lse", "out_dtype",
    ),
)  # fmt: skip
UPDATE = jax.jit(kv_cache_update_tpu, static_argnames=("num_slices_per_kv_cache_update_block", "interpret"))


class RaceError(Exception):
    pass


def run(function, mode):
    """Return numpy results of `function(interpret)`; raises if a race was found."""
    pltpu.reset_tpu_interpret_mode_state()
    params = interpret_params(True) if mode == "waits" else race_detection_params()
    try:
        result = jax.tree.map(np.asarray, function(params))
    except Exception as error:
        pltpu.reset_tpu_interpret_mode_state()
        if "race" in str(error).lower():
            raise RaceError(str(error)) from error
        raise
    # JAX 0.10 only takes note of races.
    if mode == "races" and getattr(interpret_pallas_call.races, "races_found", False):
        pltpu.reset_tpu_interpret_mode_state()
        raise RaceError("races_found")
    return result


def in_layout(kv_pages, head_dim, layout=None):
    """The pool as the kernel gets it: None means the TPU's layout wherever it holds these pages."""
    is_odd = head_dim <= 64 and kv_pages.shape[1] % 2
    if layout == "standard" or (layout is None and is_odd):
        return jnp.asarray(kv_pages)
    return to_tpu_layout(jnp.asarray(kv_pages), head_dim)


def attend(batch: RaggedBatch, mode: str = "waits", *, block_tables=None, kv_pages=None, layout=None, **options):
    """The kernel's result for a batch; parts of it may be replaced."""
    q, pages, seq_lens, tables, *rest = batch.args
    pages = in_layout(pages if kv_pages is None else kv_pages, q.shape[2], layout)
    args = (q, pages, seq_lens, tables if block_tables is None else block_tables, *rest)
    return run(lambda p: ATTEND(*map(jnp.asarray, args), interpret=p, **options), mode)


def update(batch: RaggedBatch, mode: str = "waits", *, layout=None, **options):
    """The pool after the batch's cache update, in the standard layout."""
    pages, *args = batch.update_args
    head_dim = batch.q.shape[2]
    pages = in_layout(pages, head_dim, layout)
    updated = run(lambda p: UPDATE(pages, *map(jnp.asarray, args), interpret=p, **options), mode)
    return np.asarray(to_standard_layout(updated, head_dim))
