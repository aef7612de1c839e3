import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_paged.nn import ROPE_TYPES, RopeConfig, apply_rope, inverse_frequencies, rope_tables
from flax_paged.nn.rope import attention_factor, depends_on_seq_lens

LLAMA3 = RopeConfig(500000.0, "llama3", 1.0, 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = RopeConfig(
    10000.0, "yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0, beta_slow=2.0, truncate=False
)
CONFIGS = {
    "default": RopeConfig(),
    "linear": RopeConfig(rope_type="linear", factor=4.0),
    "dynamic": RopeConfig(rope_type="dynamic", factor=4.0),
    "yarn": YARN,
    "llama3": LLAMA3,
    "longrope": RopeConfig(
        rope_type="longrope",
        original_max_position_embeddings=64,
        short_factor=(1.0,) * 16,
        long_factor=tuple(np.linspace(1, 9, 16)),
    ),
}


def tables(config, positions, head_dim=32, max_position_embeddings=256, **options):
    positions = jnp.asarray(positions, jnp.int32)
    return rope_tables(config, positions, head_dim=head_dim, max_position_embeddings=max_position_embeddings, **options)


def llama3_by_the_book(theta, head_dim, factor, low, high, original):
    """The loop of Meta's release, in float64."""
    out = []
    for frequency in theta ** -(np.arange(0, head_dim, 2) / head_dim):
        wavelength = 2 * np.pi / frequency
        if wavelength < original / high:
            out.append(frequency)
        elif wavelength > original / low:
            out.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append((1 - smooth) * frequency / factor + smooth * frequency)
    return np.array(out)


def test_every_type_is_covered_here():
    assert set(CONFIGS) == set(ROPE_TYPES)


@pytest.mark.parametrize("head_dim", [24, 64, 80, 128])
def test_llama3_frequencies(head_dim):
    expected = llama3_by_the_book(500000.0, head_dim, 8, 1, 4, 8192)
    got = inverse_frequencies(LLAMA3, head_dim, 131072)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    plain = inverse_frequencies(RopeConfig(500000.0), head_dim, 131072)
    assert got[0] == plain[0] == 1
    np.testing.assert_allclose(got[-1], plain[-1] / 8, rtol=1e-6)


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("position", [0, 255, 256, 257, 4095, 15962, 20000, 131071])
def test_phases_stay_exact_at_long_positions(rope_type, position):
    config = CONFIGS[rope_type]
    cos, sin = tables(config, [position], head_dim=128)
    assert cos.dtype == sin.dtype == jnp.float32
    phases = position * inverse_frequencies(config, 128, 256).astype(np.float64)
    scale = attention_factor(config, 256)
    # A float32 phase is off by up to half a unit in its last place.
    tolerance = 1e-6 + position * 2**-23
    np.testing.assert_allclose(cos[0], np.cos(phases) * scale, atol=tolerance)
    np.testing.assert_allclose(sin[0], np.sin(phases) * scale, atol=tolerance)


@pytest.mark.parametrize("position", [4095, 15962])
def test_bfloat16_activations_do_not_round_the_phase(position):
    """Rotating a bf16 vector errs by the rounding of the vector and of the result, not of the position."""
    x = jax.random.normal(jax.random.key(0), (1, 2, 128), jnp.bfloat16)
    out = apply_rope(x, *tables(RopeConfig(), [position], head_dim=128))
    assert out.dtype == jnp.bfloat16
    exact = rotate_by_complex_numbers(np.asarray(x, np.float64), position, 1e4 ** -(np.arange(0, 128, 2) / 128))
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=0.02)


def rotate_by_complex_numbers(x, position, frequencies):
    half = len(frequencies)
    z = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * position * frequencies)
    return np.concatenate([z.real, z.imag, x[..., 2 * half :]], axis=-1)


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("head_dim", [8, 24, 80])
def test_rotation_is_that_of_complex_numbers(head_dim, partial):
    config = RopeConfig(partial_rotary_factor=partial)
    x = np.random.default_rng(0).normal(size=(5, 3, head_dim))
    dim = int(head_dim * partial)
    frequencies = 1e4 ** -(np.arange(0, dim, 2) / dim)
    out = apply_rope(jnp.asarray(x, jnp.float32), *tables(config, np.arange(5) * 7, head_dim=head_dim))
    for i in range(5):
        np.testing.assert_allclose(out[i], rotate_by_complex_numbers(x[i], 7 * i, frequencies), rtol=1e-5, atol=1e-5)


def test_scores_depend_on_the_distance_alone():
    q, k = (jax.random.normal(jax.random.key(i), (1, 1, 32)) for i in (0, 1))
    scores = []
    for start in (0, 3, 1000):
        cos, sin = tables(LLAMA3, [start + 5, start])
        scores.append(jnp.sum(apply_rope(q, cos[:1], sin[:1]) * apply_rope(k, cos[1:], sin[1:])))
    np.testing.assert_allclose(scores, scores[0], rtol=1e-3)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_each_sequence_scales_by_its_own_length(rope_type):
    """Frequencies follow the token's sequence, whatever else is in the batch (a common global state is a defect)."""
    config, limit = CONFIGS[rope_type], 64
    assert depends_on_seq_lens(config)
    positions, lengths = np.array([3, 63, 3, 299]), np.array([64, 64, 300, 300])
    together = tables(config, positions, max_position_embeddings=limit, seq_lens=jnp.asarray(lengths))
    for i in range(4):
        alone = tables(config, positions[i : i + 1], max_position_embeddings=limit, seq_lens=jnp.asarray([lengths[i]]))
        np.testing.assert_array_equal(together[0][i], alone[0][0])
    short = tables(config, positions[:1], max_position_embeddings=limit, seq_lens=jnp.asarray([1]))
    np.testing.assert_array_equal(together[0][0], short[0][0])  # no scaling up to the limit
    assert not np.allclose(together[0][0], together[0][2], atol=1e-3)
    with pytest.raises(ValueError, match="needs seq_lens"):
        tables(config, positions)


def test_dynamic_frequencies_by_the_formula():
    config, dim, limit = CONFIGS["dynamic"], 32, 64
    cos, _ = tables(config, [1], dim, limit, seq_lens=jnp.asarray([160]))
    base = 1e4 * (4 * 160 / limit - 3) ** (dim / (dim - 2))
    np.testing.assert_allclose(cos[0], np.cos(base ** -(np.arange(0, dim, 2) / dim)), rtol=1e-6)


def test_every_field_changes_something():
    """For each field some type's tables change with it."""
    changes = {
        "theta": (LLAMA3, 10000.0),
        "rope_type": (RopeConfig(rope_type="linear", factor=4.0), "dynamic"),
        "partial_rotary_factor": (LLAMA3, 0.5),
        "factor": (LLAMA3, 32.0),
        "original_max_position_embeddings": (LLAMA3, 256),
        "low_freq_factor": (LLAMA3, 2.0),
        "high_freq_factor": (LLAMA3, 16.0),
        "attention_factor": (YARN, 0.7),
        "beta_fast": (YARN, 16.0),
        "beta_slow": (YARN, 1.0),
        "mscale": (dataclasses.replace(YARN, mscale=0.5, mscale_all_dim=1.5), 0.7),
        "mscale_all_dim": (dataclasses.replace(YARN, mscale=0.5, mscale_all_dim=1.5), 0.7),
        "truncate": (YARN, True),
        "short_factor": (CONFIGS["longrope"], (2.0,) * 16),
        "long_factor": (CONFIGS["longrope"], (2.0,) * 16),
    }
    assert set(changes) == {field.name for field in dataclasses.fields(RopeConfig)}
    lengths = jnp.asarray([20, 1000])
    for name, (config, value) in changes.items():
        both = [
            tables(c, [19, 999], max_position_embeddings=512, seq_lens=lengths)[0]
            for c in (config, dataclasses.replace(config, **{name: value}))
        ]
        assert both[0].shape != both[1].shape or not np.allclose(*both, atol=1e-4), name


def test_the_context_length_stretches_where_no_factor_is_given():
    yarn = RopeConfig(rope_type="yarn", original_max_position_embeddings=64)
    given = dataclasses.replace(yarn, factor=8.0)
    for function in (lambda c: inverse_frequencies(c, 32, 512), lambda c: attention_factor(c, 512)):
        np.testing.assert_array_equal(function(yarn), function(given))


def test_tables_are_the_same_traced():
    for rope_type, config in CONFIGS.items():
        lengths = jnp.asarray([400])
        eager = tables(config, [399], seq_lens=lengths)
        with jax.checking_leaks():
            traced = jax.jit(lambda p, n, config=config: tables(config, p, seq_lens=n))(jnp.asarray([399]), lengths)
        np.testing.assert_allclose(eager, traced, atol=1e-5, err_msg=rope_type)
