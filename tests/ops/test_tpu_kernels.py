"""The TPU kernels in interpret mode against the float64 oracle.

Pages and blocks are small, so that every sequence of some length takes several blocks and both buffers.
"""

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from oracle import BF16, KV16_MIXED, assert_close, make_ragged_batch, ragged_paged_attention_oracle
from tpu_interpret_tools import MODES, RaceError, attend, update

from flax_paged.ops.kv_cache_update import tpu as update_tpu
from flax_paged.ops.ragged_paged_attention import tpu_kernel, tpu_pipeline

DECODE = ((1, 5), (1, 64), (1, 130), (1, 33), (1, 1))
MIXED = ((5, 5), (1, 77), (40, 100), (17, 60), (1, 128))
KV16_SHORT = tuple((min(q, 40), min(n, 190) if q == 1 else min(q, 40) + n % 97) for q, n in KV16_MIXED[:8])

# (lengths, heads, head_dim, page size, dtype, pages a block, queries a block, options)
CASES = {
    "decode": (DECODE, (8, 4), 64, 8, np.float32, 4, None, {"max_query_len": 1}),
    "decode-standard": (DECODE, (8, 4), 64, 8, BF16, 4, None, {"max_query_len": 1, "layout": "standard"}),
    "decode-bf16": (DECODE, (8, 4), 64, 8, BF16, 4, None, {"max_query_len": 1}),
    "decode-window": (DECODE, (4, 1), 128, 16, BF16, 8, None, {"max_query_len": 1, "sliding_window": 20}),
    "decode-64-8-256": (DECODE[:3], (64, 8), 256, 16, BF16, 1, None, {"max_query_len": 1}),
    "decode-9-3-cap": (DECODE, (9, 3), 80, 32, np.float32, 1, None, {"max_query_len": 1, "soft_cap": 5.0}),
    "decode-page-1": (DECODE[:3], (2, 2), 64, 1, BF16, 64, None, {"max_query_len": 1}),
    "decode-page-33": (DECODE[:3], (8, 8), 64, 33, BF16, 16, None, {"max_query_len": 1}),
    "mixed": (MIXED, (8, 4), 64, 8, np.float32, 16, 16, {}),
    "mixed-bf16": (MIXED, (8, 2), 128, 16, BF16, 8, 16, {}),
    "mixed-window-9-3": (MIXED, (9, 3), 128, 16, BF16, 8, 16, {"sliding_window": 20}),
    "mixed-window-f32": (MIXED, (4, 2), 64, 32, np.float32, 4, 16, {"sliding_window": 5}),
    "mixed-cap-240": (MIXED[1:4], (5, 1), 240, 64, BF16, 2, 16, {"soft_cap": 20.0}),
    "mixed-mha-128-pages": (MIXED[1:4], (3, 3), 80, 128, np.float32, 1, 32, {}),
    "mixed-standard": (MIXED, (6, 3), 128, 16, BF16, 8, 16, {"layout": "standard"}),
    "mixed-window-packed": (MIXED, (6, 3), 24, 8, BF16, 16, 16, {"sliding_window": 21}),
    "mixed-kv16": (KV16_SHORT, (16, 2), 64, 32, BF16, 4, 32, {}),
}


def batch_and_options(case, **more):
    lengths, (num_q_heads, num_kv_heads), head_dim, page_size, dtype, pages, queries, options = CASES[case]
    batch = make_ragged_batch(
        lengths, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size,
        dtype=dtype, padded_head_dim=-(-head_dim // 128) * 128, **more,
    )  # fmt: skip
    return batch, {"num_kv_pages_per_block": pages, "num_queries_per_block": queries, **options}


def check(batch, out, options, sm_scale, slack=1.0):
    options = {name: options[name] for name in ("sliding_window", "soft_cap") if name in options}
    expected = ragged_paged_attention_oracle(*batch.args, sm_scale=sm_scale, **options)
    assert_close(out, expected, batch.q.dtype, slack=slack)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_attention(case, mode):
    batch, options = batch_and_options(case)
    sm_scale = batch.q.shape[2] ** -0.5
    check(batch, attend(batch, mode, sm_scale=sm_scale, **options), options, sm_scale)


@pytest.mark.parametrize("case", ["decode", "decode-bf16", "mixed", "mixed-bf16"])
def test_sharp_softmax_and_shared_pages(case):
    batch, options = batch_and_options(case, sharpness=50.0, shared_prefix_len=64)
    sm_scale = batch.q.shape[2] ** -0.5
    # Scores reach 200, of which float32 keeps 1e-5.
    slack = 10.0 if batch.q.dtype == np.float32 else 1.0
    check(batch, attend(batch, sm_scale=sm_scale, **options), options, sm_scale, slack)


def test_padding_rows_are_zero_and_a_batch_may_be_empty():
    batch, options = batch_and_options("mixed", num_padding_tokens=37)
    out = attend(batch, **options)
    assert not out[batch.num_tokens :].any()
    batch.num_seqs[0] = 0
    batch.query_start_loc[:] = 0
    assert not attend(batch, **options).any()


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_dead_slots_never_leak(poison):
    for case in ("decode-window", "mixed"):
        clean, options = batch_and_options(case, poison=0.0)
        poisoned, _ = batch_and_options(case, poison=poison)
        np.testing.assert_array_equal(attend(poisoned, **options), attend(clean, **options))


# --- Planted faults: the two modes find what they are there for ---


@pytest.fixture
def fresh_traces():
    """JAX remembers traced kernels, which would carry a fault in or out of a test."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_a_missing_wait_is_found(monkeypatch, fresh_traces):
    batch, options = batch_and_options("decode")
    monkeypatch.setattr(tpu_pipeline, "wait_pages", lambda *args: None)
    out = attend(batch, "waits", **options)
    # The buffers start as zeros, so that it is wrong numbers and not NaN that show.
    with pytest.raises(AssertionError):
        check(batch, out, options, 1.0)


def test_a_buffer_refilled_too_early_is_a_race(monkeypatch, fresh_traces):
    batch, options = batch_and_options("decode")
    decode_edge_block = tpu_kernel._decode_edge_block

    def refill_first(config, refs, q, buffer, fetch, *rest):
        tpu_pipeline.start_pages(config, refs, buffer, fetch)
        return decode_edge_block(config, refs, q, buffer, (fetch[0], 0), *rest)

    monkeypatch.setattr(tpu_kernel, "_decode_edge_block", refill_first)
    with pytest.raises(RaceError):
        attend(batch, "races", **options)


def test_a_cache_update_that_does_not_wait_is_found(monkeypatch, fresh_traces):
    batch, _ = batch_and_options("mixed")
    monkeypatch.setattr(update_tpu, "wait_for_slices", lambda *args: None)
    out = update(batch, "waits")
    assert not np.array_equal(out, batch.kv_pages[..., :64], equal_nan=True)


# --- Which pages are fetched ---


@pytest.mark.parametrize("window", [1, 8, 12, 20, 100])
@pytest.mark.parametrize("max_query_len", [1, None])
def test_decode_fetches_only_the_windows_pages(window, max_query_len):
    """Table entries outside the window point outside the cache, where a read raises."""
    batch = make_ragged_batch(DECODE, num_q_heads=2, num_kv_heads=2, head_dim=64, page_size=8, padded_head_dim=128)
    tables = np.full_like(batch.block_tables, 10_000)
    for s, (_, seq_len) in enumerate(DECODE):
        first, last = max(seq_len - window, 0) // 8, -(-seq_len // 8)
        assert last - first <= -(-window // 8) + 1
        tables[s, first:last] = batch.block_tables[s, first:last]
    options = {"sliding_window": window, "num_kv_pages_per_block": 8, "max_query_len": max_query_len}
    check(batch, attend(batch, block_tables=tables, **options), options, 1.0)
    if window == 20:
        tables[2, 130 // 8] = 10_000
        with pytest.raises(Exception, match=r"[Oo]ut.of.bounds"):
            attend(batch, block_tables=tables, **options)


@pytest.mark.parametrize("window", [8, 20])
@pytest.mark.parametrize("max_query_len", [1, None])
def test_a_window_is_fetched_with_as_many_copies_as_it_has_pages(monkeypatch, window, max_query_len):
    """Counted as they run: every copy of a whole page that the kernel makes."""
    sizes, execute_read = [], interpret_pallas_call.DMA.execute_read

    def counting_read(dma):
        is_new = dma.data is None
        execute_read(dma)
        if is_new:
            sizes.append(dma.data.nbytes)

    monkeypatch.setattr(interpret_pallas_call.DMA, "execute_read", counting_read)
    batch = make_ragged_batch(DECODE, num_q_heads=2, num_kv_heads=2, head_dim=128, page_size=8)
    options = {"sliding_window": window, "num_kv_pages_per_block": 8, "max_query_len": max_query_len}
    check(batch, attend(batch, **options), options, 1.0)
    pages_of = [-(-n // 8) - max(n - window, 0) // 8 for _, n in DECODE]
    assert sizes.count(batch.kv_pages[0].nbytes) == sum(pages_of)
    assert all(num_pages <= -(-window // 8) + 1 for num_pages in pages_of)


def test_prefill_fetches_nothing_past_the_causal_edge():
    batch = make_ragged_batch(((16, 16),), num_q_heads=2, num_kv_heads=1, head_dim=64, page_size=8, padded_head_dim=128)
    batch.block_tables[0, 2:] = 10_000
    check(batch, attend(batch, num_kv_pages_per_block=16, num_queries_per_block=16), {}, 1.0)


# --- Long contexts ---


def long_decode(seq_len, keys, values, head_dim=128, page_size=256, seed=0):
    """One sequence with given keys and values [seq_len, head_dim] of one head."""
    rng = np.random.default_rng(seed)
    num_pages = -(-seq_len // page_size)
    table = rng.permutation(num_pages).astype(np.int32)
    rows = np.zeros((num_pages * page_size, 2, head_dim), keys.dtype)
    rows[:seq_len, 0], rows[:seq_len, 1] = keys, values
    pages = np.empty((num_pages, page_size, 2, head_dim), keys.dtype)
    pages[table] = rows.reshape(num_pages, page_size, 2, head_dim)
    batch = make_ragged_batch(((1, 1),), num_q_heads=1, num_kv_heads=1, head_dim=head_dim, num_padding_seqs=0)
    batch.q = rng.standard_normal((1, 1, head_dim)).astype(keys.dtype)
    batch.kv_pages, batch.block_tables = pages, table[None]
    batch.seq_lens = np.array([seq_len], np.int32)
    batch.query_start_loc = np.array([0, 1], np.int32)
    return batch


def test_the_sum_of_131072_equal_keys_does_not_stall():
    ones = np.ones((131_072, 128), BF16)
    out = attend(long_decode(131_072, ones, ones), max_query_len=1)
    np.testing.assert_array_equal(out.astype(np.float32), 1.0)


def test_positions_beyond_65536():
    rng = np.random.default_rng(1)
    keys, values = rng.standard_normal((2, 70_001, 128)).astype(np.float32)
    batch = long_decode(70_001, keys, values)
    options = {"max_query_len": 1, "sm_scale": 128**-0.5}
    scores = batch.q[0, 0].astype(np.float64) @ keys.T.astype(np.float64) * 128**-0.5
    for window in (None, 66_000):
        seen = slice(0, None) if window is None else slice(-window, None)
        weights = np.exp(scores[seen] - scores[seen].max())
        expected = weights @ values[seen].astype(np.float64) / weights.sum()
        assert_close(attend(batch, sliding_window=window, **options)[0, 0], expected, np.float32)


# --- Cache update ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["mixed", "mixed-bf16", "decode-9-3-cap", "mixed-window-packed", "mixed-standard"])
def test_cache_update(case, mode):
    batch, options = batch_and_options(case)
    for in_flight in (1, 3, None):
        out = update(batch, mode, layout=options.get("layout"), num_slices_per_kv_cache_update_block=in_flight)
        expected = np.ascontiguousarray(batch.kv_pages[..., : out.shape[3]])
        np.testing.assert_array_equal(out.view(np.uint8), expected.view(np.uint8))
