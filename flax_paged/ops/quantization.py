"""Numbers in 8 bits: what a quantised cache or output stores, and how it is rounded."""

from typing import Any

import jax
import jax.numpy as jnp

QUANTIZED_DTYPES = (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)


def is_quantized(dtype: Any) -> bool:
    """Whether a dtype holds numbers that mean something only with a scale."""
    return jnp.dtype(dtype) in QUANTIZED_DTYPES


def largest_value(dtype: Any) -> float:
    """Return the largest number that a quantised dtype holds; int8 is kept symmetric, -127 to 127."""
    dtype = jnp.dtype(dtype)
    return 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)


def quantize(x: jax.Array, dtype: Any, scale: Any = 1.0) -> jax.Array:
    """Divide by a scale, round to nearest even and saturate.

    Args:
        x: Any floating-point array.
        dtype: int8, float8_e4m3fn or float8_e5m2.
        scale: Broadcasts to x; `quantize(x, dtype, scale) * scale` is x but for the rounding.

    Returns:
        An array of this dtype. Numbers out of range become the largest of their sign; NaN stays NaN in float8 and
        becomes 0 in int8.
    """
    limit = largest_value(dtype)
    scaled = jnp.clip(x.astype(jnp.float32) / scale, -limit, limit)
    if jnp.dtype(dtype) == jnp.int8:
        scaled = jnp.round(jnp.nan_to_num(scaled))
    return scaled.astype(dtype)


def quantize_per_head(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Quantise each head of each token with a scale of its own, so that its largest number is the dtype's largest.

    Args:
        x: [T, KV, D], floating point.
        dtype: int8, float8_e4m3fn or float8_e5m2.

    Returns:
        [T, KV, D] of this dtype, and the scales f32[T, KV, 1]; a head of zeros has scale 1.
    """
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1, keepdims=True)
    scale = jnp.where(largest > 0, largest / largest_value(dtype), 1.0)
    return quantize(x, dtype, scale), scale
