"""The kernel's features compile with the real compiler."""

import jax
import jax.numpy as jnp
import pytest
from test_kernels_compile import attention_args
from tpu_compiler import compile_for

from flax_paged.ops.ragged_paged_attention.tpu import ragged_paged_attention_tpu


@pytest.mark.parametrize("path", ["decode", "mixed"])
@pytest.mark.parametrize("options", [{"attention_chunk_size": 512}, {"causal": False}], ids=str)
@pytest.mark.parametrize("chip, heads, head_dim", [("v5e", (9, 3), 64), ("v6e", (32, 8), 128), ("tpu7x", (64, 8), 64)])
def test_sinks_with(chip, heads, head_dim, options, path):
    args = attention_args(heads, head_dim, 16, "bfloat16", num_tokens=64 if path == "decode" else 256)
    max_query_len = 1 if path == "decode" else None

    def run(sinks, *args):
        return ragged_paged_attention_tpu(*args, sm_scale=0.1, sinks=sinks, max_query_len=max_query_len, **options)

    compile_for(chip, run, (jax.ShapeDtypeStruct((heads[0],), jnp.float32), *args))
