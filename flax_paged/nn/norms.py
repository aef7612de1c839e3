"""Normalisation layers."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis.

    Computed in float32; the normalised x is cast back to x's dtype before it is multiplied by the weight, the order in
    which published checkpoints were trained.

    Args:
        features: Size of the last axis.
        eps: Added to the mean square.
        axis: Logical name of the axis; see `flax_paged.sharding`.
        dtype: Dtype of the weight, which starts at one.

    Reference: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """

    def __init__(self, features: int, *, eps: float, axis: str | None = "embed", dtype: Any = jnp.float32):
        self.weight = nnx.Param(jnp.ones(features, dtype), logical_axes=(axis,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise x [..., features]; same shape and dtype."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normalised = (wide * jax.lax.rsqrt(mean_square + self.eps)).astype(x.dtype)
        weight = self.weight[...].astype(x.dtype)
        return normalised * weight.reshape((1,) * (x.ndim - 1) + weight.shape)
