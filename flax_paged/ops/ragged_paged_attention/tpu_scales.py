"""Scales for each token and KV head in the TPU kernel: lanes of numbers in the order of the scores' columns.

They come in lines (`ops.scales_layout`), which follow the rows that `load_kv` gives the decode path. K's multiply the
scores and V's the weights, whose sum is taken without them.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flax_paged.ops.page_layout import NUM_LANES
from flax_paged.ops.ragged_paged_attention.tpu_rows import key_order
from flax_paged.ops.ragged_paged_attention.tpu_scores import page_bits


def num_lines(config, num_tokens):
    """Lines that the scales of so many tokens take."""
    return num_tokens * config.num_kv_heads // NUM_LANES


def decode_scales(config, refs, lines_ref, keys):
    """Return the factors on scores and on weights of tokens, f32[1, (token, kv head)] each; dead ones are 0.

    What is dead may hold NaN, which would outlive a weight of zero.

    Args:
        config: The static configuration.
        refs: The kernel's memory.
        lines_ref: f32[lines, 2, 128], of these tokens.
        keys: Where they stand.
    """
    lines = range(lines_ref.shape[0])
    k, v = (jnp.concatenate([lines_ref[i, pl.ds(which, 1), :] for i in lines], axis=1) for which in (0, 1))
    if keys.is_cut or config.num_mask_words:
        column = lax.broadcasted_iota(jnp.int32, k.shape, 1)
        token, _ = key_order(config, column, k.shape[1], config.num_kv_heads, refs.kv.dtype)
        is_live = _is_live(config, refs, keys, token, k.shape[1] // config.num_kv_heads)
        k, v = (jnp.where(is_live, x, jnp.float32(0)) for x in (k, v))
    return k, v


def load_head_scales(config, refs, lines_ref, keys):
    """Sort a block's scales by head, as the prefill path takes them, into `refs.head_scales`; dead ones are 0."""
    num_heads, num_rows = config.num_kv_heads, refs.head_scales.shape[1]
    shape = (num_rows, NUM_LANES)
    head = lax.broadcasted_iota(jnp.int32, shape, 0)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    # The scales of 128 tokens are as many lines as there are heads, and lie alike in all of those stretches.
    row = ((lane >> 2) * num_heads + jnp.minimum(head, num_heads - 1)) * 4 + (lane & 3)
    line, source = lax.div(row, NUM_LANES), lax.rem(row, NUM_LANES)
    for start in range(0, config.tokens_per_block, NUM_LANES):
        is_live = _is_live(config, refs, keys, start + lane, config.tokens_per_block)
        for which in (0, 1):
            scales = jnp.zeros(shape, jnp.float32)
            for i in range(num_heads):
                numbers = lines_ref[num_lines(config, start) + i, pl.ds(which, 1), :]
                numbers = jnp.take_along_axis(
                    jnp.broadcast_to(numbers, shape), source, axis=1, mode="promise_in_bounds"
                )  # fmt: skip
                scales = jnp.where(line == i, numbers, scales)
            refs.head_scales[which, :, pl.ds(start, NUM_LANES)] = jnp.where(is_live, scales, jnp.float32(0))


def _is_live(config, refs, keys, token, num_tokens):
    """Whether the scales of tokens, which count from the first of `num_tokens` keys, have been fetched and are live."""
    low, high = keys.live_bounds()
    is_live = (token >= low) & (token < high)
    if config.num_mask_words:
        is_live &= page_bits(config, refs, keys, token, num_tokens) == 1
    return is_live
