import jax
import numpy as np
import pytest
from oracle import assert_close, make_ragged_batch, ragged_paged_attention_oracle

from flax_paged.ops import cascade_attention, merge_attention, ragged_paged_attention

H, KV, D, PAGE = 6, 2, 8, 4
LENGTHS = ((9, 33), (5, 23), (1, 17), (1, 40), (3, 21))


def batch_of(**options):
    return make_ragged_batch(
        LENGTHS, num_q_heads=H, num_kv_heads=KV, head_dim=D, page_size=PAGE, sharpness=3.0, **options
    )


@pytest.mark.parametrize("num_parts", [2, 3])
def test_parts_of_the_pages_merge_to_the_whole(num_parts):
    """Each part sees some of the pages, most parts none of the pages of some query; sinks are counted once."""
    batch = batch_of()
    sinks = np.linspace(-1, 2, H).astype(np.float32)
    part_of_page = np.random.default_rng(0).integers(0, num_parts, batch.block_tables.shape)
    parts = [
        ragged_paged_attention(
            *batch.args, page_mask=part_of_page == part, sinks=sinks if part == 1 else None, return_lse=True
        )
        for part in range(num_parts)
    ]
    out, lse = merge_attention(*(np.stack(x) for x in zip(*parts, strict=True)))
    expected, expected_lse = ragged_paged_attention_oracle(*batch.args, sinks=sinks, return_lse=True)
    assert_close(out, expected, np.float32)
    assert_close(lse, expected_lse, np.float32)


def test_merging_nothing_gives_zeros():
    out, lse = merge_attention(np.zeros((2, 1, H, D), np.float32), np.full((2, 1, H), -np.inf, np.float32))
    assert not np.asarray(out).any() and np.isneginf(lse).all()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_cascade_equals_plain_attention(implementation):
    batch = batch_of(shared_prefix_len=16)
    options = {"sm_scale": 0.4, "soft_cap": 3.0, "sinks": np.linspace(-1, 2, H).astype(np.float32)}
    expected = ragged_paged_attention_oracle(*batch.args, **options)
    run = jax.jit(lambda args, n: cascade_attention(*args, n, implementation=implementation, **options))
    for num_shared_pages in range(5):
        out = run(batch.args, np.array([num_shared_pages], np.int32))
        assert_close(out, expected, np.float32, str(num_shared_pages))
    assert run._cache_size() == 1


def test_cascade_refuses_what_depends_on_distance():
    with pytest.raises(ValueError, match="sliding_window=4"):
        cascade_attention(*batch_of().args, np.zeros(1, np.int32), sliding_window=4)
