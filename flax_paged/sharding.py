"""From the logical axes of weights and activations to the axes of a device mesh: the one table.

Parameters name their axes when they are made, `nnx.Param(value, logical_axes=("heads", "embed"))`; which mesh axis each
name is split over is decided here. Without a mesh none of this matters.
"""

from collections.abc import Mapping

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Megatron-style tensor parallelism: heads, the MLP's hidden axis and the vocabulary are split, the rest is replicated.
LOGICAL_AXIS_RULES: Mapping[str, str | None] = {
    "embed": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "vocab": "tensor",
    "experts": "tensor",
}


def mesh_axis(logical_axis: str | None, mesh: Mesh, rules: Mapping[str, str | None] = LOGICAL_AXIS_RULES) -> str | None:
    """Return the mesh axis that a logical axis is split over, or None where it is replicated.

    Raises:
        ValueError: The logical axis is not in the rules.
    """
    if logical_axis is None:
        return None
    if logical_axis not in rules:
        raise ValueError(f"logical axis {logical_axis!r}: expected one of {sorted(rules)}.")
    axis = rules[logical_axis]
    return axis if axis in mesh.axis_names else None


def named_sharding(
    logical_axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    mesh: Mesh,
    rules: Mapping[str, str | None] = LOGICAL_AXIS_RULES,
) -> NamedSharding:
    """Return the sharding of an array with these logical axes; an axis that does not divide evenly is replicated.

    Args:
        logical_axes: A name or None for each axis.
        shape: Shape of the array.
        mesh: Device mesh.
        rules: Mesh axis of each logical axis.

    Returns:
        A NamedSharding over `mesh`.

    Raises:
        ValueError: The number of names is not the number of axes, or a name is unknown.
    """
    if len(logical_axes) != len(shape):
        raise ValueError(f"logical_axes={logical_axes} name {len(logical_axes)} axes of an array of shape {shape}.")
    axes = [mesh_axis(name, mesh, rules) for name in logical_axes]
    axes = [axis if axis and size % mesh.shape[axis] == 0 else None for axis, size in zip(axes, shape, strict=True)]
    return NamedSharding(mesh, PartitionSpec(*axes))


def param_shardings(
    state: nnx.State, mesh: Mesh, rules: Mapping[str, str | None] = LOGICAL_AXIS_RULES
) -> dict[tuple, NamedSharding]:
    """Return the sharding of each variable of a (possibly abstract) state, by path.

    Variables without `logical_axes` metadata are replicated.
    """
    shardings = {}
    for path, variable in nnx.to_flat_state(state):
        shape = jax.tree.leaves(variable)[0].shape
        logical_axes = variable.get_metadata().get("logical_axes", (None,) * len(shape))
        shardings[path] = named_sharding(logical_axes, shape, mesh, rules)
    return shardings
