"""The table of token vectors, which also gives the logits where input and output are tied."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_paged.nn.linear import contract_last


class Embedding(nnx.Module):
    """A vector for each token id.

    Args:
        num_embeddings: Number of ids.
        features: Size of a vector.
        initializer_range: Standard deviation of the initial vectors.
        dtype: Dtype of the table.
        rngs: Source of the initial table.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        initializer_range: float = 0.02,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        weight = jax.random.normal(rngs.params(), (num_embeddings, features)) * initializer_range
        self.weight = nnx.Param(weight.astype(dtype), logical_axes=("vocab", "embed"))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the vectors [..., features] of token ids i32[...]; an id out of range gives NaN, not another word."""
        return jnp.take(self.weight[...], tokens, axis=0, mode="fill")

    def attend(self, x: jax.Array) -> jax.Array:
        """Return f32 logits [..., num_embeddings] of x [..., features] against every vector (tied output)."""
        return contract_last(x, self.weight[...])
