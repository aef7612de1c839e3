"""Our checkpoint folder: config.json, the tokenizer's files, and the weights in Orbax, under `weights/`.

The weights are a pure dict of the model's parameters (no caches, no random state), as `nnx.to_pure_dict` gives it, so
that other programs can read them with Orbax alone.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding
from orbax.checkpoint import v1 as ocp
from tqdm import tqdm

from flax_paged.cache import KVScale
from flax_paged.checkpoint.assign import path_name
from flax_paged.checkpoint.report import collapse_names, nearest_name, section, shape_lines
from flax_paged.checkpoint.source import FLOAT_DTYPES, main_dtype
from flax_paged.sharding import param_shardings

WEIGHTS_FOLDER = "weights"
_BATCH_BYTES = 64 << 20  # arrays up to this size together are read at once; a larger one alone
# What a checkpoint holds: not the KV cache, its scales and random state, which belong to a run and not to a model.
_SAVED = nnx.Not(nnx.Any(nnx.Cache, KVScale, nnx.RngState))


def is_orbax_folder(folder: str | Path) -> bool:
    """Tell whether a folder is one that `save_weights` wrote into."""
    return (Path(folder) / WEIGHTS_FOLDER).is_dir()


@contextlib.contextmanager
def new_folder(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary folder that becomes `path` when the block ends well; after an error nothing is left.

    Args:
        path: The folder to make.
        overwrite: Replace what is there. The old folder goes only once the new one is complete.

    Raises:
        FileExistsError: `path` exists and `overwrite` is not set.
    """
    path = Path(path).absolute()
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"{path} exists already. Choose another name, or overwrite it (overwrite=True, --overwrite)."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if path.exists():
            old = path.with_name(f".{path.name}.old-{os.getpid()}")
            path.rename(old)
            partial.rename(path)
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        else:
            partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def save_weights(folder: str | Path, model: nnx.Module) -> None:
    """Write a model's parameters under `folder/weights`; returns when they are on disk.

    The folder should be a `new_folder`, so that a crash leaves no half-written checkpoint.
    """
    weights = nnx.to_pure_dict(nnx.state(model, _SAVED))
    with _context(weights):
        ocp.save(Path(folder).absolute() / WEIGHTS_FOLDER, weights)


def stored_dtype(folder: str | Path) -> np.dtype:
    """Return the float dtype that holds most of the weights of a folder of ours."""
    return main_dtype(_stored_arrays(Path(folder)).values())


def load_weights(
    folder: str | Path, abstract_model: nnx.Module, *, dtype=None, mesh: Mesh | None = None, progress: bool = True
) -> nnx.Module:
    """Return the model with the weights of a folder of ours, wherever and on however many devices they were saved.

    Orbax holds each array twice while it reads it, so arrays are read a few at a time, largest first.

    Args:
        folder: The folder.
        abstract_model: Module of ShapeDtypeStructs, from `nnx.eval_shape`.
        dtype: Dtype of every parameter; None for the dtype it has in `abstract_model`.
        mesh: Mesh to shard over; None for the default device.
        progress: Show a bar on stderr, if that is a terminal.

    Returns:
        A new module over concrete arrays.

    Raises:
        ValueError: Weights and model differ in parameters, shapes, or kind of dtype; one message lists all differences.
    """
    folder = Path(folder).absolute()
    graphdef, state = nnx.split(abstract_model)
    variables = dict(nnx.to_flat_state(state))
    _check_stored(folder, {path_name(path): variable for path, variable in variables.items()})
    if mesh is None:
        shardings = dict.fromkeys(variables, SingleDeviceSharding(jax.local_devices()[0]))
    else:
        shardings = param_shardings(state, mesh)
    target = {
        path: jax.ShapeDtypeStruct(variable.shape, dtype or variable.dtype, sharding=shardings[path])
        for path, variable in variables.items()
    }
    arrays: dict[tuple, jax.Array] = {}
    quiet = None if progress else True  # None: quiet where stderr is not a terminal
    total = sum(leaf.size for leaf in target.values())
    with tqdm(total=total, desc="Loading weights", unit=" weights", unit_scale=True, disable=quiet) as bar:
        for batch in _batches(target):
            arrays |= _load_batch(folder / WEIGHTS_FOLDER, target, batch)
            bar.update(sum(target[path].size for path in batch))
    filled = [(path, variable.replace(arrays[path])) for path, variable in variables.items()]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _batches(target: Mapping[tuple, jax.ShapeDtypeStruct]) -> Iterator[list[tuple]]:
    """Yield the paths, largest arrays first, in groups of about `_BATCH_BYTES`."""
    batch: list[tuple] = []
    num_bytes = 0
    for path in sorted(target, key=lambda path: -target[path].size):
        size = _stored_bytes(target[path])
        if batch and num_bytes + size > _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(path)
        num_bytes += size
    if batch:
        yield batch


def _load_batch(
    weights: Path, target: Mapping[tuple, jax.ShapeDtypeStruct], batch: list[tuple]
) -> dict[tuple, jax.Array]:
    """Read some of the arrays of a checkpoint."""
    wanted = set(batch)
    partial = {path: leaf if path in wanted else ocp.PLACEHOLDER for path, leaf in target.items()}
    try:
        with _context([target[path] for path in batch]):
            loaded = nnx.traversals.flatten_mapping(ocp.load(weights, nnx.traversals.unflatten_mapping(partial)))
    except Exception as error:
        raise ValueError(f"{weights}: Orbax cannot read it; is the folder complete? {error}") from error
    return {path: loaded[path].block_until_ready() for path in batch}


def _stored_bytes(array: Any) -> int:
    """Return how large an array may be in the file: stored perhaps as float32, whatever it is here."""
    return 4 * array.size


def _context(arrays: Any) -> ocp.Context:
    """Return Orbax's settings: what it holds beside the weights is bounded; weights are noise and not worth zipping."""
    sizes = [_stored_bytes(array) for array in jax.tree.leaves(arrays)]
    limit = max([_BATCH_BYTES, *sizes]) + 1  # Orbax refuses an array that is not below its limit
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.memory.deepcopy_host_arrays = False  # only needed when saving goes on in the background
    context.memory.read_concurrent_bytes = context.memory.write_concurrent_bytes = limit
    return context


def _stored_arrays(folder: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return shape and dtype of each array in a folder of ours, by its path joined with dots."""
    try:
        tree: Any = ocp.metadata(folder.absolute() / WEIGHTS_FOLDER).metadata
    except Exception as error:
        raise ValueError(f"{folder / WEIGHTS_FOLDER}: not a complete Orbax checkpoint: {error}") from error
    flat = nnx.traversals.flatten_mapping(tree) if isinstance(tree, Mapping) else {}
    return {path_name(path): (tuple(leaf.shape), np.dtype(leaf.dtype)) for path, leaf in flat.items()}


def _check_stored(folder: Path, variables: Mapping[str, nnx.Variable]) -> None:
    """Raise one error that lists all that keeps the stored arrays from being the model's parameters."""
    stored = _stored_arrays(folder)
    missing = [name for name in variables if name not in stored]
    unexpected = [name for name in stored if name not in variables]
    both = [name for name in variables if name in stored]
    shapes = [(name, stored[name][0], tuple(variables[name].shape)) for name in both]
    wrong_shape = [(name, got, expected) for name, got, expected in shapes if got != expected]
    wrong_dtype = [
        f"{name}: {stored[name][1]} in the checkpoint, {variables[name].dtype} expected"
        for name in both
        if _is_float(stored[name][1]) != _is_float(variables[name].dtype)
    ]
    if missing or unexpected or wrong_shape or wrong_dtype:
        hints = {name: nearest_name(name, unexpected) for name in missing[:20]}
        nearest = [f"{name} (the checkpoint has {hint})" for name, hint in hints.items() if hint]
        raise ValueError(
            f"{folder}: the checkpoint does not fit the model."
            + section("Missing parameters:", collapse_names(missing))
            + section("Nearest names:", nearest)
            + section("Unexpected parameters, which the model has no place for:", collapse_names(unexpected))
            + section("Parameters of the wrong shape:", shape_lines(wrong_shape))
            + section("Parameters of another kind; only floats are cast, to floats:", wrong_dtype)
        )


def _is_float(dtype) -> bool:
    """Tell whether a dtype is one that weights are cast between."""
    return np.dtype(dtype) in FLOAT_DTYPES
