"""The features of the TPU kernel beyond windows and caps, in interpret mode against the float64 oracle."""

import numpy as np
import pytest
from oracle import BF16, assert_close, make_ragged_batch, ragged_paged_attention_oracle
from tpu_interpret_tools import MODES, attend

from flax_paged.ops import ragged_paged_attention

DECODE = ((1, 5), (1, 64), (1, 130), (1, 33), (1, 1))
MIXED = ((5, 5), (1, 77), (40, 100), (17, 60), (1, 128))
SINKS = {"sinks": np.linspace(-2, 4, 6).astype(np.float32)}
# (lengths, head_dim, dtype, options); blocks are of 64 keys and 16 queries.
CASES = {
    "decode-sinks": (DECODE, 64, BF16, SINKS | {"max_query_len": 1}),
    "decode-chunk": (DECODE, 128, BF16, {"attention_chunk_size": 28, "max_query_len": 1}),
    "decode-encoder": (DECODE, 64, np.float32, {"causal": False, "max_query_len": 1}),
    "sinks": (MIXED, 128, np.float32, SINKS),
    "sinks-cap-window-packed": (MIXED, 64, BF16, SINKS | {"soft_cap": 5.0, "sliding_window": 21}),
    "chunk-smaller-than-a-block": (MIXED, 128, BF16, {"attention_chunk_size": 7}),
    "chunk-packed": (MIXED, 24, BF16, {"attention_chunk_size": 37}),
    "chunk-window-sinks": (MIXED, 128, np.float32, SINKS | {"attention_chunk_size": 90, "sliding_window": 50}),
    "encoder": (MIXED, 128, BF16, {"causal": False}),
    "encoder-window": (MIXED, 64, np.float32, {"causal": False, "sliding_window": 9}),
    "encoder-chunk": (MIXED, 128, np.float32, {"causal": False, "attention_chunk_size": 31}),
}


def batch_of(lengths, head_dim, dtype):
    return make_ragged_batch(
        lengths, num_q_heads=6, num_kv_heads=3, head_dim=head_dim, page_size=16, dtype=dtype, padded_head_dim=128,
        sharpness=3.0,
    )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_feature(case, mode):
    lengths, head_dim, dtype, options = CASES[case]
    batch, sm_scale = batch_of(lengths, head_dim, dtype), head_dim**-0.5
    out = attend(
        batch, mode, sm_scale=sm_scale, num_kv_pages_per_block=4,
        num_queries_per_block=None if "max_query_len" in options else 16, **options,
    )  # fmt: skip
    options = {name: value for name, value in options.items() if name != "max_query_len"}
    expected = ragged_paged_attention_oracle(*batch.args, sm_scale=sm_scale, **options)
    assert_close(out, expected, dtype, slack=2)


@pytest.mark.parametrize("sinks", [None, SINKS["sinks"]], ids=["plain", "sinks"])
def test_cross_attention_to_any_number_of_keys(sinks):
    """More queries than keys, fewer, and no keys at all, which give zeros."""
    batch = batch_of(((5, 5), (20, 20), (1, 1), (3, 3), (1, 1)), 64, np.float32)
    encoder = batch_of(((3, 3), (4, 4), (90, 90), (1, 1), (1, 1)), 64, np.float32)
    batch.kv_pages, batch.block_tables, batch.seq_lens = encoder.kv_pages, encoder.block_tables, encoder.seq_lens
    batch.seq_lens[3:5] = 0
    out = ragged_paged_attention(*batch.args, causal=False, sinks=sinks, implementation="pallas_tpu_interpret")
    expected = ragged_paged_attention_oracle(*batch.args, causal=False, sinks=sinks)
    assert_close(out, expected, np.float32)
    assert not np.asarray(out)[26:].any()
