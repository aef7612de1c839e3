"""Which keys a query sees and how products become scores: one description for every portable implementation."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Finite, so that the difference of two hidden scores is 0 and not NaN.
HIDDEN = -1e30
BITS_PER_WORD = 32


@dataclasses.dataclass(frozen=True)
class AttentionRules:
    """Scores and masks of one attention call; the fields are arguments of `api.ragged_paged_attention`.

    Args:
        sm_scale: Factor on the products.
        sliding_window: Keys that a query sees, its own included; None for all.
        soft_cap: Cap on the scaled scores; None for none.
        attention_chunk_size: A query sees keys of its own chunk only; None for all.
        causal: Whether later keys are hidden.
        alibi_slopes: f32[H] or None.
        sinks: f32[H] or None.
    """

    sm_scale: Any
    sliding_window: int | None = None
    soft_cap: float | None = None
    attention_chunk_size: int | None = None
    causal: bool = True
    alibi_slopes: jax.Array | None = None
    sinks: jax.Array | None = None

    def oldest_key(self, positions: jax.Array) -> jax.Array:
        """Return the position of the first key that a query at each position sees."""
        oldest = jnp.zeros_like(positions)
        if self.sliding_window is not None:
            oldest = jnp.maximum(oldest, positions - self.sliding_window + 1)
        if self.attention_chunk_size is not None:
            oldest = jnp.maximum(oldest, positions // self.attention_chunk_size * self.attention_chunk_size)
        return oldest

    def newest_key(self, positions: jax.Array, seq_lens: jax.Array) -> jax.Array:
        """Return the position of the last key that a query at each position sees."""
        if self.causal:
            return positions
        newest = seq_lens - 1
        if self.sliding_window is not None:
            newest = jnp.minimum(newest, positions + self.sliding_window - 1)
        if self.attention_chunk_size is not None:
            end = (positions // self.attention_chunk_size + 1) * self.attention_chunk_size
            newest = jnp.minimum(newest, end - 1)
        return newest

    def is_visible(self, query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
        """Return the mask, both arguments broadcast; keys past the sequence's end are for the caller to hide."""
        distance = query_positions - key_positions
        mask = distance >= 0 if self.causal else jnp.full(distance.shape, True)
        if self.sliding_window is not None:
            mask &= jnp.abs(distance) < self.sliding_window
        if self.attention_chunk_size is not None:
            mask &= query_positions // self.attention_chunk_size == key_positions // self.attention_chunk_size
        return mask

    def scores(self, products: jax.Array, mask: jax.Array, slopes: jax.Array | None, distance: jax.Array) -> jax.Array:
        """Return float32 scores: scale, cap, ALiBi, mask, in this order.

        Args:
            products: f32[..., L] of queries and keys.
            mask: Broadcasts to it; hidden scores are very low.
            slopes: ALiBi slope of each row, broadcasts to it, or None.
            distance: Query position less key position, broadcasts to it.
        """
        scores = products * self.sm_scale
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        if slopes is not None:
            scores = scores - slopes * jnp.abs(distance).astype(jnp.float32)
        return jnp.where(mask, scores, HIDDEN)


def sees_draft(words: jax.Array, index: jax.Array) -> jax.Array:
    """Read a draft-tree mask.

    Args:
        words: i32[R, W], the mask of each row: bit b of word w stands for the step's token 32 * w + b.
        index: i32[R, L], the key's place among the step's tokens of its sequence; negative for the context.

    Returns:
        bool[R, L]: whether the row sees the key. The context is seen; tokens past the last word are not.
    """
    num_words = words.shape[1]
    word = jnp.take_along_axis(words, jnp.clip(index // BITS_PER_WORD, 0, num_words - 1), axis=1)
    bit = lax.shift_right_logical(word, index % BITS_PER_WORD) & 1
    return (index < 0) | ((bit == 1) & (index < num_words * BITS_PER_WORD))


def normalize(
    largest: jax.Array, total: jax.Array, values: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """End an online softmax.

    Args:
        largest: f32[..., 1], the largest score of each row, `HIDDEN` if it has seen no key.
        total: f32[..., 1], the sum of exp(score - largest).
        values: f32[..., D], the sum of the values with these weights.
        sinks: Logit of each row that takes weight and has no value, broadcasts to f32[..., 1], or None.

    Returns:
        The attention's result f32[..., D], zeros where no key was seen, and the logarithm of the softmax's denominator
        f32[..., 1], -inf where it is empty.
    """
    sees_none = largest <= HIDDEN / 2
    total, values = jnp.where(sees_none, 0.0, total), jnp.where(sees_none, 0.0, values)
    if sinks is not None:
        new_largest = jnp.maximum(largest, sinks)
        factor = jnp.exp(largest - new_largest)
        largest, total, values = new_largest, total * factor + jnp.exp(sinks - new_largest), values * factor
    is_empty = total == 0
    lse = jnp.where(is_empty, -jnp.inf, largest + jnp.log(jnp.where(is_empty, 1.0, total)))
    return values / jnp.where(is_empty, 1.0, total), lse
