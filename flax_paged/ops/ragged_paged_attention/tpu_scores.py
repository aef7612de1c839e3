"""From products to weights in the TPU kernel: scale, bias and masks of scores, and the end of a running softmax.

Scores are in units of log2, so that weights are powers of two.
"""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flax_paged.ops.page_layout import NUM_LANES
from flax_paged.ops.ragged_paged_attention.tpu_pipeline import LOG2_E, Item, page_mask_bits
from flax_paged.ops.ragged_paged_attention.tpu_rows import key_order, rows_per_word

MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)
LN_2 = math.log(2)


@dataclasses.dataclass(frozen=True)
class Keys:
    """A stretch of keys in a page buffer, seen by the queries of an item."""

    item: Item
    start: Any  # position of the first key (traced)
    is_cut: bool  # whether some of them may be hidden from some of the queries

    def live_bounds(self):
        """Bounds of the keys that the item sees, counted from the first one; they may lie outside."""
        return self.item.key_start - self.start, self.item.key_end - self.start

    def after(self, num_tokens):
        """Return the stretch that begins so many tokens later."""
        return dataclasses.replace(self, start=self.start + num_tokens)


def repeat_lanes(x, width):
    """[rows, 128] to [rows, width] by repetition."""
    return jnp.concatenate([x] * (width // NUM_LANES), axis=1)


def fold_lanes(op, x):
    """[rows, n * 128] to [rows, 128]."""
    return functools.reduce(op, (x[:, i : i + NUM_LANES] for i in range(0, x.shape[1], NUM_LANES)))


def per_head(config, refs, name, width, head=None):
    """An option with a number for each query head: f32[num_q_rows, width], or [1, width] of one head."""
    index = config.per_head.index(name)
    x = refs.per_head[index] if head is None else refs.per_head[index, pl.ds(head, 1), :]
    return repeat_lanes(x, width)


def _scale_and_cap(config, refs, products, head=None, token_scale=None):
    """Scale and cap products [rows, keys], of all query heads or of those that share a KV head with `head`.

    `token_scale` f32[1, keys] or None.
    """
    scores = products
    if token_scale is not None:
        scores *= token_scale if config.has("k_scale") else token_scale * jnp.float32(config.score_factor)
    if config.has("k_scale"):
        scores *= per_head(config, refs, "k_scale", scores.shape[1], head)
    elif config.score_factor != 1 and token_scale is None:
        scores *= jnp.float32(config.score_factor)
    if not config.soft_cap:
        return scores
    return jnp.tanh(scores) * jnp.float32(config.soft_cap * LOG2_E)


def page_bits(config, refs, keys, token, num_tokens):
    """1 where the page mask shows the page of a token, else 0; tokens count from the first of `num_tokens` keys."""
    first_page = lax.div(keys.start, config.page_size)
    page = lax.div(keys.start + token, config.page_size) - first_page
    most_pages = (num_tokens - 2) // config.page_size + 2
    words = [page_mask_bits(config, refs, keys.item.sequence, first_page + i) for i in range(0, most_pages, 32)]
    word = jnp.full(page.shape, words[0])
    for i, bits in enumerate(words[1:], 1):
        word = jnp.where(page >> 5 == i, bits, word)
    return lax.shift_right_logical(word, page & 31) & 1


# --- Decode: rows are query heads, columns are (token, kv head) ------------------------------------------------------


def decode_scores(config, refs, products, kv_dtype, keys, token_scale=None):
    """Turn products [query heads, (token, kv head)] into scores; those of other kv heads and hidden tokens are low."""
    scores = _scale_and_cap(config, refs, products, token_scale=token_scale)
    num_keys, num_heads = scores.shape[1], config.num_kv_heads
    if config.has("slopes"):
        column = lax.broadcasted_iota(jnp.int32, (1, num_keys), 1)
        token, _ = key_order(config, column, num_keys, num_heads, kv_dtype)
        distance = jnp.abs(keys.item.position - keys.start - token).astype(jnp.float32)
        scores -= per_head(config, refs, "slopes", num_keys) * distance
    scores += _other_heads_bias(config, scores.shape, kv_dtype)
    if config.num_mask_words:
        column = lax.broadcasted_iota(jnp.int32, (1, num_keys), 1)
        token, _ = key_order(config, column, num_keys, num_heads, kv_dtype)
        page_bit = page_bits(config, refs, keys, token, num_keys // num_heads)
        # Twice hidden is -inf, which does no harm: m begins at MASK_VALUE.
        scores += jnp.where(page_bit == 1, jnp.float32(0), jnp.float32(MASK_VALUE))
    if not keys.is_cut:
        return scores
    column = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    token, _ = key_order(config, column, num_keys, num_heads, kv_dtype)
    low, high = keys.live_bounds()
    return jnp.where((token >= low) & (token < high), scores, jnp.float32(MASK_VALUE))


def _other_heads_bias(config, shape, kv_dtype):
    """0 where the column belongs to the row's kv head, else very low."""
    num_rows, num_keys = shape
    packing = rows_per_word(kv_dtype)
    # The heads of narrow rows repeat, so that one period's mask serves for all.
    period = math.lcm(NUM_LANES, packing * config.num_kv_heads)
    width = period if packing > 1 and num_keys % period == 0 else num_keys
    column = lax.broadcasted_iota(jnp.int32, (num_rows, width), 1)
    query_head = lax.div(lax.broadcasted_iota(jnp.int32, (num_rows, width), 0), config.num_queries_per_kv)
    _, key_head = key_order(config, column, num_keys, config.num_kv_heads, kv_dtype)
    bias = jnp.where(key_head == query_head, jnp.float32(0), jnp.float32(MASK_VALUE))
    return jnp.concatenate([bias] * (num_keys // width), axis=1)


# --- Prefill: rows are (query head, query) of one kv head, columns its tokens ----------------------------------------


@dataclasses.dataclass(frozen=True)
class PrefillMask:
    """What the scores of a block need beside its products, the same for every head; None where it is not needed."""

    is_visible: Any  # bool[queries, keys]
    distance: Any  # f32[queries, keys], of query and key


def prefill_mask(config, refs, keys, q_slot):
    """Return the mask of a block of keys for the queries in a slot of `refs.q`."""
    shape = (config.queries_per_block, config.tokens_per_block)
    if not (keys.is_cut or config.has("slopes")):
        return PrefillMask(None, None)
    row = lax.broadcasted_iota(jnp.int32, shape, 1)
    token = key_order(config, row, config.tokens_per_block, 1, refs.kv.dtype)[0]
    key = keys.start + token
    query = keys.item.position + lax.broadcasted_iota(jnp.int32, shape, 0)
    distance = jnp.abs(query - key).astype(jnp.float32) if config.has("slopes") else None
    if not keys.is_cut:
        return PrefillMask(None, distance)
    is_visible = _is_visible(config, keys, query, key)
    if config.num_mask_words:
        is_visible &= page_bits(config, refs, keys, token, config.tokens_per_block) == 1
    if config.has_draft_mask:
        is_visible &= _sees_draft(config, refs.draft.at[q_slot], key - keys.item.context_len)
    return PrefillMask(is_visible, distance)


def _sees_draft(config, words_ref, index):
    """Whether queries see keys by the draft mask; `index` i32[queries, keys] is the key's place in the step."""
    words = words_ref[:, 0, :]  # [queries, words]
    word = jnp.zeros_like(index)
    for i in range(config.num_draft_words):
        word = jnp.where(index >> 5 == i, words[:, i : i + 1], word)
    return (index < 0) | (lax.shift_right_logical(word, index & 31) & 1 == 1)


def is_edge_block(config, item, start):
    """Whether some query of a prefill item does not see some key of the block that begins at position `start`."""
    end = start + config.tokens_per_block
    is_edge = end > (item.position + 1 if config.causal else item.key_end)
    last = item.position + item.num_queries - 1
    if config.sliding_window is not None:
        is_edge |= start <= last - config.sliding_window
        if not config.causal:
            is_edge |= end > item.position + config.sliding_window
    if config.attention_chunk_size is not None:
        size = config.attention_chunk_size
        is_edge |= start < last - lax.rem(last, size)
        if not config.causal:
            is_edge |= end > item.position - lax.rem(item.position, size) + size
    if config.has_draft_mask:
        is_edge |= end > item.context_len
    return is_edge


def _is_visible(config, keys, query, key):
    mask = key <= query if config.causal else key < keys.item.key_end
    if config.sliding_window is not None:
        mask &= key > query - config.sliding_window
        if not config.causal:
            mask &= key < query + config.sliding_window
    if config.attention_chunk_size is not None:
        mask &= lax.div(key, config.attention_chunk_size) == lax.div(query, config.attention_chunk_size)
    return mask


def prefill_scores(config, refs, products, mask, head, token_scale=None):
    """Turn products [(query head, query), keys] of `config.heads_per_chunk` query heads from `head` on into scores."""
    scores = _scale_and_cap(config, refs, products, head, token_scale)

    def for_heads(array):
        return jnp.concatenate([array] * config.heads_per_chunk, axis=0)

    if mask.distance is not None:
        slopes = [
            per_head(config, refs, "slopes", scores.shape[1], head + i) for i in range(config.heads_per_chunk)
        ]  # fmt: skip
        scores -= jnp.concatenate([slope * mask.distance for slope in slopes], axis=0)
    if mask.is_visible is not None:
        scores = jnp.where(for_heads(mask.is_visible), scores, jnp.float32(MASK_VALUE))
    return scores


# --- The end of a running softmax ------------------------------------------------------------------------------------


def normalize(m, total, acc, sinks):
    """End a running softmax; rows that have seen no key give zeros.

    Args:
        m: f32[rows, 1], the largest score.
        total: f32[rows, 1], the sum of the weights.
        acc: f32[rows, head_dim], the sum of the values with these weights.
        sinks: f32[rows or 1, 1], one more logit without a value, or None.

    Returns:
        f32[rows, head_dim].
    """
    sees_none = m <= MASK_VALUE / 2
    if sinks is None:
        return jnp.where(sees_none, 0.0, acc / jnp.where(sees_none, 1.0, total))
    largest = jnp.maximum(m, sinks)
    # Where no key was seen this is exp2 of a hugely negative number: 0, and so is the result.
    factor = jnp.exp2(m - largest)
    return acc * (factor / (total * factor + jnp.exp2(sinks - largest)))


def log_sum_exp(m, total, sinks):
    """Return the natural logarithm of a softmax's denominator, f32[rows, 1]; the arguments are those of `normalize`."""
    if sinks is None:
        sees_none = m <= MASK_VALUE / 2
        return jnp.where(sees_none, -jnp.inf, m * LN_2 + jnp.log(jnp.where(sees_none, 1.0, total)))
    largest = jnp.maximum(m, sinks)
    return largest * LN_2 + jnp.log(total * jnp.exp2(m - largest) + jnp.exp2(sinks - largest))
