"""Linear maps with the weight stored `[out, in]`, as checkpoints store it."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_paged.nn.lora import LoRA, StackedLoRA


def contract_last(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return `x @ weight.T`, multiplied in the weight's dtype and accumulated in float32.

    Args:
        x: [..., in], any float dtype.
        weight: [out, in].

    Returns:
        f32[..., out].
    """
    x = x.astype(weight.dtype)
    num_rows = x.size // x.shape[-1]
    if num_rows == 1 and weight.dtype.itemsize < 4 and jax.default_backend() == "cpu":
        # With one row XLA:CPU widens the whole weight to float32 first, six times slower than multiplying two rows.
        rows = jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0)))
        return _dot(rows, weight)[:1].reshape(*x.shape[:-1], -1)
    return _dot(x, weight)


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    dimensions = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, dimensions, preferred_element_type=jnp.float32)


class Linear(nnx.Module):
    """`y = x @ weight.T + bias`, accumulated in float32 and returned in x's dtype.

    An adapter in the attribute `lora` (see `flax_paged.training.add_lora`) is added before the sum is rounded.

    Args:
        in_features: Size of the axis that is contracted.
        out_features: Size of the axis that comes out.
        use_bias: Whether there is a bias.
        axes: Logical names of the weight's two axes (out, in); see `flax_paged.sharding`.
        initializer_range: Standard deviation of the initial weight; the bias starts at zero.
        dtype: Dtype of the parameters.
        rngs: Source of the initial weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        axes: tuple[str | None, str | None],
        initializer_range: float = 0.02,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        weight = jax.random.normal(rngs.params(), (out_features, in_features)) * initializer_range
        self.weight = nnx.Param(weight.astype(dtype), logical_axes=axes)
        self.bias = nnx.Param(jnp.zeros(out_features, dtype), logical_axes=axes[:1]) if use_bias else None
        self.lora: LoRA | StackedLoRA | None = nnx.data(None)

    def __call__(self, x: jax.Array, adapter_ids: jax.Array | None = None) -> jax.Array:
        """Map x [..., in] to [..., out] in x's dtype.

        Args:
            x: [..., in].
            adapter_ids: i32[...]: each token's adapter, where several are stacked; 0 for none.
        """
        y = contract_last(x, self.weight[...])
        if self.bias is not None:
            bias = self.bias[...].astype(jnp.float32)
            y = y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)
        if self.lora is not None:
            y = y + self.lora(x, adapter_ids)
        return y.astype(x.dtype)
