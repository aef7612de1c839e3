"""Splash attention in interpret mode equals the XLA path, with its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_paged.ops import dense_attention
from flax_paged.ops.dense_attention import _choose_implementation


def packed(num_tokens, *lengths):
    """Segment ids and positions of sequences in one row, then padding."""
    ids, positions = np.zeros((2, 1, num_tokens), np.int32)
    start = 0
    for segment, length in enumerate(lengths, 1):
        ids[0, start : start + length] = segment
        positions[0, start : start + length] = np.arange(length)
        start += length
    return {"segment_ids": ids, "q_positions": positions, "kv_positions": positions}


def run(implementation, q, k, v, sinks, cotangent, options):
    """Output and gradients of the sum of output * cotangent."""

    def attend(q, k, v, sinks):
        return dense_attention(q, k, v, sinks=sinks, implementation=implementation, **options)

    @jax.jit
    def value_and_gradients(*args):
        out, vjp = jax.vjp(attend, *args)
        return out, vjp(cotangent.astype(out.dtype))

    return value_and_gradients(q, k, v, sinks)


def same_arrays(options):
    """Arrays for the options, both kinds of positions the same object."""
    arrays = {name: jnp.asarray(value) for name, value in options.items() if isinstance(value, np.ndarray)}
    if "q_positions" in arrays:
        arrays["kv_positions"] = arrays["q_positions"]
    return options | arrays


@pytest.mark.parametrize(
    "shape, dtype, with_sinks, options",
    [
        ((2, 150, 4, 2, 64), jnp.float32, False, {}),
        ((1, 200, 2, 1, 128), jnp.float32, False, {"sliding_window": 70, "soft_cap": 5.0, **packed(200, 90, 100)}),
        ((1, 256, 4, 2, 64), jnp.float32, True, {"attention_chunk_size": 48, **packed(256, 100, 80)}),
        ((1, 130, 4, 4, 64), jnp.bfloat16, True, {"causal": False, "sliding_window": 9}),
    ],
    ids=["grouped", "packed window and cap", "packed chunks and sinks", "bf16 not causal"],
)
def test_equals_xla_with_gradients(shape, dtype, with_sinks, options):
    batch, num_tokens, num_q_heads, num_kv_heads, head_dim = shape
    keys = jax.random.split(jax.random.key(0), 5)
    q, cotangent = (jax.random.normal(key, (batch, num_tokens, num_q_heads, head_dim), dtype) for key in keys[:2])
    k, v = (jax.random.normal(key, (batch, num_tokens, num_kv_heads, head_dim), dtype) for key in keys[2:4])
    sinks = jax.random.normal(keys[4], (num_q_heads,)) if with_sinks else None
    options = same_arrays({"sm_scale": head_dim**-0.5, **options})
    if "segment_ids" in options:  # Nobody looks at padding.
        live = (options["segment_ids"] > 0)[..., None, None]
        assert bool(live.any()) and not bool(live.all())
        cotangent = jnp.where(live, cotangent, 0)
    else:
        live = True
    (expected, expected_gradients), (out, gradients) = (
        run(name, q, k, v, sinks, cotangent, options) for name in ("xla", "splash_tpu_interpret")
    )
    got, expected = (jnp.where(live, out, 0), gradients), (jnp.where(live, expected, 0), expected_gradients)
    tolerance = {"rtol": 1e-5, "atol": 2e-5} if dtype == jnp.float32 else {"rtol": 2e-2, "atol": 4e-2}
    assert len(jax.tree.leaves(got)) == (5 if with_sinks else 4)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), **tolerance)


def test_positions_that_it_cannot_mask_give_nan():
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 128, 1, 64)) for i in range(3))
    positions = jnp.stack([jnp.arange(128), jnp.arange(128) % 100])
    args = {"q_positions": positions, "kv_positions": positions, "implementation": "splash_tpu_interpret"}
    out = dense_attention(q, k, v, **args)
    assert jnp.isfinite(out[0]).all() and jnp.isnan(out[1]).all()
    np.testing.assert_allclose(out[0], dense_attention(q, k, v, implementation="xla")[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"alibi_slopes": jnp.ones(2)}, "no ALiBi"),
        ({"q_positions": jnp.zeros((1, 4), jnp.int32)}, "at the same positions"),
    ],
)
def test_what_it_does_not_have(options, message):
    x = jnp.zeros((1, 4, 2, 8))
    with pytest.raises(NotImplementedError, match=message):
        dense_attention(x, x, x, implementation="splash_tpu_interpret", **options)


def test_choice(monkeypatch):
    x = jnp.zeros((1, 4, 2, 8))
    with pytest.raises(ValueError, match="expected None or one of xla, splash_tpu"):
        dense_attention(x, x, x, implementation="pallas_tpu")
    with pytest.raises(ValueError, match="needs a TPU"):
        dense_attention(x, x, x, implementation="splash_tpu")
    assert _choose_implementation(None, None) == "xla"
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert _choose_implementation(None, None) == "splash_tpu"
    assert _choose_implementation(None, "it has no ALiBi") == "xla"
