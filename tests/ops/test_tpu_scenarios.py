"""Faults that users of such kernels reported, on the TPU kernel in interpret mode; the portable ones have theirs."""

import numpy as np
import pytest
from oracle import assert_close, make_ragged_batch, ragged_paged_attention_oracle
from tpu_interpret_tools import attend

BLOCKS = {"num_kv_pages_per_block": 32, "num_queries_per_block": 16}


def batch_of(lengths, head_dim, **options):
    return make_ragged_batch(
        lengths, num_q_heads=4, num_kv_heads=2, head_dim=head_dim, page_size=4, padded_head_dim=128, **options
    )


def with_value(batch, position, value):
    """The pool with the values (not the keys) of one token of the first sequence replaced."""
    pages = batch.kv_pages.copy()
    pages[batch.block_tables[0, position // 4], position % 4, 1::2] = value
    return pages


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("query_len", [16, 3, 1], ids=["one_shot", "chunk", "decode"])
def test_window_holds_exactly_its_keys(query_len, head_dim, window=5):
    """The window's edge lies in the middle of a page, and of a packed pair of tokens."""
    batch = batch_of(((query_len, 16), (2, 5)), head_dim)
    base = attend(batch, sliding_window=window, **BLOCKS)
    for row in {0, query_len - 1}:
        position = 16 - query_len + row
        for key, is_seen in ((position - window, False), (position - window + 1, True), (position + 1, False)):
            if 0 <= key < 16:
                out = attend(batch, kv_pages=with_value(batch, key, 9.0), sliding_window=window, **BLOCKS)
                assert (out[row] != base[row]).any() == is_seen, f"{position=} {key=}"


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [None, 3])
def test_soft_cap_comes_before_the_mask(head_dim, window):
    batch = batch_of(((8, 16), (1, 5)), head_dim, sharpness=30.0)
    options = {"soft_cap": 5.0, "sliding_window": window}
    base = attend(batch, **options, **BLOCKS)
    assert_close(base, ragged_paged_attention_oracle(*batch.args, **options), np.float32)
    out = attend(batch, kv_pages=with_value(batch, 15, 1e4), **options, **BLOCKS)
    np.testing.assert_array_equal(out[:7], base[:7])
    assert np.abs(out[7]).max() > 10


@pytest.mark.parametrize("head_dim", [64, 128])
def test_pages_before_the_window_may_be_given_away(head_dim):
    """An engine that frees pages left of the window lets others write there: NaN in them must not leak."""
    batch = batch_of(((1, 30), (1, 9)), head_dim)
    base = attend(batch, sliding_window=6, max_query_len=1, **BLOCKS)
    pages = batch.kv_pages.copy()
    pages[batch.block_tables[0, :6]] = np.nan
    out = attend(batch, kv_pages=pages, sliding_window=6, max_query_len=1, **BLOCKS)
    np.testing.assert_array_equal(out, base)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_an_odd_number_of_tokens_leaves_the_rest_of_the_page_unseen(head_dim):
    """Every length from one token to past a page, with NaN in all other slots."""
    batch = batch_of(tuple((1, n) for n in range(1, 10)), head_dim, poison=np.nan)
    assert_close(attend(batch, max_query_len=1, **BLOCKS), ragged_paged_attention_oracle(*batch.args), np.float32)
