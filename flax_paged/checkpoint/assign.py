"""Stream a checkpoint's tensors into a model's parameters, strictly: everything must fit before anything is read."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from tqdm import tqdm

from flax_paged.checkpoint.report import collapse_names, nearest_name, section, shape_lines
from flax_paged.checkpoint.source import FLOAT_DTYPES, TensorSource
from flax_paged.sharding import param_shardings

_CHECK_CHUNK = 1 << 20  # elements looked at in one go, so that checking a tensor needs no copy of it


@dataclasses.dataclass(frozen=True)
class WeightRule:
    """Which tensor of a checkpoint fills a parameter, and how.

    Args:
        name: Name of the tensor in the checkpoint.
        transform: Maps the tensor read to the parameter's array (a permutation, a transpose, a slice); None for as is.
        aliases: Other names under which the file may hold the same tensor, such as `lm_head.weight` of tied
            embeddings. Used where `name` is absent; where both are there they must be equal.
    """

    name: str
    transform: Callable[[np.ndarray], np.ndarray] | None = None
    aliases: tuple[str, ...] = ()


def path_name(path: tuple) -> str:
    """Return a parameter's path as one string: ("layers", 0, "mlp", "weight") is `layers.0.mlp.weight`."""
    return ".".join(map(str, path))


def assign(
    abstract_model: nnx.Module,
    source: TensorSource,
    rules: Mapping[str, WeightRule],
    *,
    ignorable: Callable[[str], bool] = lambda name: False,
    dtype=None,
    mesh: Mesh | None = None,
    progress: bool = True,
) -> nnx.Module:
    """Return the model with every parameter read from the checkpoint.

    Tensors are read, cast and placed one at a time, largest first, so that memory peaks near the size of the weights:
    the second copy of a tensor exists when little else is loaded yet.

    Args:
        abstract_model: Module of ShapeDtypeStructs, from `nnx.eval_shape`.
        source: The checkpoint.
        rules: Rule of each parameter, by its path joined with dots (`layers.0.self_attn.q_proj.weight`).
        ignorable: Tells which tensor names may go unused (rotary tables, masks that old checkpoints hold).
        dtype: Dtype of every parameter; None for the dtype it has in `abstract_model`.
        mesh: Mesh to shard over by the parameters' logical axes; None for the default device.
        progress: Show a bar on stderr, if that is a terminal.

    Returns:
        A new module over concrete arrays.

    Raises:
        ValueError: Tensors are missing, unexpected, of the wrong shape or no floats (one
            message lists them all), or a tensor holds NaN or infinity.
    """
    graphdef, state = nnx.split(abstract_model)
    variables = {path_name(path): variable for path, variable in nnx.to_flat_state(state)}
    _check_rules(rules, variables)
    tensor_names = _check_source(source, rules, variables, ignorable)
    shardings = {}
    if mesh is not None:
        shardings = {path_name(path): sharding for path, sharding in param_shardings(state, mesh).items()}

    arrays = {}
    largest_first = sorted(rules, key=lambda path: -int(np.prod(variables[path].shape)))
    total = sum(int(np.prod(source.shape(tensor_names[path]))) for path in rules)
    quiet = None if progress else True  # None: quiet where stderr is not a terminal
    with tqdm(total=total, desc="Loading weights", unit=" weights", unit_scale=True, disable=quiet) as bar:
        for path in largest_first:
            target = np.dtype(dtype if dtype is not None else variables[path].dtype)
            arrays[path] = _load_one(source, tensor_names[path], rules[path], target, shardings.get(path))
            bar.update(int(np.prod(source.shape(tensor_names[path]))))
    loaded = [(path, variable.replace(arrays[path_name(path)])) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(loaded))


def _check_rules(rules: Mapping[str, WeightRule], variables: Mapping[str, nnx.Variable]) -> None:
    """Raise where the rules and the model's variables are not the same set: a slip in the model's weights.py."""
    without_rule = [path for path in variables if path not in rules]
    without_variable = [path for path in rules if path not in variables]
    if without_rule or without_variable:
        raise ValueError(
            "the weight rules do not match the model."
            + section("Variables of the model without a rule:", collapse_names(without_rule))
            + section("Rules without a variable in the model:", collapse_names(without_variable))
        )


def _check_source(
    source: TensorSource,
    rules: Mapping[str, WeightRule],
    variables: Mapping[str, nnx.Variable],
    ignorable: Callable[[str], bool],
) -> dict[str, str]:
    """Return the tensor that fills each parameter; raise one error that lists all that does not fit."""
    available = source.names()
    present = set(available)
    expected = {name for rule in rules.values() for name in (rule.name, *rule.aliases)}
    unused = [name for name in available if name not in expected]
    unexpected = [name for name in unused if not ignorable(name)]
    tensor_names, missing, wrong_shape, wrong_dtype = {}, [], [], []
    for path, rule in rules.items():
        name = next((name for name in (rule.name, *rule.aliases) if name in present), None)
        if name is None:
            missing.append(rule.name)
            continue
        tensor_names[path] = name
        if np.dtype(source.dtype(name)) not in FLOAT_DTYPES:
            wrong_dtype.append(f"{name}: {source.dtype(name)}")
        got, wanted = _transformed_shape(source.shape(name), rule), tuple(variables[path].shape)
        if got != wanted:
            wrong_shape.append((name, got, wanted))
    if missing or unexpected or wrong_shape or wrong_dtype:
        raise ValueError(
            f"{source}: the checkpoint does not fit the model."
            + section("Missing tensors:", _with_nearest(missing, unused))
            + section("Unexpected tensors, which the model has no place for:", collapse_names(unexpected))
            + section("Tensors of the wrong shape:", shape_lines(wrong_shape))
            + section("Tensors that are not float32, float16 or bfloat16:", wrong_dtype)
        )
    _check_aliases(source, rules, present)
    return tensor_names


def _transformed_shape(shape: tuple[int, ...], rule: WeightRule) -> tuple[int, ...]:
    """Return the shape a rule gives; a transform that cannot take the tensor leaves it as stored, a mismatch."""
    if rule.transform is None:
        return tuple(shape)
    try:
        return tuple(rule.transform(np.broadcast_to(np.zeros((), np.bool_), shape)).shape)
    except ValueError:
        return tuple(shape)


def _with_nearest(missing: list[str], unused: list[str]) -> list[str]:
    """Return the missing names as lines, each with the unused tensor it may have been misspelt as."""
    spelled = collapse_names(missing)
    hints = {name: nearest_name(name, unused) for name in spelled if "[" not in name}
    return [f"{name} (the checkpoint has {hints[name]})" if hints.get(name) else name for name in spelled]


def _check_aliases(source: TensorSource, rules: Mapping[str, WeightRule], present: set[str]) -> None:
    """Raise where a file holds a tensor under two names with two contents, so that one would be silently dropped."""
    for rule in rules.values():
        names = [name for name in (rule.name, *rule.aliases) if name in present]
        for other in names[1:]:
            if not np.array_equal(source.read(names[0]), source.read(other)):
                raise ValueError(
                    f"{source}: {other} differs from {names[0]}, but the config says that they are one tensor "
                    "(tie_word_embeddings). Set tie_word_embeddings to false in config.json to use both, or remove one."
                )


def _load_one(
    source: TensorSource, name: str, rule: WeightRule, dtype: np.dtype, sharding: NamedSharding | None
) -> jax.Array:
    """Read, check, transform, cast and place one tensor."""
    array = source.read(name)
    if not _is_finite(array):
        raise ValueError(f"{source}: tensor {name} holds NaN or infinity. The file is damaged, or training diverged.")
    if rule.transform is not None:
        array = rule.transform(array)
    if array.dtype != dtype:
        with np.errstate(over="ignore"):  # overflow is reported below, by name
            array = array.astype(dtype)
        if not _is_finite(array):
            raise ValueError(f"{source}: tensor {name} does not fit into {dtype}. Load it as bfloat16 or float32.")
    array = np.ascontiguousarray(array)
    if sharding is None:
        placed = jax.device_put(array)
    else:
        placed = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    return placed.block_until_ready()  # so that only one tensor's host copy is alive


def _is_finite(array: np.ndarray) -> bool:
    """Tell whether every element is finite, by its exponent bits (numpy has no fast isfinite for bfloat16)."""
    kinds = {"float32": (np.uint32, 0x7F800000), "float16": (np.uint16, 0x7C00), "bfloat16": (np.uint16, 0x7F80)}
    unsigned, infinity = kinds[array.dtype.name]
    sign_off = np.iinfo(unsigned).max >> 1
    bits = np.ascontiguousarray(array).reshape(-1).view(unsigned)
    starts = range(0, bits.size, _CHECK_CHUNK)
    return all(int((bits[start : start + _CHECK_CHUNK] & sign_off).max()) < infinity for start in starts)
