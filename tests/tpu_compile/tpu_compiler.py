"""Compiles for a described TPU topology, on a machine without a TPU."""

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

TOPOLOGIES = {
    "v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1",
}  # fmt: skip


def compile_for(chip, function, args, donate_argnums=()):
    """Compile `function` for one core of `chip`; `args` are pytrees of anything with shape and dtype."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
    abstract_device = AbstractDevice(
        device_kind=device.device_kind, num_cores=getattr(device, "num_cores", 1), platform="tpu"
    )
    # Pallas asks the abstract mesh which TPU it lowers for.
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=abstract_device)
    sharding = SingleDeviceSharding(device)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function, donate_argnums=donate_argnums).lower(*args)
    return lowered.compile()
