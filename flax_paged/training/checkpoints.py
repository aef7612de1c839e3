"""Checkpoints of a training run: what is trained, the optimizer, and random state, by step."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from orbax.checkpoint import v1 as ocp

from flax_paged.cache import KVCache
from flax_paged.checkpoint.assign import path_name


class TrainingCheckpoints:
    """The checkpoints of one run, in `folder/<step>`.

    A checkpoint appears under its number when it is complete, so one that was being written when the process died is
    never picked up; what is left of it is removed when the run goes on. Parameters that are not trained are not saved.

    Args:
        folder: The folder, made if need be.
        max_to_keep: Older checkpoints than these many are deleted.
        settings: JSON values that a run must have in common with the checkpoints it goes on from.

    Raises:
        ValueError: `max_to_keep` is less than 1.
    """

    def __init__(self, folder: str | Path, *, max_to_keep: int = 2, settings: Mapping[str, Any] | None = None):
        if max_to_keep < 1:
            raise ValueError(f"TrainingCheckpoints({max_to_keep=}): expected at least 1.")
        self._folder = Path(folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._settings = dict(settings or {})
        self._checkpointer = ocp.training.Checkpointer(
            self._folder,
            preservation_policy=ocp.training.preservation_policies.LatestN(max_to_keep),
            cleanup_tmp_directories=True,
        )

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint; None if there is none."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    def save(self, step: int, model: nnx.Module, optimizer: nnx.Optimizer) -> None:
        """Write a checkpoint of this step; returns when it is on disk. An existing one is left as it is."""
        if step in {checkpoint.step for checkpoint in self._checkpointer.checkpoints}:
            return
        self._checkpointer.save(step, _arrays(model, optimizer), custom_metadata=self._settings, force=True)

    def restore(self, step: int, model: nnx.Module, optimizer: nnx.Optimizer) -> None:
        """Bring a model and its optimizer to where they were at a step.

        Raises:
            ValueError: The checkpoint is of another run: its settings, parameters or shapes differ.
        """
        metadata = self._checkpointer.metadata(step)
        self._check_settings(step, metadata.custom_metadata or {})
        current = _arrays(model, optimizer)
        _check_stored(self._folder / str(step), metadata.metadata, current)
        target = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for name, leaf in current.items()
        }
        arrays = self._checkpointer.load(step, target)
        for module, prefix, filters in _parts(model, optimizer):
            flat = nnx.to_flat_state(nnx.state(module, filters))
            new = [(path, _with_array(variable, arrays[prefix + path_name(path)])) for path, variable in flat]
            nnx.update(module, nnx.from_flat_state(new))

    def close(self) -> None:
        """Finish what is being written."""
        self._checkpointer.close()

    def _check_settings(self, step: int, stored: Mapping[str, Any]) -> None:
        names = sorted(set(stored) | set(self._settings))
        changed = [
            f"{name} was {stored.get(name)!r} and is {self._settings.get(name)!r}"
            for name in names
            if stored.get(name) != self._settings.get(name)
        ]
        if changed:
            raise ValueError(
                f"{self._folder / str(step)} is of a run with other settings: {'; '.join(changed)}. Go on with the"
                " same settings, or begin a run in another folder."
            )


@contextlib.contextmanager
def open_checkpoints(folder: str | Path, **options: Any) -> Iterator[TrainingCheckpoints]:
    """Give `TrainingCheckpoints`, closed at the end of the block."""
    checkpoints = TrainingCheckpoints(folder, **options)
    try:
        yield checkpoints
    finally:
        checkpoints.close()


def _parts(model: nnx.Module, optimizer: nnx.Optimizer):
    """Return (module, prefix of its names, filter) of what belongs into a checkpoint."""
    carried = nnx.Not(nnx.Any(nnx.Param, KVCache))
    return (model, "model.", nnx.Any(optimizer.wrt, carried)), (optimizer, "optimizer.", ...)


def _arrays(model: nnx.Module, optimizer: nnx.Optimizer) -> dict[str, jax.Array]:
    """Return what a checkpoint holds by name, random keys as the numbers they consist of."""
    values = {
        prefix + path_name(path): variable.get_value()
        for module, prefix, filters in _parts(model, optimizer)
        for path, variable in nnx.to_flat_state(nnx.state(module, filters))
    }
    return {name: jax.random.key_data(value) if _is_key(value) else value for name, value in values.items()}


def _with_array(variable: nnx.Variable, array: jax.Array) -> nnx.Variable:
    """Return a variable that holds what `_arrays` gave of it."""
    value = variable.get_value()
    return variable.replace(
        jax.random.wrap_key_data(array, impl=jax.random.key_impl(value)) if _is_key(value) else array
    )


def _is_key(value: jax.Array) -> bool:
    return jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def _check_stored(where: Path, stored: Mapping[str, Any], current: Mapping[str, jax.Array]) -> None:
    missing, unexpected = sorted(set(current) - set(stored)), sorted(set(stored) - set(current))
    wrong = [
        f"{name}: {tuple(stored[name].shape)}, expected {tuple(array.shape)}"
        for name, array in current.items()
        if name in stored and tuple(stored[name].shape) != tuple(array.shape)
    ]
    for what, names in (("has no", missing), ("has an unknown", unexpected), ("has the wrong shape of", wrong)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"{where} does not fit the run: it {what} {', '.join(names[:5])}{more}.")
