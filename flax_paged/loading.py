"""Load and save whole models: find out what a path is, build the model its config describes, stream the weights in."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from flax_paged.checkpoint.assign import assign
from flax_paged.checkpoint.gguf import GGUFSource
from flax_paged.checkpoint.gguf_tokenizer import dump_tokenizer_files
from flax_paged.checkpoint.hub import fetch_repo, fetch_smollm2, looks_like_repo_id
from flax_paged.checkpoint.orbax import is_orbax_folder, load_weights, new_folder, save_weights, stored_dtype
from flax_paged.checkpoint.safetensors import SafetensorsSource
from flax_paged.checkpoint.source import FLOAT_DTYPES, main_dtype
from flax_paged.generation.text import Tokenizer
from flax_paged.models import find_family

_ACCEPTED = (
    "a folder of ours (config.json and weights/), a Hugging Face folder (config.json and *.safetensors), a .gguf file, "
    "a Hugging Face id (owner/name), or smollm2"
)


def load_model(path_or_id: str | Path, *, dtype=None, mesh: Mesh | None = None, progress: bool = True) -> nnx.Module:
    """Return the model of a checkpoint, with its weights.

    Args:
        path_or_id: A folder of ours, a Hugging Face folder, a GGUF file, a Hugging Face id, or `smollm2`.
        dtype: float32, bfloat16 or float16 for all parameters; None for the checkpoint's (float32 if quantised).
        mesh: Device mesh to shard over; None for one device.
        progress: Show a bar on stderr, if that is a terminal.

    Returns:
        A module of the family that the config names, such as `flax_paged.models.llama.Llama`, without caches.

    Raises:
        FileNotFoundError: There is no such checkpoint, or a file of it is missing.
        ImportError: Reading it needs an extra that is not installed.
        ValueError: The architecture is unknown, or the files do not fit the config.
    """
    dtype = _checked_dtype(dtype)
    path = _find(path_or_id)
    gguf = GGUFSource(path) if _is_gguf(path) else None
    family, config = _family_and_config(path, gguf)
    if is_orbax_folder(path):
        dtype = dtype or stored_dtype(path)
        model = _abstract_model(family, config, dtype, mesh)
        return load_weights(path, model, dtype=dtype, mesh=mesh, progress=progress)
    rules = family.gguf_rules(config) if gguf else family.hf_rules(config)
    ignorable = family.gguf_ignorable if gguf else family.hf_ignorable
    source = gguf or SafetensorsSource(path)
    dtype = dtype or _main_dtype(source)
    model = _abstract_model(family, config, dtype, mesh)
    return assign(model, source, rules, ignorable=ignorable, dtype=dtype, mesh=mesh, progress=progress)


def load_model_shape(path_or_id: str | Path, *, dtype=None) -> nnx.Module:
    """Return the model of a checkpoint without its weights: shapes and dtypes, to plan memory with.

    Args:
        path_or_id: As in `load_model`.
        dtype: As in `load_model`.

    Returns:
        The module that `load_model` would return, with `jax.ShapeDtypeStruct` for arrays.

    Raises:
        FileNotFoundError, ImportError, ValueError: As in `load_model`.
    """
    dtype = _checked_dtype(dtype)
    path = _find(path_or_id)
    gguf = GGUFSource(path) if _is_gguf(path) else None
    family, config = _family_and_config(path, gguf)
    if dtype is None:
        dtype = stored_dtype(path) if is_orbax_folder(path) else _main_dtype(gguf or SafetensorsSource(path))
    return _abstract_model(family, config, dtype, None)


def save_model(
    model: nnx.Module, path: str | Path, tokenizer: Tokenizer | None = None, *, overwrite: bool = False
) -> None:
    """Write a model as a folder of ours: config.json, `weights/` (Orbax) and the tokenizer's files.

    The folder appears when it is complete. Caches are not saved.

    Args:
        model: A model of `flax_paged.models`, with or without caches.
        path: The folder to make.
        tokenizer: The tokenizer to store beside it.
        overwrite: Replace what is at `path`.

    Raises:
        FileExistsError: `path` exists and `overwrite` is not set.
        TypeError: The model has no config that can be written.
        ValueError: The model has LoRA adapters.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "to_hf"):
        raise TypeError(
            f"model must have a config with to_hf(), as flax_paged.models have; got {type(model).__name__}."
        )
    if jax.tree.leaves(nnx.state(model, nnx.LoRAParam)):
        raise ValueError("the model has LoRA adapters: merge_lora it first, or write them alone with save_adapter.")
    values = config.to_hf()
    with new_folder(path, overwrite) as folder:
        save_weights(folder, model)
        if tokenizer is not None:
            tokenizer.save(folder)
            values |= _special_ids(tokenizer)
        (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(path_or_id: str | Path) -> Tokenizer:
    """Return the tokenizer of a checkpoint; see `load_model` for what is accepted.

    Raises:
        FileNotFoundError: There is no such checkpoint, or it has no tokenizer.json.
        ValueError: The tokenizer cannot be rebuilt exactly (GGUF), or its files are not valid.
    """
    path = _find(path_or_id)
    if _is_gguf(path):
        return Tokenizer(dump_tokenizer_files(GGUFSource(path).tokenizer_files()))
    return Tokenizer.from_folder(path if path.is_dir() else path.parent)


def load_generation_config(path_or_id: str | Path) -> dict[str, Any]:
    """Return a checkpoint's defaults for generation: generation_config.json over the token ids in config.json.

    `eos_token_id` is a list of every id that ends an answer (empty if none is known).
    """
    path = _find(path_or_id)
    if _is_gguf(path):
        generation: dict[str, Any] = GGUFSource(path).tokenizer_files()["generation_config.json"]
        model: Mapping[str, Any] = {}
    else:
        folder = path if path.is_dir() else path.parent
        model, generation = (_read_json(folder / name) for name in ("config.json", "generation_config.json"))
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    merged = {name: model[name] for name in names if model.get(name) is not None} | generation
    eos = [source.get("eos_token_id") for source in (generation, model)]
    eos = [index for ids in eos if ids is not None for index in ([ids] if isinstance(ids, int) else ids)]
    return merged | {"eos_token_id": list(dict.fromkeys(eos))}


def _family_and_config(path: Path, gguf: GGUFSource | None):
    """Return the model family of a checkpoint and its config."""
    values = gguf.config() if gguf else _config_values(path)
    family = find_family(values)
    return family, family.config_from_hf(values)


def _abstract_model(family, config, dtype, mesh: Mesh | None) -> nnx.Module:
    return nnx.eval_shape(lambda: family.model(config, rngs=nnx.Rngs(0), dtype=dtype, mesh=mesh))


def _main_dtype(source) -> np.dtype:
    return main_dtype((source.shape(name), source.dtype(name)) for name in source.names())


def _checked_dtype(dtype) -> np.dtype | None:
    """Return a dtype given by name or object, or raise for one that weights cannot have."""
    if dtype is None:
        return None
    try:
        checked = jnp.dtype(dtype)
    except TypeError:
        checked = None
    if checked not in FLOAT_DTYPES:
        raise ValueError(f"{dtype=}: expected None, float32, bfloat16 or float16.")
    return checked


def _find(path_or_id: str | Path) -> Path:
    """Return the local file or folder that a name means, fetched if need be."""
    path = Path(path_or_id).expanduser()
    if path.exists():
        return path
    if str(path_or_id) == "smollm2":
        return fetch_smollm2()
    if isinstance(path_or_id, str) and looks_like_repo_id(path_or_id) and path.suffix not in (".gguf", ".safetensors"):
        return fetch_repo(path_or_id)
    raise FileNotFoundError(f"{str(path_or_id)!r} does not exist. Expected {_ACCEPTED}.")


def _is_gguf(path: Path) -> bool:
    return path.is_file() and path.suffix == ".gguf"


def _config_values(path: Path) -> dict[str, Any]:
    """Return the parsed config.json of a checkpoint, given its folder or its one .safetensors file."""
    if path.is_file() and path.suffix != ".safetensors":
        raise ValueError(f"{path}: unknown kind of file. Expected {_ACCEPTED}.")
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        gguf_files = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f" It holds {', '.join(gguf_files)}: give the path of one of them." if gguf_files else ""
        raise FileNotFoundError(f"{folder} has no config.json.{hint} Expected {_ACCEPTED}.")
    return _read_json(folder / "config.json")


def _read_json(path: Path) -> dict[str, Any]:
    """Return a parsed JSON file; {} where it is missing."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(values).__name__}.")
    return values


def _special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the token ids that programs look for in config.json."""
    eos = list(tokenizer.eos_token_ids)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": eos[0] if len(eos) == 1 else eos or None}
    return {name: value for name, value in ids.items() if value is not None}
