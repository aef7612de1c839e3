"""Scales for a quantised KV cache, measured on text."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_paged.attention import PagedAttention, cache_spec_for, drop_cache, init_cache
from flax_paged.cache import CacheSpec
from flax_paged.metadata import SequenceSlice, build_metadata
from flax_paged.ops.page_layout import to_standard_layout
from flax_paged.ops.quantization import largest_value


def calibrate_kv_scales(
    module: nnx.Module, prompts: Sequence[Sequence[int]], spec: CacheSpec, *, margin: float | None = None
) -> None:
    """Give a module an empty cache of `spec` with "per_head" scales measured on prompts.

    The prompts run once through a float32 cache; the scale of each KV head of each layer makes `margin` times the
    largest key (value) seen there the largest number of the cache's dtype. Larger ones met later saturate.

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
    longest = max(map(len, prompts))
    num_pages = -(-longest // spec.page_size)
    init_cache(module, cache_spec_for(module, num_pages=num_pages, page_size=spec.page_size, dtype=jnp.float32))
    layers = [x for _, x in nnx.iter_modules(module) if isinstance(x, PagedAttention) and x.kv_sharing_source is None]
    run = nnx.jit(lambda module, tokens, metadata: module(tokens, metadata))
    largest: list[Any] = [0.0] * len(layers)
    for prompt in prompts:
        tokens = np.zeros(longest, np.int32)
        tokens[: len(prompt)] = prompt
        metadata = build_metadata(
            [SequenceSlice(range(num_pages), 0, len(prompt))],
            page_size=spec.page_size,
            num_pages=num_pages,
            max_num_tokens=longest,
            max_num_seqs=1,
            max_pages_per_seq=num_pages,
        )
        run(module, tokens, metadata)
        for i, layer in enumerate(layers):
            pages = to_standard_layout(layer.kv_cache[...], layer.head_dim)
            largest[i] = np.maximum(largest[i], np.abs(np.asarray(pages)).max(axis=(0, 1, 3)))
    drop_cache(module)
    init_cache(module, spec)
    for layer, of_heads in zip(layers, largest, strict=True):
        scales = np.where(of_heads > 0, margin * of_heads / largest_value(spec.dtype), 1.0).astype(np.float32)
        for variable, values in ((layer.k_scale, scales[0::2]), (layer.v_scale, scales[1::2])):
            variable[...] = jnp.asarray(values)
