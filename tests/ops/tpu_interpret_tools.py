"""Runs the TPU kernels in interpret mode, both ways that find faults."""

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from oracle import RaggedBatch

from flax_paged.ops.kv_cache_update.tpu import kv_cache_update_tpu
from flax_paged.ops.ragged_paged_attention.tpu import ragged_paged_attention_tpu
from flax_paged.ops.tpu_platform import interpret_params, race_detection_params

# "waits": DMA moves data when it is waited for, unwritten memory is NaN, reads out of bounds raise. Finds missing
# waits.
# "races": finds buffers that are overwritten while they are read.
MODES = ("waits", "races")


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


def attend(batch: RaggedBatch, mode: str = "waits", *, block_tables=None, kv_pages=None, **options):
    args = list(batch.args)
    if block_tables is not None:
        args[3] = block_tables
    if kv_pages is not None:
        args[1] = kv_pages
    return run(lambda p: ragged_paged_attention_tpu(*map(jax.numpy.asarray, args), interpret=p, **options), mode)


def update(batch: RaggedBatch, mode: str = "waits", **options):
    return run(lambda p: kv_cache_update_tpu(*map(jax.numpy.asarray, batch.update_args), interpret=p, **options), mode)
