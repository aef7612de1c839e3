"""LoRA adapters of a model: add, merge, remove, stack several for serving."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_paged.checkpoint.assign import path_name
from flax_paged.nn.linear import Linear
from flax_paged.nn.lora import LoRA, StackedLoRA

# Every linear map of a block, which the QLoRA paper found to matter more than the rank.
DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def add_lora(
    model: nnx.Module,
    *,
    rank: int = 8,
    alpha: float | None = None,
    targets: Sequence[str] = DEFAULT_TARGETS,
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
) -> nnx.Module:
    """Give linear maps of a model fresh adapters, which change nothing before they are trained.

    The parameters of the model keep their names and values; the adapters are `nnx.LoRAParam`s beside them, so that
    `nnx.Optimizer(model, ..., wrt=nnx.LoRAParam)` trains nothing else. The model is served with its adapters as it is.

    Args:
        model: The module, changed in place.
        rank: Width of the adapters.
        alpha: The adapters' product is scaled by `alpha / rank`; None for `2 * rank`.
        targets: Last names of the linear maps, such as "q_proj".
        dtype: Dtype of the adapters.
        rngs: Source of the initial values.

    Returns:
        The model.

    Raises:
        ValueError: A target names no linear map, or one that has an adapter already.
    """
    layers = [(path, layer) for path, layer in linear_layers(model) if path[-1] in targets]
    known = sorted({str(path[-1]) for path, _ in linear_layers(model)} - {"lm_head"})
    for target in targets:
        if target not in known:
            raise ValueError(f"{targets=}: the model has no linear map {target!r} to adapt; expected some of {known}.")
    for path, layer in layers:
        if layer.lora is not None:
            raise ValueError(f"{path_name(path)} has an adapter already; merge_lora or remove_lora first.")
    for _, layer in layers:
        layer.lora = _adapter_for(layer, rank, 2 * rank if alpha is None else alpha, dtype, rngs)
    return model


def merge_lora(model: nnx.Module) -> nnx.Module:
    """Add the adapters to the weights, and remove them.

    The sum is taken in float32 and rounded once to the dtype of the weight.

    Args:
        model: The module, changed in place.

    Returns:
        The model.

    Raises:
        ValueError: The model has no adapters, or several stacked ones.
    """
    for path, layer in lora_layers(model):
        if isinstance(layer.lora, StackedLoRA):
            raise ValueError(f"{path_name(path)} has several adapters; only one can be merged.")
        merged = layer.weight[...].astype(jnp.float32) + layer.lora.delta()
        layer.weight[...] = merged.astype(layer.weight.dtype)
        layer.lora = nnx.data(None)
    return model


def remove_lora(model: nnx.Module) -> nnx.Module:
    """Take the adapters off a model, which then is what it was without them. Returns the model."""
    for _, layer in linear_layers(model):
        layer.lora = nnx.data(None)
    return model


def stack_lora(model: nnx.Module, adapters: Sequence[Mapping[tuple, LoRA]]) -> nnx.Module:
    """Give a model several adapters, of which each request of a batch uses one or none.

    Args:
        model: The module, changed in place; an adapter it has is replaced.
        adapters: Adapters by the path of their linear map, as `lora_of(model)` gives them. The first has id 1, id 0 is
            the model alone.

    Returns:
        The model. It reads each token's id from its `adapter_ids`.

    Raises:
        ValueError: There is no adapter, or one does not fit the model.
    """
    if not adapters:
        raise ValueError("stack_lora(adapters): expected at least one.")
    layers = dict(linear_layers(model))
    for i, adapter in enumerate(adapters):
        for path, lora in adapter.items():
            if path not in layers:
                raise ValueError(f"adapters[{i}] is of {path_name(path)}, which the model does not have.")
            if (lora.b.shape[0], lora.a.shape[1]) != layers[path].weight.shape:
                raise ValueError(
                    f"adapters[{i}]: {path_name(path)} is of a weight {(lora.b.shape[0], lora.a.shape[1])}; expected"
                    f" {layers[path].weight.shape}."
                )
    remove_lora(model)
    for path in {path: None for adapter in adapters for path in adapter}:
        layers[path].lora = StackedLoRA([adapter.get(path) for adapter in adapters])
    return model


def lora_of(model: nnx.Module) -> dict[tuple, LoRA]:
    """Return a model's adapter: the `LoRA` of each adapted linear map, by its path. They are the model's own."""
    return {path: layer.lora for path, layer in linear_layers(model) if isinstance(layer.lora, LoRA)}


def has_lora(model: nnx.Module) -> bool:
    """Tell whether any linear map of a model has an adapter."""
    return any(layer.lora is not None for _, layer in linear_layers(model))


def lora_layers(model: nnx.Module) -> Iterator[tuple[tuple, Linear]]:
    """Yield the path of each adapted linear map, and the map.

    Raises:
        ValueError: There is none.
    """
    layers = [(path, layer) for path, layer in linear_layers(model) if layer.lora is not None]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no adapters; add_lora gives it some, load_adapter loads them.")
    yield from layers


def new_adapter(layer: Linear, *, rank: int, alpha: float, dtype: Any = jnp.float32) -> LoRA:
    """Return an adapter for a linear map, to be filled."""
    return _adapter_for(layer, rank, alpha, dtype, nnx.Rngs(0))


def _adapter_for(layer: Linear, rank: int, alpha: float, dtype: Any, rngs: nnx.Rngs) -> LoRA:
    out_features, in_features = layer.weight.shape
    axes = layer.weight.get_metadata().get("logical_axes", (None, None))
    lora = LoRA(in_features, out_features, rank=rank, alpha=alpha, axes=axes, dtype=dtype, rngs=rngs)
    sharding = getattr(layer.weight[...], "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
        _shard_like(lora, sharding)
    return lora


def _shard_like(lora: LoRA, sharding: jax.sharding.NamedSharding) -> None:
    """Split the factors over the mesh as the weight is split."""
    out_axis, in_axis = (*sharding.spec, None, None)[:2]
    for factor, spec in ((lora.a, (None, in_axis)), (lora.b, (out_axis, None))):
        placed = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec))
        factor.set_value(jax.device_put(factor[...], placed))


def linear_layers(model: nnx.Module) -> Iterator[tuple[tuple, Linear]]:
    """Yield the path of each linear map of a model, and the map."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            yield path, module
