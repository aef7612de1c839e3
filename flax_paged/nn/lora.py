"""Low-rank adapters of linear maps: one that is trained or served, and several served side by side."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def _times(x: jax.Array, weight: jax.Array, dimensions: str) -> jax.Array:
    return jnp.einsum(dimensions, x.astype(weight.dtype), weight, preferred_element_type=jnp.float32)


class LoRA(nnx.Module):
    """`scale * (x @ a.T) @ b.T`, which `Linear` adds to its own product.

    `b` starts at zero, so a fresh adapter changes nothing. Both factors have the layout of PEFT's files.

    Args:
        in_features: Size of the linear map's input.
        out_features: Size of its output.
        rank: Size r of the axis between the factors.
        alpha: The product is scaled by `alpha / rank`.
        axes: Logical names of the linear map's axes (out, in); see `flax_paged.sharding`.
        dtype: Dtype of the factors.
        rngs: Source of the initial `a`.

    Raises:
        ValueError: `rank` is less than 1.

    Reference: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        alpha: float,
        axes: tuple[str | None, str | None] = (None, None),
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if rank < 1:
            raise ValueError(f"LoRA({rank=}): expected at least 1.")
        bound = 1 / math.sqrt(in_features)
        a = jax.random.uniform(rngs.params(), (rank, in_features), minval=-bound, maxval=bound)
        self.a = nnx.LoRAParam(a.astype(dtype), logical_axes=(None, axes[1]))
        self.b = nnx.LoRAParam(jnp.zeros((out_features, rank), dtype), logical_axes=(axes[0], None))
        self.scale = float(alpha) / rank

    @property
    def rank(self) -> int:
        """Size of the axis between the factors."""
        return self.a.shape[0]

    def __call__(self, x: jax.Array, adapter_ids: jax.Array | None = None) -> jax.Array:
        """Map x [..., in] to f32[..., out]; every token uses this adapter, so `adapter_ids` is not read."""
        return self.scale * _times(_times(x, self.a[...], "...i,ri->...r"), self.b[...], "...r,or->...o")

    def delta(self) -> jax.Array:
        """Return what the adapter adds to the linear map's weight, f32[out, in]."""
        a, b = self.a[...].astype(jnp.float32), self.b[...].astype(jnp.float32)
        return self.scale * jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)


class StackedLoRA(nnx.Module):
    """Several adapters of one linear map, chosen token by token.

    Token t with adapter id n > 0 gets the product of adapter n, one with id 0 gets nothing. All adapters are multiplied
    in one go and the products of the others set to zero in between, where an adapter is only `rank` wide: the cost
    is that of one adapter of the ranks' sum, whatever mix of adapters the batch has, with no sorting of tokens.

    Args:
        adapters: Adapters of the same sizes, the first one of id 1; None for one that leaves this linear map alone.
            Smaller ranks are padded with zeros to the largest.

    Raises:
        ValueError: There is no adapter, or two differ in size.
    """

    def __init__(self, adapters: Sequence[LoRA | None]):
        present = [adapter for adapter in adapters if adapter is not None]
        if not present:
            raise ValueError("StackedLoRA(adapters): expected at least one adapter.")
        sizes = {(adapter.a.shape[1], adapter.b.shape[0]) for adapter in present}
        if len(sizes) > 1:
            raise ValueError(f"StackedLoRA(adapters): expected adapters of one size (in, out), got {sorted(sizes)}.")
        (in_features, out_features), rank = sizes.pop(), max(adapter.rank for adapter in present)
        a = jnp.zeros((len(adapters), rank, in_features), present[0].a.dtype)
        b = jnp.zeros((len(adapters), out_features, rank), present[0].b.dtype)
        for i, adapter in enumerate(adapters):
            if adapter is not None:
                a = a.at[i, : adapter.rank].set(adapter.a[...].astype(a.dtype))
                scaled = adapter.scale * adapter.b[...].astype(jnp.float32)
                b = b.at[i, :, : adapter.rank].set(scaled.astype(b.dtype))
        self.a = nnx.LoRAParam(a)
        self.b = nnx.LoRAParam(b)

    @property
    def num_adapters(self) -> int:
        """Number of adapters: ids go from 1 to this."""
        return self.a.shape[0]

    def __call__(self, x: jax.Array, adapter_ids: jax.Array | None = None) -> jax.Array:
        """Map x [..., in] to f32[..., out].

        Args:
            x: [..., in].
            adapter_ids: i32[...]: each token's adapter, 0 for none. None means 0 for all.
        """
        if adapter_ids is None:
            return jnp.zeros((*x.shape[:-1], self.b.shape[1]), jnp.float32)
        narrow = _times(x, self.a[...], "...i,nri->...nr")  # [..., N, r]
        is_chosen = adapter_ids[..., None] == jnp.arange(1, self.a.shape[0] + 1, dtype=adapter_ids.dtype).reshape(
            (1,) * adapter_ids.ndim + (-1,)
        )  # [..., N]
        narrow = jnp.where(is_chosen[..., None], narrow, 0.0)
        return _times(narrow, self.b[...], "...nr,nor->...o")
