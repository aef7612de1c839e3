"""The gated MLP and the activations that a config can name."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_paged.nn.linear import Linear


def _relu2(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


def _quick_gelu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(1.702 * x)


_gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)

# By the names of `hidden_act` in config.json.
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": jax.nn.relu,
    "relu2": _relu2,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}


def check_activation(name: str) -> None:
    """Raise a ValueError that lists the known activations, unless `name` is one."""
    if name not in ACTIVATIONS:
        raise ValueError(f"hidden_act={name!r} is not a known activation; expected one of {sorted(ACTIVATIONS)}.")


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`; with silu this is SwiGLU.

    Args:
        features: Size of the input and output.
        hidden_features: Size in between.
        activation: Name in `ACTIVATIONS`.
        use_bias: Whether the three maps have biases.
        initializer_range: Standard deviation of the initial weights.
        dtype: Dtype of the parameters.
        rngs: Source of the initial weights.

    Raises:
        ValueError: Unknown activation.

    Reference: Shazeer 2020, "GLU Variants Improve Transformer".
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        activation: str = "silu",
        use_bias: bool = False,
        initializer_range: float = 0.02,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_activation(activation)
        linear = functools.partial(
            Linear, use_bias=use_bias, initializer_range=initializer_range, dtype=dtype, rngs=rngs
        )
        self.gate_proj = linear(features, hidden_features, axes=("mlp", "embed"))
        self.up_proj = linear(features, hidden_features, axes=("mlp", "embed"))
        self.down_proj = linear(hidden_features, features, axes=("embed", "mlp"))
        self.activation = activation

    def __call__(self, x: jax.Array, adapter_ids: jax.Array | None = None) -> jax.Array:
        """Map x [..., features] to the same shape and dtype; `adapter_ids` as in `Linear`."""
        gate = ACTIVATIONS[self.activation](self.gate_proj(x, adapter_ids))  # [..., hidden_features]
        return self.down_proj(gate * self.up_proj(x, adapter_ids), adapter_ids)
