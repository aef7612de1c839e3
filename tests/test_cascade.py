"""Cascade attention on the layer: a prefix that a batch has in common, read once, changes no number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, make_ragged_batch, ragged_paged_attention_oracle

from flax_paged import CacheSpec, CompiledStep, PagedAttention
from flax_paged.metadata import PagedMetadata, SequenceSlice, build_metadata

H, KV, D, PAGE = 6, 2, 8, 4
LENGTHS = ((9, 33), (5, 23), (1, 17), (1, 40), (3, 21))
SIZES = {"page_size": PAGE, "num_pages": 40, "max_num_tokens": 24, "max_num_seqs": 4, "max_pages_per_seq": 8}


def metadata_of(batch, num_shared_pages=None, **fields):
    names = ("positions", "slot_mapping", "num_kv_update_slices", "block_tables", "seq_lens", "query_start_loc")
    arrays = {name: getattr(batch, name) for name in (*names, "num_seqs")}
    shared = None if num_shared_pages is None else np.array([num_shared_pages], np.int32)
    return PagedMetadata(**arrays, num_shared_pages=shared, **fields)


def layer_over(pages, dtype=jnp.float32, **options):
    """Return a layer whose cache holds what the batch's sequences have computed before the step."""
    spec = CacheSpec(KV, D, num_pages=pages.shape[0], page_size=PAGE, dtype=dtype)
    layer = PagedAttention(H, KV, D, cache=spec, **options)
    if layer.sinks is not None:
        layer.sinks[...] = jnp.linspace(-1, 2, H)
    layer.kv_cache.set_value(jax.device_put(pages, layer.kv_cache[...].sharding))
    return layer


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("options", [{}, {"soft_cap": 3.0, "sinks": True}], ids=str)
def test_equals_the_oracle_for_any_number_of_shared_pages_compiled_once(implementation, options):
    batch = make_ragged_batch(
        LENGTHS, num_q_heads=H, num_kv_heads=KV, head_dim=D, page_size=PAGE, sharpness=3.0, shared_prefix_len=16
    )
    layer = layer_over(batch.kv_pages_before, implementation=implementation, **options)
    step = CompiledStep(layer)
    oracle = {"soft_cap": 3.0, "sinks": np.linspace(-1, 2, H)} if options else {}
    expected = ragged_paged_attention_oracle(*batch.args, sm_scale=D**-0.5, **oracle)
    for num_shared_pages in range(5):
        out = step(batch.q, batch.k, batch.v, metadata_of(batch, num_shared_pages))
        assert_close(out, expected, np.float32, str(num_shared_pages))
    assert step.num_traces == 1
    # And the step's keys are written.
    live = np.unique(batch.block_tables[: len(LENGTHS)])
    assert_close(step.module().kv_cache[...][live], batch.kv_pages[live], np.float32)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_other_caches_give_what_they_give_without_it(dtype):
    """A prompt of 11 tokens, then four sequences that begin with its two full pages."""
    rng = np.random.default_rng(0)
    outs = []
    qkv = [rng.standard_normal((24, heads, D)).astype(np.float32) for heads in (H, KV, KV)]
    for cascade in (False, True):
        spec = CacheSpec(KV, D, num_pages=40, page_size=PAGE, dtype=dtype)
        layer = PagedAttention(H, KV, D, cache=spec)
        layer(*qkv, build_metadata([SequenceSlice([7, 3, 9], 0, 11)], **SIZES))
        slices = [SequenceSlice([7, 3, 10 + i, 20 + i, 30 + i], 8, 1 + 2 * i) for i in range(4)]
        metadata = build_metadata(slices, **SIZES, cascade=cascade)
        assert metadata.num_shared_pages is None or metadata.num_shared_pages == [2]
        outs.append(np.asarray(layer(*qkv, metadata)))
    np.testing.assert_allclose(*outs, rtol=1e-5, atol=1e-5)
    assert outs[0][:16].any()


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 3},
        {"attention_chunk_size": 4},
        {"alibi_slopes": np.linspace(0.1, 0.6, H)},
        {"attention_type": "encoder"},
    ],
    ids=str,
)
def test_layers_that_need_the_distance_read_the_prefix_for_each_sequence(options):
    batch = make_ragged_batch(LENGTHS, num_q_heads=H, num_kv_heads=KV, head_dim=D, page_size=PAGE, shared_prefix_len=16)
    plain, cascade = (
        layer_over(batch.kv_pages_before, **options)(batch.q, batch.k, batch.v, metadata_of(batch, shared))
        for shared in (None, 4)
    )
    np.testing.assert_array_equal(plain, cascade)


def test_keys_of_the_prefix_are_read_once():
    """With a NaN in another sequence's copy of the shared columns, only plain attention sees it."""
    batch = make_ragged_batch(LENGTHS, num_q_heads=H, num_kv_heads=KV, head_dim=D, page_size=PAGE, shared_prefix_len=16)
    tables = batch.block_tables.copy()
    dead = np.setdiff1d(np.arange(len(batch.kv_pages)), batch.block_tables)[0]
    tables[1:, :4] = dead  # the first sequence's table alone still names the prefix
    batch.kv_pages_before[dead] = np.nan
    expected = ragged_paged_attention_oracle(*batch.args, sm_scale=D**-0.5)
    batch.block_tables = tables
    out = layer_over(batch.kv_pages_before)(batch.q, batch.k, batch.v, metadata_of(batch, 4))
    assert_close(out, expected, np.float32)


@pytest.mark.parametrize(
    ("sequences", "expected"),
    [
        ([([5, 6, 7], 8, 1), ([5, 6, 8], 9, 2)], 2),
        ([([5, 6, 7], 7, 1), ([5, 6, 8], 9, 2)], 1),  # the first still writes its second page
        ([([5, 6, 7], 8, 1), ([4, 6, 8], 9, 2)], 0),
        ([([5, 6], 4, 1), ([5, 7], 4, 1), ([5, 8], 4, 1)], 1),
        ([([5, 6, 7], 8, 1)], 0),  # nobody to share with
        ([], 0),
    ],
)
def test_builder_counts_the_pages_in_common(sequences, expected):
    metadata = build_metadata([SequenceSlice(*s) for s in sequences], **SIZES, cascade=True)
    np.testing.assert_array_equal(metadata.num_shared_pages, np.array([expected], np.int32))
    assert metadata.num_shared_pages.dtype == np.int32


def test_tensor_parallel_layer_has_it_too():
    batch = make_ragged_batch(LENGTHS, num_q_heads=H, num_kv_heads=KV, head_dim=D, page_size=PAGE, shared_prefix_len=16)
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    layer = layer_over(batch.kv_pages_before, mesh=mesh)
    out = layer(batch.q, batch.k, batch.v, metadata_of(batch, 4))
    assert_close(out, ragged_paged_attention_oracle(*batch.args, sm_scale=D**-0.5), np.float32)
