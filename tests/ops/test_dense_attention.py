"""Dense attention equals the paged oracle, and its gradients are finite where a row sees nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from oracle import BF16, assert_close, make_ragged_batch, ragged_paged_attention_oracle

from flax_paged.ops import dense_attention

LENGTHS = ((12, 12), (12, 12))


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 4, "soft_cap": 5.0}], ids=str)
def test_equals_the_paged_oracle(dtype, options):
    options = {"sm_scale": 0.25, **options}
    batch = make_ragged_batch(
        LENGTHS, num_q_heads=6, num_kv_heads=2, head_dim=16, dtype=dtype, num_padding_tokens=0, sharpness=3.0
    )
    q, k, v = (jnp.asarray(a).reshape(2, 12, -1, 16) for a in (batch.q, batch.k, batch.v))
    expected = ragged_paged_attention_oracle(*batch.args, **options)
    assert_close(dense_attention(q, k, v, **options).reshape(batch.q.shape), expected, dtype)
    # The two rows packed into one: segments and positions that restart.
    packed = [a.reshape(1, 24, -1, 16) for a in (q, k, v)]
    segments = jnp.repeat(jnp.arange(2, dtype=jnp.int32), 12)[None]
    positions = jnp.tile(jnp.arange(12, dtype=jnp.int32), 2)[None]
    out = dense_attention(*packed, segment_ids=segments, q_positions=positions, kv_positions=positions, **options)
    assert_close(out.reshape(batch.q.shape), expected, dtype)


def test_not_causal_is_a_plain_softmax():
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 5, 3, 8)) for i in range(3))
    expected = jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(jnp.einsum("blhd,bmhd->bhlm", q, k), axis=-1), v)
    np.testing.assert_allclose(dense_attention(q, k, v, causal=False), expected, rtol=1e-5, atol=1e-6)


def test_a_query_without_keys_gives_zeros_and_finite_gradients():
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 4, 2, 8)) for i in range(3))
    later = jnp.full((1, 4), 9, jnp.int32)

    def loss(q, k, v):
        return dense_attention(q, k, v, kv_positions=later).sum()

    assert loss(q, k, v) == 0
    assert all(jnp.isfinite(g).all() for g in jax.grad(loss, argnums=(0, 1, 2))(q, k, v))


def test_gradients_match_finite_differences():
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 4, 2, 4)) for i in range(3))
    check_grads(
        lambda *a: dense_attention(*a, sliding_window=3, soft_cap=5.0), (q, k, v), order=1, modes=["rev"], rtol=1e-2
    )


@pytest.mark.parametrize(
    "shapes, options, message",
    [
        (((2, 5, 4, 8), (2, 5, 3, 8)), {}, "q has 4 heads and k 3"),
        (((2, 5, 4, 8), (1, 5, 4, 8)), {}, "equal B and D"),
        (((5, 4, 8), (5, 4, 8)), {}, "expected q"),
        (((2, 5, 4, 8), (2, 5, 4, 8)), {"segment_ids": np.zeros((2, 4), np.int32)}, "segment_ids has shape"),
        (((2, 5, 4, 8), (2, 6, 4, 8)), {"segment_ids": np.zeros((2, 5), np.int32)}, "as many keys as queries"),
    ],
)
def test_bad_arrays(shapes, options, message):
    q, k = (jnp.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        dense_attention(q, k, k, **options)
