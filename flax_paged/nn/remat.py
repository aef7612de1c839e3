"""Rematerialisation: compute a layer again in the backward pass instead of keeping what it computed."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

REMAT_POLICIES: Mapping[str, Callable[..., Any]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def call_layer(layer: nnx.Module, *args: Any, remat: str | None = None) -> Any:
    """Return `layer(*args)`.

    Args:
        layer: A module that changes none of its Variables.
        *args: Its arguments, pytrees of arrays.
        remat: What the backward pass finds stored. None: everything; "dots": the products with weights, from which the
            rest, attention included, is computed again; "full": the layer's input only.

    Raises:
        ValueError: `remat` is none of these.
    """
    if remat is None:
        return layer(*args)
    if remat not in REMAT_POLICIES:
        raise ValueError(f"{remat=}: expected None or one of {sorted(REMAT_POLICIES)}.")
    graphdef, state = nnx.split(layer)
    run = jax.checkpoint(lambda state, *args: nnx.merge(graphdef, state)(*args), policy=REMAT_POLICIES[remat])
    return run(state, *args)
