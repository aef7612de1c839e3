"""Attention with update: the kernel and the portable pair agree, and every new token is written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import BF16, assert_close, make_ragged_batch, ragged_paged_attention_oracle
from tpu_interpret_tools import MODES, run

from flax_paged.attention import PagedAttention
from flax_paged.cache import CacheSpec
from flax_paged.metadata import SequenceSlice, build_metadata
from flax_paged.ops import kv_cache_update, paged_attention_with_update, ragged_paged_attention, to_standard_layout
from flax_paged.ops.ragged_paged_attention.tpu import ragged_paged_attention_tpu

LENGTHS = ((1, 20), (5, 9), (60, 90), (1, 3))


def make_batch(dtype=np.float32, **options):
    return make_ragged_batch(
        LENGTHS, num_q_heads=4, num_kv_heads=2, head_dim=32, page_size=8, padded_head_dim=128, dtype=dtype, **options
    )


def fused_args(batch):
    return batch.q, batch.k, batch.v, batch.kv_pages_before, *batch.update_args[3:], *batch.args[2:]


@pytest.mark.parametrize("implementation", ["reference", "xla", "pallas_tpu_interpret"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_fused_form_matches_oracle_and_writes_every_token(implementation, window, dtype):
    batch = make_batch(dtype)
    out, pages = paged_attention_with_update(*fused_args(batch), implementation=implementation, sliding_window=window)
    assert_close(out, ragged_paged_attention_oracle(*batch.args, sliding_window=window), dtype)
    # With the window most new tokens of the long prefill are out of sight of later blocks, and written all the same.
    np.testing.assert_array_equal(np.asarray(pages).view(np.uint8), batch.kv_pages.view(np.uint8))


def test_fused_form_equals_the_pair_bit_for_bit():
    batch = make_batch()
    out, pages = paged_attention_with_update(*fused_args(batch), implementation="pallas_tpu_interpret")
    expected_pages = kv_cache_update(*batch.update_args, implementation="pallas_tpu_interpret")
    args = (batch.q, expected_pages, *batch.args[2:])
    np.testing.assert_array_equal(out, ragged_paged_attention(*args, implementation="pallas_tpu_interpret"))
    np.testing.assert_array_equal(pages, expected_pages)


@pytest.mark.parametrize("mode", MODES)
def test_fused_form_waits_and_does_not_race(mode):
    batch = make_batch()
    q, k, v, pages, slot_mapping, num_slices, *rest = map(jnp.asarray, fused_args(batch))
    out, pages = run(
        lambda p: ragged_paged_attention_tpu(
            q, pages, *rest, update=(k, v, slot_mapping, num_slices), num_kv_pages_per_block=16,
            num_queries_per_block=16, interpret=p,
        ),
        mode,
    )  # fmt: skip
    assert_close(out, ragged_paged_attention_oracle(*batch.args), np.float32)
    np.testing.assert_array_equal(pages.view(np.uint8), batch.kv_pages.view(np.uint8))


def test_decode_step_by_step_equals_full_recompute():
    """A token is written at its own position and attends to itself: no hole, no shift."""
    rng = np.random.default_rng(0)
    keys, values, queries = rng.standard_normal((3, 12, 1, 64)).astype(np.float32)
    pages = jnp.full((4, 4, 2, 128), np.nan, jnp.float32)
    table = jnp.array([[2, 0, 3, 0]], jnp.int32)
    step = jax.jit(
        lambda *args, max_query_len: paged_attention_with_update(
            *args, max_query_len=max_query_len, implementation="pallas_tpu_interpret"
        ),
        static_argnames="max_query_len",
    )
    for first, count in ((0, 9), (9, 1), (10, 1), (11, 1)):
        tokens = slice(first, first + count)
        slots = [(int(table[0, p // 4]) * 4 + p % 4, p - first, 1) for p in range(first, first + count)]
        out, pages = step(
            queries[tokens], keys[tokens], values[tokens], pages,
            jnp.array(slots, jnp.int32).T, jnp.array([count], jnp.int32), jnp.array([first + count], jnp.int32), table,
            jnp.array([0, count], jnp.int32), jnp.array([1], jnp.int32), max_query_len=count,
        )  # fmt: skip
        seen = first + count
        scores = queries[seen - 1, 0].astype(np.float64) @ keys[:seen, 0].T.astype(np.float64)
        weights = np.exp(scores - scores.max())
        assert_close(np.asarray(out)[-1, 0], weights @ values[:seen, 0] / weights.sum(), np.float32)


def test_padding_tokens_leave_the_last_page_alone():
    batch = make_batch(num_padding_tokens=9)
    batch.slot_mapping[:, batch.num_kv_update_slices[0] :] = np.array([[batch.kv_pages.shape[0] * 8 - 1], [0], [1]])
    _, pages = paged_attention_with_update(*fused_args(batch), implementation="pallas_tpu_interpret")
    np.testing.assert_array_equal(np.asarray(pages).view(np.uint8), batch.kv_pages.view(np.uint8))


def test_bad_arguments_are_refused_as_by_the_pair():
    batch = make_batch()
    args = list(fused_args(batch))
    args[1] = args[1][:, :1]
    with pytest.raises(ValueError):
        paged_attention_with_update(*args, implementation="pallas_tpu_interpret")
    args = fused_args(batch)
    with pytest.raises(NotImplementedError, match="float16 q"):
        paged_attention_with_update(args[0].astype(np.float16), *args[1:], implementation="pallas_tpu_interpret")


def test_a_pool_of_more_than_2_31_elements_traces():
    shape = jax.ShapeDtypeStruct
    pages = shape((70_000, 256, 16, 128), jnp.bfloat16)
    kv = shape((8, 8, 128), jnp.bfloat16)

    def i32(*sizes):
        return shape(sizes, jnp.int32)

    args = (shape((8, 32, 128), jnp.bfloat16), kv, kv, pages, i32(3, 16), i32(1), i32(4), i32(4, 64), i32(5), i32(1))
    out, updated = jax.eval_shape(
        lambda *a: paged_attention_with_update(*a, implementation="pallas_tpu_interpret"), *args
    )
    assert out.shape == (8, 32, 128)
    assert updated.shape == pages.shape


@pytest.mark.parametrize("head_dim, dtype", [(64, jnp.int8), (128, jnp.float8_e4m3fn)])
def test_the_layer_writes_and_reads_a_quantized_cache_by_the_kernel(head_dim, dtype):
    """A prefill, and a decode that writes into a group of tokens that others share; ALiBi and sinks besides."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((16, heads, head_dim)).astype(np.float32) for heads in (6, 2, 2))
    layers = {}
    for implementation, layout in (("xla", "standard"), ("pallas_tpu_interpret", "tpu")):
        spec = CacheSpec(2, head_dim, 8, 8, dtype, scales="per_head", layout=layout)
        layer = layers[implementation] = PagedAttention(
            6, 2, head_dim, cache=spec, alibi_slopes=np.linspace(0.1, 0.6, 6), sinks=True, implementation=implementation
        )
        layer.k_scale[...], layer.v_scale[...] = jnp.array([0.03, 0.02]), jnp.array([0.02, 0.03])
    for slices in ([SequenceSlice([6, 1], 0, 9), SequenceSlice([3], 0, 2)], [SequenceSlice([6, 1], 9, 1)]):
        metadata = build_metadata(
            slices, page_size=8, num_pages=8, max_num_tokens=16, max_num_seqs=3, max_pages_per_seq=3
        )  # fmt: skip
        expected, out = (layer(q, k, v, metadata) for layer in layers.values())
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    xla, kernel = (to_standard_layout(layer.kv_cache[...], head_dim) for layer in layers.values())
    np.testing.assert_array_equal(np.asarray(kernel).view(np.int8)[..., :head_dim], np.asarray(xla).view(np.int8))


def test_new_scales_do_not_compile_anew():
    batch = make_batch()
    pages = jnp.ones((len(batch.kv_pages), 2, 2, 4, 128), jnp.int8)
    run = jax.jit(lambda k, v: ragged_paged_attention(
        batch.q, pages, *batch.args[2:], k_scale=k, v_scale=v, implementation="pallas_tpu_interpret"
    ))  # fmt: skip
    first, second = run(0.1, 0.2), run(0.1, 0.4)
    assert run._cache_size() == 1
    np.testing.assert_allclose(2 * np.asarray(first), second, rtol=1e-5)
