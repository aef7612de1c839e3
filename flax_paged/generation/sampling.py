"""From logits to token ids, on the device: a row is a token to sample, and each has its own parameters.

No result depends on another row: a row's random number comes from its own key, and where a cheap route may fail for one
row (`_thresholds`), that row alone takes the slow one.
"""

import dataclasses

import jax
import jax.numpy as jnp

from flax_paged.generation.sampling_inputs import SamplingInputs
from flax_paged.generation.sampling_params import GREEDY_BELOW

# Most likely tokens that are looked at before a row's whole vocabulary is searched.
_NUM_CANDIDATES = 64
# Width of the blocks in which the cumulative distribution is searched.
_CDF_BLOCK = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampledTokens:
    """What a step gives back.

    Fields:
        token_ids: i32[N]. The token sampled in each row.
        logprobs: f32[N]. Log-probability of the sampled token, or of the row's target; zeros if no row wants any.
        ranks: i32[N]. Its rank among all tokens, the most likely being 1.
        top_ids: i32[N, K]. The most likely tokens.
        top_logprobs: f32[N, K]. Their log-probabilities.
    """

    token_ids: jax.Array
    logprobs: jax.Array
    ranks: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def sample(
    logits: jax.Array, inputs: SamplingInputs, last_token_ids: jax.Array, *, max_logprobs: int = 0
) -> SampledTokens:
    """Choose a token in each row.

    The order is vLLM's: log-probabilities are those of the model's own logits; then bans, allowed tokens and bias; then
    grammars; then the repetition, frequency and presence penalties; then temperature, min-p, top-k and top-p.

    Args:
        logits: [N, V], any float dtype.
        inputs: Parameters of the N rows.
        last_token_ids: i32[N]. The token before the one to sample.
        max_logprobs: K, the number of most likely tokens reported. Static.

    Returns:
        SampledTokens. Greedy rows get the first of the most likely tokens, the others a draw from what is left.
    """
    raw = logits.astype(jnp.float32)
    has_rules = _has_entries(inputs) | _has_penalties(inputs) | jnp.any(inputs.has_grammar)
    is_plain = ~(jnp.any(inputs.temperature >= GREEDY_BELOW) | has_rules)
    # One branch around everything: a branch that returned logits would copy them.
    token_ids = jax.lax.cond(is_plain, lambda: _argmax(raw), lambda: _sample_any(raw, inputs, last_token_ids))
    reported = jnp.where(inputs.has_target, inputs.target_ids, token_ids)
    return SampledTokens(token_ids, *_logprobs(raw, reported, inputs.wants_logprobs[0], max_logprobs))


def _sample_any(logits: jax.Array, inputs: SamplingInputs, last_token_ids: jax.Array) -> jax.Array:
    logits = _apply_grammars(_apply_entries(logits, inputs, last_token_ids), logits, inputs)
    logits = _penalize(logits, inputs, last_token_ids)
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


def _has_entries(inputs: SamplingInputs) -> jax.Array:
    return jnp.any(inputs.is_restricted) | jnp.any(inputs.entry_values != 0)


def _has_penalties(inputs: SamplingInputs) -> jax.Array:
    is_off = (inputs.repetition_penalty == 1) & (inputs.frequency_penalty == 0) & (inputs.presence_penalty == 0)
    return ~jnp.all(is_off)


def _apply_entries(logits: jax.Array, inputs: SamplingInputs, last_token_ids: jax.Array) -> jax.Array:
    """Add the entries that count to their tokens' logits, and ban what a restricted row does not allow."""
    rows = jax.lax.broadcasted_iota(jnp.int32, inputs.entry_ids.shape, 0)

    def apply() -> jax.Array:
        counts = (inputs.entry_conditions < 0) | (inputs.entry_conditions == last_token_ids[:, None])
        values = jnp.where(counts, inputs.entry_values, 0.0)
        allowed = jnp.zeros(logits.shape, bool).at[rows, inputs.entry_ids].max(inputs.entry_allows)
        is_banned = inputs.is_restricted[:, None] & ~allowed
        return jnp.where(is_banned, -jnp.inf, logits.at[rows, inputs.entry_ids].add(values))

    return jax.lax.cond(_has_entries(inputs), apply, lambda: logits)


def _apply_grammars(logits: jax.Array, raw: jax.Array, inputs: SamplingInputs) -> jax.Array:
    """Ban what a row's grammar does not allow. Where nothing is left, the rules before give way: `raw` is without."""

    def apply() -> jax.Array:
        bits = (inputs.grammar_masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None]) & 1
        allowed = bits.reshape(bits.shape[0], -1)[:, : logits.shape[1]] > 0
        is_possible = jnp.any(allowed & (logits > -jnp.inf), axis=1, keepdims=True)
        ruled = jnp.where(allowed, jnp.where(is_possible, logits, raw), -jnp.inf)
        return jnp.where(inputs.has_grammar[:, None], ruled, logits)

    return jax.lax.cond(jnp.any(inputs.has_grammar), apply, lambda: logits)


def _penalize(logits: jax.Array, inputs: SamplingInputs, last_token_ids: jax.Array) -> jax.Array:
    """Apply the repetition penalty to tokens seen anywhere, the other two to tokens of the answer."""

    def penalize() -> jax.Array:
        index = jax.lax.broadcasted_iota(jnp.int32, inputs.history.shape, 1)
        rows = jax.lax.broadcasted_iota(jnp.int32, inputs.history.shape, 0)
        num_history, num_prompt = inputs.num_history[:, None], inputs.num_prompt[:, None]
        tokens = jnp.where(index == num_history - 1, last_token_ids[:, None], inputs.history)
        zeros = jnp.zeros(logits.shape, jnp.float32)
        is_seen = zeros.at[rows, tokens].max((index < num_history).astype(jnp.float32)) > 0
        is_output = (index >= num_prompt) & (index < num_history)
        counts = zeros.at[rows, tokens].add(is_output.astype(jnp.float32))
        repetition = inputs.repetition_penalty[:, None]
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        out = jnp.where(is_seen, repeated, logits)
        out = out - inputs.frequency_penalty[:, None] * counts
        return out - inputs.presence_penalty[:, None] * (counts > 0).astype(jnp.float32)

    return jax.lax.cond(_has_penalties(inputs), penalize, lambda: logits)


def _logprobs(
    logits: jax.Array, token_ids: jax.Array, is_wanted: jax.Array, max_logprobs: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Log-probabilities and ranks of the tokens, and the most likely tokens with theirs; zeros if not wanted."""
    num_rows = logits.shape[0]

    def compute():
        chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
        total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
        ranks = jnp.sum(logits > chosen, axis=1, dtype=jnp.int32) + 1
        top, top_ids = jax.lax.top_k(logits, max_logprobs)
        return (chosen - total)[:, 0], ranks, top_ids.astype(jnp.int32), top - total

    def skip():
        return (
            jnp.zeros(num_rows, jnp.float32),
            jnp.zeros(num_rows, jnp.int32),
            jnp.zeros((num_rows, max_logprobs), jnp.int32),
            jnp.zeros((num_rows, max_logprobs), jnp.float32),
        )

    return jax.lax.cond(is_wanted, compute, skip)


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
