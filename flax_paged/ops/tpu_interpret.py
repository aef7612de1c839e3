"""How a Pallas TPU kernel of ours is run: compiled for a TPU, or interpreted on the CPU."""

import dataclasses
import inspect
from typing import Any

from jax.experimental.pallas import tpu as pltpu


def interpret_params(interpret: Any) -> Any:
    """Return the `interpret=` argument of `pl.pallas_call`.

    Args:
        interpret: False compiles for the TPU. True interprets on the CPU with the strictest settings: a DMA moves its
            data only when it is waited for, memory that nothing wrote is NaN, and reads out of bounds raise. A
            `pltpu.InterpretParams` is passed on as it is.
    """
    if interpret is True:
        return pltpu.InterpretParams(
            dma_execution_mode="on_wait", uninitialized_memory="nan", out_of_bounds_reads="raise"
        )
    return interpret


def race_detection_params(**options: Any) -> pltpu.InterpretParams:
    """Return interpret-mode settings that detect races, raising where the installed JAX can (0.12; 0.10 only records).

    Args:
        **options: Further fields of `pltpu.InterpretParams`.
    """
    fields = {field.name for field in dataclasses.fields(pltpu.InterpretParams)}
    if "on_race" in fields or "on_race" in inspect.signature(pltpu.InterpretParams).parameters:
        options["on_race"] = "raise"
    return pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager", **options)
