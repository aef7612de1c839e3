"""Adapters on disk: our folder (Orbax), and the folder that PEFT writes and reads (safetensors)."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx
from orbax.checkpoint import v1 as ocp

from flax_paged.checkpoint.assign import path_name
from flax_paged.checkpoint.orbax import WEIGHTS_FOLDER, new_folder
from flax_paged.models import find_family
from flax_paged.nn.lora import LoRA
from flax_paged.training.adapters import linear_layers, lora_of, new_adapter, remove_lora

CONFIG_FILE = "adapter_config.json"
PEFT_FILE = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
# Settings of PEFT that change what an adapter computes and that our form does not have.
_UNSUPPORTED = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias", "trainable_token_indices")


def save_adapter(model: nnx.Module, folder: str | Path, *, format: str = "orbax", overwrite: bool = False) -> None:
    """Write a model's adapters, and nothing else of it, into a new folder.

    Args:
        model: A model of `flax_paged.models` with adapters.
        folder: The folder to make; it appears when it is complete.
        format: "orbax" for ours, "peft" for adapter_model.safetensors. adapter_config.json is PEFT's in both.
        overwrite: Replace what is there.

    Raises:
        ValueError: The model has no adapters, they differ in scale or rank, or the format is unknown.
        FileExistsError: The folder exists and `overwrite` is not set.
    """
    if format not in ("orbax", "peft"):
        raise ValueError(f"{format=}: expected 'orbax' or 'peft'.")
    adapter = lora_of(model)
    shapes = {(lora.rank, lora.scale) for lora in adapter.values()}
    if len(shapes) != 1:
        raise ValueError(f"save_adapter: expected adapters of one (rank, scale), got {sorted(shapes) or 'none'}.")
    (rank, scale) = shapes.pop()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted({str(path[-1]) for path in adapter}),
    }
    with new_folder(folder, overwrite) as new:
        (new / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if format == "peft":
            safetensors.numpy.save_file(_peft_tensors(model, adapter), new / PEFT_FILE)
        else:
            weights = {".".join(map(str, path)): {"a": lora.a[...], "b": lora.b[...]} for path, lora in adapter.items()}
            ocp.save(new.absolute() / WEIGHTS_FOLDER, weights)


def load_adapter(model: nnx.Module, folder: str | Path, *, dtype: Any = None) -> nnx.Module:
    """Put the adapter of a folder on a model, in place of any that it has.

    Args:
        model: A model of `flax_paged.models`, changed in place.
        folder: A folder that `save_adapter` or PEFT's `save_pretrained` wrote.
        dtype: Dtype of the adapter; None for that of the files.

    Returns:
        The model.

    Raises:
        FileNotFoundError: The folder or a file is missing.
        ValueError: The files do not fit the model, or use what our adapters do not have.
    """
    adapter = read_adapter(model, folder, dtype=dtype)
    remove_lora(model)
    layers = dict(nnx.iter_modules(model))
    for path, lora in adapter.items():
        layers[path].lora = lora
    return model


def read_adapter(model: nnx.Module, folder: str | Path, *, dtype: Any = None) -> dict[tuple, LoRA]:
    """Return the adapter of a folder, by the path of each linear map, without putting it on the model.

    Arguments and errors as in `load_adapter`; several such results go into `stack_lora`.
    """
    folder = Path(folder)
    if not (folder / CONFIG_FILE).is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG_FILE}; expected a folder of save_adapter or of PEFT.")
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    rank, scale = _rank_and_scale(folder, config)
    if (folder / PEFT_FILE).is_file():
        names = {name: path for path, name in _peft_names(model).items()}
        factors = _from_peft(folder / PEFT_FILE, names)
    elif (folder / WEIGHTS_FOLDER).is_dir():
        names = {path_name(path): path for path, _ in linear_layers(model)}
        factors = _from_orbax(folder / WEIGHTS_FOLDER, names)
    else:
        raise FileNotFoundError(f"{folder} has neither {PEFT_FILE} nor {WEIGHTS_FOLDER}/.")
    layers = dict(linear_layers(model))
    adapter = {}
    for path, (a, b) in factors.items():
        layer = layers[path]
        expected = ((rank, layer.weight.shape[1]), (layer.weight.shape[0], rank))
        if (a.shape, b.shape) != expected:
            raise ValueError(f"{folder}: {path_name(path)} has factors {(a.shape, b.shape)}; expected {expected}.")
        lora = new_adapter(layer, rank=rank, alpha=scale * rank, dtype=dtype or a.dtype)
        for variable, value in ((lora.a, a), (lora.b, b)):
            variable[...] = jax.device_put(jnp.asarray(value, variable.dtype), variable[...].sharding)
        adapter[path] = lora
    if not adapter:
        raise ValueError(f"{folder} holds no adapters.")
    return adapter


def _rank_and_scale(folder: Path, config: Mapping[str, Any]) -> tuple[int, float]:
    if config.get("peft_type", "LORA") != "LORA":
        raise ValueError(f"{folder}: peft_type={config['peft_type']!r}; expected 'LORA'.")
    used = [name for name in _UNSUPPORTED if config.get(name)] + (["bias"] * (config.get("bias", "none") != "none"))
    if used:
        raise ValueError(f"{folder}: {CONFIG_FILE} sets {', '.join(used)}, which our adapters do not have.")
    rank = int(config["r"])
    return rank, config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _peft_names(model: nnx.Module) -> dict[tuple, str]:
    """Return the name that PEFT gives each linear map: that of its weight in Hugging Face's model."""
    family = find_family(model.config.to_hf())
    rules = family.hf_rules(model.config)
    return {
        path: _PEFT_PREFIX + rules[path_name(path) + ".weight"].name.removesuffix(".weight")
        for path, _ in linear_layers(model)
        if path_name(path) + ".weight" in rules
    }


def _peft_tensors(model: nnx.Module, adapter: Mapping[tuple, LoRA]) -> dict[str, np.ndarray]:
    names = _peft_names(model)
    tensors = {}
    for path, lora in adapter.items():
        tensors[f"{names[path]}.lora_A.weight"] = np.asarray(lora.a[...])
        tensors[f"{names[path]}.lora_B.weight"] = np.asarray(lora.b[...])
    return tensors


def _from_peft(file: Path, paths: Mapping[str, tuple]) -> dict[tuple, tuple[np.ndarray, np.ndarray]]:
    """Return (a, b) by path from a file of PEFT."""
    tensors = safetensors.numpy.load_file(file)
    found: dict[tuple, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.removesuffix(".weight").rpartition(".")
        if module not in paths or kind not in ("lora_A", "lora_B"):
            raise ValueError(f"{file}: {name} is no adapter of a linear map of this model.")
        found.setdefault(paths[module], {})[kind] = tensor
    return {path: _both(file, path, factors, ("lora_A", "lora_B")) for path, factors in found.items()}


def _from_orbax(folder: Path, paths: Mapping[str, tuple]) -> dict[tuple, tuple[np.ndarray, np.ndarray]]:
    """Return (a, b) by path from a folder of ours."""
    stored = ocp.metadata(folder.absolute()).metadata
    unknown = sorted(set(stored) - set(paths))
    if unknown:
        raise ValueError(f"{folder}: {', '.join(unknown[:5])} are no linear maps of this model.")
    # On the host first: an adapter may have been saved from more devices than there are now.
    target = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), stored)
    weights = ocp.load(folder.absolute(), target)
    return {paths[name]: _both(folder, paths[name], factors, ("a", "b")) for name, factors in weights.items()}


def _both(where: Path, path: tuple, factors: Mapping[str, Any], names: tuple[str, str]) -> tuple[Any, Any]:
    missing = [name for name in names if name not in factors]
    if missing:
        raise ValueError(f"{where}: {path_name(path)} has no {missing[0]}; an adapter has two factors.")
    return factors[names[0]], factors[names[1]]
