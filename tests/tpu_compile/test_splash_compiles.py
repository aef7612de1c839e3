"""Dense attention compiles with splash attention, forward and backward, without the scores in memory."""

import jax
import jax.numpy as jnp
import pytest
from tpu_compiler import compile_for

from flax_paged.ops import dense_attention

LENGTH = 2048


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize(
    "heads, head_dim, dtype, options",
    [
        ((32, 8), 128, "bfloat16", {}),
        ((9, 3), 64, "float32", {"sliding_window": 512, "soft_cap": 30.0}),
        ((8, 2), 64, "bfloat16", {"attention_chunk_size": 512}),
        ((8, 8), 80, "bfloat16", {"causal": False}),
    ],
    ids=str,
)
def test_training(monkeypatch, chip, heads, head_dim, dtype, options):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    num_q_heads, num_kv_heads = heads
    q = jax.ShapeDtypeStruct((1, LENGTH, num_q_heads, head_dim), dtype)
    kv = jax.ShapeDtypeStruct((1, LENGTH, num_kv_heads, head_dim), dtype)
    ids = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    sinks = jax.ShapeDtypeStruct((num_q_heads,), jnp.float32)

    def loss(q, k, v, sinks, segment_ids, positions):
        out = dense_attention(
            q, k, v, sm_scale=0.1, sinks=sinks, segment_ids=segment_ids, q_positions=positions, kv_positions=positions,
            **options,
        )  # fmt: skip
        return (out.astype(jnp.float32) ** 2).sum()

    compiled = compile_for(chip, jax.grad(loss, argnums=(0, 1, 2, 3)), (q, kv, kv, sinks, ids, ids))
    assert "tpu_custom_call" in compiled.as_text()
    scores = 4 * num_q_heads * LENGTH**2
    assert compiled.memory_analysis().temp_size_in_bytes < scores / 2
