"""Rows of keys, values and queries in the TPU kernel's buffers: reading, unpacking and writing them.

A buffer is [..., rows, lanes]. Narrow dtypes share 32-bit words along the rows: two rows in 16 bits, four in 8.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_paged.ops.page_layout import NUM_LANES


def rows_per_word(dtype):
    """Rows of a narrow dtype that share a 32-bit word; 1 for 32 bits."""
    return 4 // jnp.dtype(dtype).itemsize


def is_16_bit(dtype):
    """Whether two rows share a word."""
    return rows_per_word(dtype) == 2


def high_half(words):
    """The upper 16 bits of words, the lower ones zero."""
    return words & jnp.uint32(0xFFFF0000)


def pack_rows(x):
    """Rows of a narrow dtype as words."""
    return pltpu.bitcast(x, jnp.uint32) if rows_per_word(x.dtype) > 1 else x


def unpack_rows(x, dtype):
    """The inverse of `pack_rows`."""
    return pltpu.bitcast(x, dtype) if rows_per_word(dtype) > 1 else x


def read_words(config, ref, start=0, stride=1):
    """Rows start, start + stride, ... of a narrow buffer seen as words, each of them 2 or 4 of its rows.

    The stride divides the number of words under each index of the first dimension.
    """
    lanes, num_rows = ref.shape[-1], math.prod(ref.shape[:-1])
    num_words = num_rows // rows_per_word(ref.dtype)
    if config.interpret:  # the interpreter has no views of refs, so the value is viewed instead
        return pltpu.bitcast(ref[...].reshape(num_rows, lanes), jnp.uint32)[start::stride]
    if lanes != NUM_LANES:  # strided loads take one line of 128 lanes
        words = ref.bitcast(jnp.uint32)
        if stride == 1:
            return words[...].reshape(num_words, lanes)
        if stride == num_words // ref.shape[0]:
            return words[:, start, 0, :] if ref.ndim == 4 else words[:, start, :]
        return words[...].reshape(num_words // stride, stride, lanes)[:, start, :]
    view = ref.reshape(num_rows, lanes).bitcast(jnp.uint32)
    return view[...] if stride == 1 else view[pl.ds(start, num_words // stride, stride=stride), :]


def write_words(config, ref, start, words):
    """Write words [tokens, head_dim] to the rows 2 * start (low) and 2 * start + 1 (high) of every token."""
    tokens, rows, head_dim = ref.shape
    if config.interpret:
        pair = pltpu.bitcast(words, ref.dtype).reshape(tokens, 2, head_dim)
        ref[:, 2 * start, :] = pair[:, 0]
        ref[:, 2 * start + 1, :] = pair[:, 1]
    elif head_dim != NUM_LANES:
        ref.bitcast(jnp.uint32)[:, start, :] = words
    else:
        view = ref.reshape(tokens * rows, head_dim).bitcast(jnp.uint32)
        view[pl.ds(start, tokens, stride=rows // 2), :] = words


def _read_half(config, kv_ref, which, head):
    """Rows [n, lanes] of a 32-bit page buffer at index `which` of its dimension of two, of one head or all (None)."""
    groups, num_heads, _, lanes = kv_ref.shape
    if config.interpret or lanes != NUM_LANES:
        rows = kv_ref[:, :, which, :].reshape(groups * num_heads, lanes) if head is None else kv_ref[:, head, which, :]
        return rows
    view = kv_ref.reshape(groups * num_heads * 2, lanes)
    if head is None:
        return view[pl.ds(which, groups * num_heads, stride=2), :]
    return view[pl.ds(2 * head + which, groups, stride=2 * num_heads), :]


def _split_words(words, dtype):
    """Words (K low, V high) to the rows of K and of V.

    Packs row i with row i + n/2 instead of with its neighbour, which would need shuffles: result row 2i is word row i,
    result row 2i + 1 is word row i + n/2 (`key_order`). Attention does not mind the order of its keys.
    """
    n = words.shape[0] // 2
    first, second = words[:n], words[n:]
    low = (first & jnp.uint32(0xFFFF)) | (second << 16)
    high = (first >> 16) | high_half(second)
    return pltpu.bitcast(low, dtype), pltpu.bitcast(high, dtype)


def load_kv(config, kv_ref, head):
    """K and V of tokens as rows, of one head or (head None) of every head.

    Where they share the lanes, both are the same rows: zeros in q meet V, and the lanes of the result that come from K
    are not looked at.

    Args:
        config: The static configuration.
        kv_ref: [groups, num_kv_heads, 2, lanes], or in 8 bits [groups, num_kv_heads (packed) or 2 *, 4, lanes].
        head: KV head, or None.

    Returns:
        K and V, each [rows, lanes], in the order of `key_order`.
    """
    if rows_per_word(kv_ref.dtype) == 4:
        return _load_kv_of_8_bits(config, kv_ref, head)
    if is_16_bit(kv_ref.dtype):
        stride = 1 if head is None else kv_ref.shape[1]
        words = read_words(config, kv_ref, head or 0, stride)
        if not config.is_packed:
            return _split_words(words, kv_ref.dtype)
        rows = pltpu.bitcast(words, kv_ref.dtype)
        return rows, rows
    first, second = (_read_half(config, kv_ref, which, head) for which in (0, 1))
    if not config.is_packed:
        return first, second
    rows = jnp.concatenate([first, second], axis=0)
    return rows, rows


def _load_kv_of_8_bits(config, kv_ref, head):
    """A word is four tokens' K or four tokens' V, so there is nothing to split."""
    if config.is_packed:
        stride = 1 if head is None else kv_ref.shape[1]
        rows = pltpu.bitcast(read_words(config, kv_ref, head or 0, stride), kv_ref.dtype)
        return rows, rows
    stride = 2 if head is None else kv_ref.shape[1]
    words = (read_words(config, kv_ref, 2 * (head or 0) + which, stride) for which in (0, 1))
    return tuple(pltpu.bitcast(w, kv_ref.dtype) for w in words)


def key_order(config, rows, num_rows, num_heads, dtype):
    """Token and head that the rows (an integer array) of `load_kv` come from; `num_heads` is 1 where it took one head.

    In 16 bits two rows share a word: those of a pair of tokens where they are packed, else the two that `_split_words`
    brought together; in 8 bits those of four tokens. In 32 bits the first tokens of all pairs come before the second
    ones.
    """
    half = num_rows // 2
    if rows_per_word(dtype) == 4:
        row, which = rows >> 2, rows & 3
        return 4 * lax.div(row, num_heads) + which, lax.rem(row, num_heads)
    row, which = (rows >> 1, rows & 1) if is_16_bit(dtype) else (lax.rem(rows, half), lax.div(rows, half))
    if config.is_packed:
        return 2 * lax.div(row, num_heads) + which, lax.rem(row, num_heads)
    row = row + half * which
    return lax.div(row, num_heads), lax.rem(row, num_heads)
