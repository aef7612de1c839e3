import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_paged.nn import ACTIVATIONS, Embedding, GatedMLP, Linear, RMSNorm
from flax_paged.sharding import LOGICAL_AXIS_RULES

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def rngs():
    return nnx.Rngs(0)


def linear(dtype=jnp.float32, use_bias=True, features=(16, 12)):
    layer = Linear(
        *features, use_bias=use_bias, axes=("heads", "embed"), initializer_range=0.3, dtype=dtype, rngs=rngs()
    )
    if use_bias:
        layer.bias[...] = jax.random.normal(jax.random.key(5), layer.bias.shape).astype(dtype)
    return layer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(16,), (1, 16), (2, 16), (5, 16), (1, 1, 16), (2, 3, 16)], ids=str)
@pytest.mark.parametrize("use_bias", [False, True])
def test_linear_is_x_times_weight_transposed(dtype, shape, use_bias):
    layer = linear(dtype, use_bias)
    assert layer.weight.shape == (12, 16)
    x = jax.random.normal(jax.random.key(1), shape).astype(dtype)
    y = jax.jit(lambda x: linear(dtype, use_bias)(x))(x)
    assert y.dtype == dtype
    exact = np.asarray(x, np.float64) @ np.asarray(layer.weight[...], np.float64).T
    if use_bias:
        exact = exact + np.asarray(layer.bias[...], np.float64)
    tolerance = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3}[jnp.dtype(dtype).name]
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=tolerance, atol=tolerance)


def test_linear_accumulates_in_float32():
    """4096 products of 1 sum to 4096; a bfloat16 sum would stop at 256."""
    layer = Linear(4096, 3, axes=(None, None), dtype=jnp.bfloat16, rngs=rngs())
    layer.weight[...] = jnp.ones_like(layer.weight[...])
    for rows in (1, 2, 8):
        np.testing.assert_array_equal(layer(jnp.ones((rows, 4096), jnp.bfloat16)), 4096)


def test_one_row_of_bfloat16_is_multiplied_as_two():
    """XLA:CPU would widen the whole weight for one row."""
    layer = Linear(64, 32, axes=(None, None), dtype=jnp.bfloat16, rngs=rngs())
    graphdef, state = nnx.split(layer)
    run = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    text = run.lower(state, jnp.ones((1, 64), jnp.bfloat16)).compile().as_text()
    assert "f32[32,64]" not in text


def test_linear_casts_activations_to_the_weight():
    y = linear(jnp.bfloat16)(jnp.ones((3, 16), jnp.float32))
    assert y.dtype == jnp.float32


def test_embedding_looks_up_and_attends():
    layer = Embedding(10, 4, dtype=jnp.bfloat16, initializer_range=1.0, rngs=rngs())
    table = np.asarray(layer.weight[...], np.float64)
    tokens = jnp.array([[0, 9, 3]])
    out = layer(tokens)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float64), table[[[0, 9, 3]]])
    logits = layer.attend(out)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, table[[[0, 9, 3]]] @ table.T, rtol=1e-6, atol=1e-6)
    assert np.isnan(np.asarray(layer(jnp.array([10])), np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-3, 0.05, 1.0, 1000.0])
def test_rms_norm_keeps_its_sum_of_squares_in_float32(dtype, scale):
    layer = RMSNorm(64, eps=1e-6, dtype=dtype)
    layer.weight[...] = jnp.linspace(0.5, 2, 64).astype(dtype)
    x = (jnp.where(jnp.arange(128).reshape(2, 64) % 3 == 0, 1.0, -1.0) * scale).astype(dtype)
    wide = np.asarray(x, np.float64)
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(layer.weight[...], np.float64)
    out = layer(x)
    assert out.dtype == dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=1e-2 if dtype == jnp.bfloat16 else 2e-3)
    if dtype == jnp.float32:
        np.testing.assert_allclose(out, exact, rtol=1e-5)


def test_rms_norm_casts_before_it_multiplies():
    """normalised -> bf16 -> times weight, rounded twice, as the published checkpoints were trained."""
    layer = RMSNorm(64, eps=1e-6, dtype=jnp.bfloat16)
    layer.weight[...] = jax.random.normal(jax.random.key(1), (64,)).astype(jnp.bfloat16)
    x = jax.random.normal(jax.random.key(0), (8, 64)).astype(jnp.bfloat16)
    wide = np.asarray(x, np.float32)
    normalised = (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)
    expected = normalised * np.asarray(layer.weight[...])
    once = (
        normalised.astype(np.float32) * 0 + wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    ) * np.asarray(layer.weight[...], np.float32)
    got = np.asarray(layer(x))
    assert (got == expected).mean() > 0.99  # a rounding tie may fall the other way
    assert (once.astype(jnp.bfloat16) != expected).mean() > 0.1  # the other order would show


def reference_activations():
    erf = np.vectorize(math.erf)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    tanh_gelu = lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))  # noqa: E731
    return {
        "gelu": lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))),
        "gelu_fast": tanh_gelu,
        "gelu_new": tanh_gelu,
        "gelu_pytorch_tanh": tanh_gelu,
        "quick_gelu": lambda x: x * sigmoid(1.702 * x),
        "relu": lambda x: np.maximum(x, 0),
        "relu2": lambda x: np.maximum(x, 0) ** 2,
        "silu": lambda x: x * sigmoid(x),
        "swish": lambda x: x * sigmoid(x),
    }


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_gated_mlp(name):
    layer = GatedMLP(6, 10, activation=name, use_bias=True, initializer_range=0.5, rngs=rngs())
    for i, part in enumerate((layer.gate_proj, layer.up_proj, layer.down_proj)):
        part.bias[...] = jax.random.normal(jax.random.key(i), part.bias.shape)
    x = np.random.default_rng(0).normal(size=(5, 6))
    apply = lambda part, x: x @ np.asarray(part.weight[...], np.float64).T + np.asarray(part.bias[...], np.float64)  # noqa: E731
    gate = reference_activations()[name](apply(layer.gate_proj, x))
    expected = apply(layer.down_proj, gate * apply(layer.up_proj, x))
    np.testing.assert_allclose(layer(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=1e-5)


def test_unknown_activation_lists_the_known_ones():
    with pytest.raises(ValueError, match="hidden_act='sillu' is not a known activation; expected one of .*'silu'"):
        GatedMLP(6, 10, activation="sillu", rngs=rngs())


LAYERS = {
    "linear": lambda: (linear(features=(8, 8)), jnp.ones((3, 8))),
    "norm": lambda: (RMSNorm(8, eps=1e-6), jnp.ones((3, 8))),
    "mlp": lambda: (GatedMLP(8, 12, use_bias=True, rngs=rngs()), jnp.ones((3, 8))),
    "embedding": lambda: (Embedding(8, 8, rngs=rngs()), jnp.arange(3)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("where", ["jit", "nnx.jit", "grad", "vmap", "scan"])
def test_no_tracer_is_left_behind(name, where):
    layer, x = LAYERS[name]()
    expected = layer(x)
    with jax.checking_leaks():
        if where == "jit":
            out = jax.jit(lambda x: layer(x))(x)
        elif where == "nnx.jit":
            out = nnx.jit(lambda layer, x: layer(x))(layer, x)
        elif where == "grad":
            gradients = nnx.grad(lambda layer: jnp.sum(layer(x) ** 2))(layer)
            assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
            out = expected
        elif where == "vmap":
            out = jax.vmap(lambda x: layer(x))(x)
        else:
            out = jax.lax.scan(lambda carry, x: (carry, layer(x)), None, x)[1]
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(nnx.state(layer)))


@pytest.mark.parametrize("name", LAYERS)
def test_modules_hold_parameters_and_nothing_else(name):
    """A hashable graphdef, no arrays but Params, and a logical name for each axis of a Param."""
    layer, _ = LAYERS[name]()
    hash(nnx.graphdef(layer))
    for path, variable in nnx.to_flat_state(nnx.state(layer)):
        assert type(variable) is nnx.Param, path
        axes = variable.get_metadata()["logical_axes"]
        assert len(axes) == variable.ndim
        assert set(axes) <= set(LOGICAL_AXIS_RULES), path
