"""From logits to token ids, on the device: a row is a token to sample, and each has its own parameters.

No result depends on another row: a row's random number comes from its own key, and where a cheap route may fail for one
row (`_thresholds`), that row alone takes the slow one.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from flax_paged.generation.sampling_params import GREEDY_BELOW

# Most likely tokens that are looked at before a row's whole vocabulary is searched.
_NUM_CANDIDATES = 64
# Width of the blocks in which the cumulative distribution is searched.
_CDF_BLOCK = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingInputs:
    """Parameters of each row. Padding rows are greedy: zeros, and ones where that means "off".

    Fields:
        temperature: f32[N]; below 1e-5 is greedy.
        top_k: i32[N]; 0 keeps all.
        top_p: f32[N]; 1 keeps all.
        min_p: f32[N]; 0 keeps all.
        seeds: u32[N, 2]. High and low half of each row's 64-bit seed.
        counters: u32[N]. Place of the token in its answer; with the seed it makes the row's random number.
    """

    temperature: Any  # f32[N]
    top_k: Any  # i32[N]
    top_p: Any  # f32[N]
    min_p: Any  # f32[N]
    seeds: Any  # u32[N, 2]
    counters: Any  # u32[N]


def sample(logits: jax.Array, inputs: SamplingInputs) -> jax.Array:
    """Choose a token in each row.

    Args:
        logits: [N, V], any float dtype.
        inputs: Parameters of the N rows.

    Returns:
        i32[N]. Greedy rows get the first of the most likely tokens, the others a draw from what temperature, min-p,
        top-k and top-p leave.
    """
    logits = logits.astype(jnp.float32)
    greedy = _argmax(logits)
    is_greedy = inputs.temperature < GREEDY_BELOW

    def draw() -> jax.Array:
        # Greedy rows pass through here in a mixed batch; temperature 1 keeps them finite.
        temperature = jnp.where(is_greedy, 1.0, inputs.temperature)
        scaled = logits / temperature[:, None]
        weights = _truncated_weights(scaled, inputs)
        drawn = _draw(weights, _uniform(inputs.seeds, inputs.counters), fallback=greedy)
        return jnp.where(is_greedy, greedy, drawn)

    return jax.lax.cond(jnp.all(is_greedy), lambda: greedy, draw)


def _argmax(x: jax.Array) -> jax.Array:
    """First index of the largest value, as two plain reductions: `jnp.argmax` is 3 to 7 times slower on CPU."""
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    is_max = x == jnp.max(x, axis=1, keepdims=True)
    return jnp.min(jnp.where(is_max, index, x.shape[1] - 1), axis=1)


def _uniform(seeds: jax.Array, counters: jax.Array) -> jax.Array:
    """One number in [0, 1) a row, from its seed and counter only. u32[N, 2], u32[N] -> f32[N]."""

    def one(seed: jax.Array, counter: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")  # the same numbers on every platform
        return jax.random.uniform(jax.random.fold_in(key, counter), dtype=jnp.float32)

    return jax.vmap(one)(seeds, counters)


def _truncated_weights(logits: jax.Array, inputs: SamplingInputs) -> jax.Array:
    """exp(logits - max) of the tokens that min-p, top-k and top-p keep, 0 for the others. f32[N, V]."""
    top = jnp.max(logits, axis=1, keepdims=True)
    truncates = (inputs.top_k > 0) | (inputs.top_p < 1) | (inputs.min_p > 0)
    thresholds = jax.lax.cond(
        jnp.any(truncates), lambda: _thresholds(logits, inputs), lambda: jnp.full_like(inputs.top_p, -jnp.inf)
    )
    return jnp.where(logits >= thresholds[:, None], jnp.exp(logits - top), 0.0)


def _thresholds(logits: jax.Array, inputs: SamplingInputs) -> jax.Array:
    """Smallest logit that each row keeps. f32[N].

    A row whose answer lies among its best candidates has it from one partial sort; a row with a wider nucleus or a
    larger top-k searches the whole vocabulary. Either way the threshold is one of the row's logits.
    """
    num_candidates = min(_NUM_CANDIDATES, logits.shape[1])
    candidates = jax.lax.top_k(logits, num_candidates)[0]  # f32[N, C], descending
    top = candidates[:, 0]
    floor = top + jnp.log(inputs.min_p)  # -inf for min_p 0
    last = jnp.clip(inputs.top_k - 1, 0, num_candidates - 1)
    kth = jnp.take_along_axis(candidates, last[:, None], axis=1)[:, 0]
    k_is_known = inputs.top_k <= num_candidates
    floor = jnp.where((inputs.top_k > 0) & k_is_known, jnp.maximum(floor, kth), floor)

    wanted = inputs.top_p * _weight_above(logits, top, floor)
    kept = jnp.where(candidates >= floor[:, None], jnp.exp(candidates - top[:, None]), 0.0)
    reached = jnp.cumsum(kept, axis=1) >= wanted[:, None]
    nucleus = jnp.take_along_axis(candidates, jnp.argmax(reached, axis=1)[:, None], axis=1)[:, 0]
    p_is_known = reached[:, -1] | (inputs.top_p >= 1)
    known = jnp.where(inputs.top_p < 1, jnp.maximum(floor, nucleus), floor)
    is_known = k_is_known & p_is_known

    def search(row: tuple) -> jax.Array:
        x, floor, known, is_known, top_k, top_p = row
        return jax.lax.cond(is_known, lambda: known, lambda: _search_threshold(x, floor, top_k, top_p))

    def search_unknown() -> jax.Array:
        return jax.lax.map(search, (logits, floor, known, is_known, inputs.top_k, inputs.top_p))

    return jax.lax.cond(jnp.all(is_known), lambda: known, search_unknown)


def _weight_above(logits: jax.Array, top: jax.Array, floor: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(logits >= floor[:, None], jnp.exp(logits - top[:, None]), 0.0), axis=1)


def _search_threshold(x: jax.Array, floor: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Threshold of one row of f32[V], by bisection over the ordered bit patterns of its logits."""
    order = _ordered_bits(x)

    def largest(condition) -> jax.Array:
        """Largest bit pattern for which a condition holds that gets harder as the pattern grows."""

        def set_bit(i, pattern):
            candidate = pattern ^ jnp.left_shift(jnp.int32(1), 31 - i)
            return jnp.where(condition(candidate), candidate, pattern)

        return jax.lax.fori_loop(0, 32, set_bit, jnp.int32(jnp.iinfo(jnp.int32).min))

    kth = largest(lambda pattern: jnp.sum(order >= pattern, dtype=jnp.int32) >= top_k)
    floor = jnp.maximum(_ordered_bits(floor), jnp.where(top_k > 0, kth, jnp.iinfo(jnp.int32).min))
    weights = jnp.where(order >= floor, jnp.exp(x - jnp.max(x)), 0.0)
    wanted = top_p * jnp.sum(weights)
    nucleus = largest(lambda pattern: jnp.sum(jnp.where(order >= pattern, weights, 0.0)) >= wanted)
    threshold = jnp.where(top_p < 1, jnp.maximum(floor, nucleus), floor)
    return jnp.min(jnp.where(order >= threshold, x, jnp.inf))


def _ordered_bits(x: jax.Array) -> jax.Array:
    """Integers in the order of the floats. f32 -> i32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(jnp.iinfo(jnp.int32).max), bits)


def _draw(weights: jax.Array, uniform: jax.Array, fallback: jax.Array) -> jax.Array:
    """Draw one index a row by inverting the cumulative distribution, block by block.

    Args:
        weights: f32[N, V], not negative; their sum need not be 1.
        uniform: f32[N] in [0, 1).
        fallback: i32[N]. Taken where rounding leads to an index of no weight.

    Returns:
        i32[N].
    """
    num_rows, width = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -width % _CDF_BLOCK))).reshape(num_rows, -1, _CDF_BLOCK)
    sums = jnp.sum(blocks, axis=2)
    ends = jnp.cumsum(sums, axis=1)
    target = uniform * ends[:, -1]
    block = jnp.minimum(jnp.sum(ends <= target[:, None], axis=1, dtype=jnp.int32), ends.shape[1] - 1)[:, None]
    start = jnp.take_along_axis(ends - sums, block, axis=1)
    inside = jnp.cumsum(jnp.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0], axis=1)
    offset = jnp.sum(inside <= target[:, None] - start, axis=1, dtype=jnp.int32)
    index = jnp.minimum(block[:, 0] * _CDF_BLOCK + offset, width - 1)
    weight = jnp.take_along_axis(weights, index[:, None], axis=1)[:, 0]
    return jnp.where(weight > 0, index, fallback)
