"""Scales for a quantised KV cache, measured on text."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_paged.attention import PagedAttention, cache_spec_for, drop_cache, init_cache
from flax_paged.cache import CacheSpec
from flax_paged.metadata import SequenceSlice, build_metadata
from flax_paged.ops.page_layout import to_standard_layout
from flax_paged.ops.quantization import largest_value, quantize

# Scales tried for a float8 cache, evenly over an octave: a power of two more or less rounds alike.
_FACTORS = 2.0 ** (np.arange(16, dtype=np.float32) / 16)


def calibrate_kv_scales(
    module: nnx.Module, prompts: Sequence[Sequence[int]], spec: CacheSpec, *, margin: float | None = None
) -> None:
    """Give a module an empty cache of `spec` with "per_head" scales measured on prompts.

    The prompts run through a float32 cache. The scale of each KV head of each layer makes `margin` times the largest
    key (value) seen there the largest number of the cache's dtype; larger ones met later saturate. Of float8, whose
    rounding is relative, the scales from that one to twice it do as well for most numbers; the one is taken that has
    the least squared error on the prompts, as large numbers that keep coming back (outlier channels of keys) are then
    near ones that the dtype holds.

        calibrate_kv_scales(model, prompts, cache_spec_for(model, num_pages=1024, page_size=16, dtype="float8_e4m3fn"))

    Args:
        module: A module that is called as `module(tokens, metadata)`; any cache in it is replaced.
        prompts: Token ids of typical texts, a few thousand tokens in all.
        spec: The cache to serve with; its `scales` must be "per_head".
        margin: Room for numbers larger than those seen. None means 1 for int8, whose steps it makes coarser, and 2 for
            float8, where room costs only the smallest numbers.

    Raises:
        ValueError: The spec has no such scales, there is no prompt, one is empty, or `margin` is not positive.
    """
    if spec.scales != "per_head":
        raise ValueError(f"calibrate_kv_scales(spec.scales={spec.scales!r}): expected 'per_head' of int8 or float8.")
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("calibrate_kv_scales(prompts): expected at least one prompt, each of at least one token.")
    if margin is None:
        margin = 1.0 if spec.dtype == jnp.int8 else 2.0
    if not margin > 0:
        raise ValueError(f"calibrate_kv_scales({margin=}): expected a positive number.")
    layers = [x for _, x in nnx.iter_modules(module) if isinstance(x, PagedAttention) and x.kv_sharing_source is None]
    largest = np.zeros((len(layers), 2 * spec.num_kv_heads), np.float32)
    for heads in _keys_and_values(module, layers, prompts, spec.page_size):
        largest = np.maximum(largest, [np.abs(x).max(axis=(0, 2)) for x in heads])
    scales = np.where(largest > 0, margin * largest / largest_value(spec.dtype), 1.0).astype(np.float32)
    if spec.dtype != jnp.int8:
        errors = np.zeros((len(_FACTORS), *scales.shape))
        for heads in _keys_and_values(module, layers, prompts, spec.page_size):
            for i, x in enumerate(heads):
                errors[:, i] += [_squared_error(x, factor * scales[i], spec.dtype) for factor in _FACTORS]
        scales *= _FACTORS[errors.argmin(axis=0)]
    drop_cache(module)
    init_cache(module, spec)
    for layer, of_heads in zip(layers, scales, strict=True):
        layer.k_scale[...], layer.v_scale[...] = jnp.asarray(of_heads[0::2]), jnp.asarray(of_heads[1::2])


def _keys_and_values(
    module: nnx.Module, layers: Sequence[PagedAttention], prompts: Sequence[Sequence[int]], page_size: int
) -> Iterator[list[np.ndarray]]:
    """Run each prompt, and yield what each layer's cache then holds, float32 [tokens, 2 * KV, D]."""
    longest = max(map(len, prompts))
    num_pages = -(-longest // page_size)
    init_cache(module, cache_spec_for(module, num_pages=num_pages, page_size=page_size, dtype=jnp.float32))
    run = nnx.jit(lambda module, tokens, metadata: module(tokens, metadata))
    for prompt in prompts:
        tokens = np.zeros(longest, np.int32)
        tokens[: len(prompt)] = prompt
        metadata = build_metadata(
            [SequenceSlice(range(num_pages), 0, len(prompt))],
            page_size=page_size,
            num_pages=num_pages,
            max_num_tokens=longest,
            max_num_seqs=1,
            max_pages_per_seq=num_pages,
        )
        run(module, tokens, metadata)
        pools = [np.asarray(to_standard_layout(layer.kv_cache[...], layer.head_dim)) for layer in layers]
        yield [pool.reshape(-1, *pool.shape[2:])[: len(prompt)] for pool in pools]


@functools.partial(jax.jit, static_argnums=2)
def _squared_error(heads: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """Squared error of heads [tokens, heads, D] when they are stored with these scales f32[heads], f32[heads]."""
    scales = scales[None, :, None]
    stored = quantize(heads, dtype, scales).astype(jnp.float32) * scales
    return jnp.sum(jnp.square(stored - heads), axis=(0, 2))
