"""What the Pallas TPU kernels need to know about where they run: which TPU, or interpreted on the CPU."""

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


def tpu_generation() -> str | None:
    """Return the TPU generation that is compiled for ("v4", "v5e", "v5p", "v6e", "7x"), None if there is no TPU."""
    try:
        return pltpu.get_tpu_info().chip_version.value
    except (ValueError, RuntimeError, NotImplementedError):
        return None
