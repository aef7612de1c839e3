"""Rotary position embedding: inverse frequencies of every type, the tables of a step, and the rotation."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from flax_paged.nn.rope_config import RopeConfig


def rope_tables(
    config: RopeConfig,
    positions: jax.Array,
    *,
    head_dim: int,
    max_position_embeddings: int,
    seq_lens: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin of every token's phases, once a step for all layers.

    Phases are formed in float32 from integer positions whatever the model's dtype: a bfloat16 holds integers only up
    to 256 exactly.

    Args:
        config: Type and scaling.
        positions: i32[...]. Absolute position of each token.
        head_dim: Size of a head.
        max_position_embeddings: The model's context length; "dynamic" stretches beyond it.
        seq_lens: i32[...], like positions. Tokens of each token's sequence, this step's included. Only "dynamic" and
            "longrope" read it, their frequencies depend on it; see `depends_on_seq_lens`.

    Returns:
        (cos, sin), each f32[..., rotary_dim / 2], with the type's attention factor multiplied in.

    Raises:
        ValueError: The type needs `seq_lens`, or its fields do not fit `head_dim`.
    """
    if depends_on_seq_lens(config):
        if seq_lens is None:
            raise ValueError(f"rope type {config.rope_type!r} needs seq_lens, each token's sequence length.")
        frequencies = _frequencies_by_length(config, head_dim, max_position_embeddings, seq_lens)
    else:
        frequencies = jnp.asarray(inverse_frequencies(config, head_dim, max_position_embeddings))
        frequencies = frequencies.reshape((1,) * positions.ndim + frequencies.shape)
    phases = positions.astype(jnp.float32)[..., None] * frequencies  # f32[..., rotary_dim / 2]
    return _cos_sin_once(phases, attention_factor(config, max_position_embeddings))


def _cos_sin_once(phases: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """Return `scale * (cos, sin)`, kept from being fused into every layer, where each head would compute it anew."""

    def cos_sin(phases):
        return jnp.cos(phases) * scale, jnp.sin(phases) * scale

    if jax.default_backend() == "cpu":
        # XLA:CPU drops optimization barriers, but it fuses nothing into or out of a branch. Both are the same.
        return jax.lax.cond(jnp.all(phases >= 0), cos_sin, cos_sin, phases)
    return jax.lax.optimization_barrier(cos_sin(phases))


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the pairs (i, i + rotary_dim / 2) of each head; dimensions past rotary_dim pass through.

    Args:
        x: [..., heads, head_dim]. Queries or keys.
        cos: f32[..., rotary_dim / 2], from `rope_tables`.
        sin: Like cos.

    Returns:
        Array like x; computed in float32.

    Reference: Su et al. 2021, "RoFormer". The half-split order of pairs is that of Hugging Face checkpoints.
    """
    half = cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]  # one for all heads
    left = x[..., :half].astype(jnp.float32)
    right = x[..., half : 2 * half].astype(jnp.float32)
    rotated = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), x[..., 2 * half :]], axis=-1)


def depends_on_seq_lens(config: RopeConfig) -> bool:
    """Whether a token's frequencies depend on the length of its sequence, so that `rope_tables` needs `seq_lens`.

    Keys already in the cache keep the rotation of the step that wrote them, so for these types a prompt that goes in by
    chunks, past the length where the scaling sets in, is not the same as one that goes in whole.
    """
    if config.rope_type == "longrope":
        return config.short_factor != config.long_factor
    return config.rope_type == "dynamic"


def inverse_frequencies(config: RopeConfig, head_dim: int, max_position_embeddings: int) -> np.ndarray:
    """Return the inverse frequencies f32[rotary_dim / 2], for sequences up to the (original) context length.

    Computed in float64 and rounded once.
    """
    dim = config.rotary_dim(head_dim)
    frequencies = config.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    if config.rope_type == "linear":
        frequencies = frequencies / config.factor
    elif config.rope_type == "llama3":
        frequencies = _llama3(config, frequencies)
    elif config.rope_type == "yarn":
        frequencies = _yarn(config, frequencies, dim, max_position_embeddings)
    elif config.rope_type == "longrope":
        frequencies = frequencies / np.asarray(config.short_factor)
    return frequencies.astype(np.float32)


def attention_factor(config: RopeConfig, max_position_embeddings: int) -> float:
    """Return the factor on cos and sin: 1, except for "yarn" and "longrope"."""
    if config.rope_type not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    factor = _stretch(config, max_position_embeddings)
    if config.rope_type == "longrope":
        original = config.original_max_position_embeddings
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if config.mscale and config.mscale_all_dim:
        return _yarn_mscale(factor, config.mscale) / _yarn_mscale(factor, config.mscale_all_dim)
    return _yarn_mscale(factor, 1.0)


def _stretch(config: RopeConfig, max_position_embeddings: int) -> float:
    if config.factor is not None:
        return config.factor
    return max_position_embeddings / config.original_max_position_embeddings


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(config: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Divide long wavelengths by the factor, keep short ones, blend in between."""
    turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)  # within the original context
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = np.clip(blend, 0, 1)
    return (1 - blend) * frequencies / config.factor + blend * frequencies


def _yarn(config: RopeConfig, frequencies: np.ndarray, dim: int, max_position_embeddings: int) -> np.ndarray:
    """Keep dimensions that turn often within the original context, divide slow ones by the factor, ramp in between.

    Reference: Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models".
    """

    def dimension_with(turns: float) -> float:
        wavelength = config.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = dimension_with(config.beta_fast or 32), dimension_with(config.beta_slow or 1)
    if config.truncate is None or config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp becomes a step
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return frequencies * (1 - ramp) + frequencies / _stretch(config, max_position_embeddings) * ramp


def _frequencies_by_length(config: RopeConfig, head_dim: int, max_position_embeddings: int, seq_lens: jax.Array):
    """Frequencies f32[..., rotary_dim / 2] of tokens in sequences of these lengths, for "dynamic" and "longrope"."""
    dim = config.rotary_dim(head_dim)
    lengths = seq_lens.astype(jnp.float32)[..., None]
    if config.rope_type == "longrope":
        short = inverse_frequencies(config, head_dim, max_position_embeddings)
        long = short * np.asarray(config.short_factor, np.float32) / np.asarray(config.long_factor, np.float32)
        short, long = (jnp.asarray(x).reshape((1,) * seq_lens.ndim + x.shape) for x in (short, long))
        return jnp.where(lengths > config.original_max_position_embeddings, long, short)
    stretch = config.factor * jnp.maximum(lengths / max_position_embeddings, 1.0) - (config.factor - 1)
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    # (theta * stretch^(dim / (dim - 2)))^-exponent, with theta's part rounded once.
    powers = jnp.asarray((-exponents * dim / (dim - 2)).astype(np.float32))
    base = jnp.asarray((config.theta**-exponents).astype(np.float32))
    base, powers = (x.reshape((1,) * seq_lens.ndim + x.shape) for x in (base, powers))
    return base * stretch**powers
