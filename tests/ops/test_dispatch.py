"""What the ops refuse, and what they say."""

import dataclasses

import jax
import numpy as np
import pytest
from oracle import make_ragged_batch

from flax_paged.ops import check_metadata_values, kv_cache_update, ragged_paged_attention

BATCH = make_ragged_batch(((3, 9), (1, 6)), num_q_heads=4, num_kv_heads=2, head_dim=8, page_size=4)
ARGUMENTS = ("q", "kv_pages", "seq_lens", "block_tables", "query_start_loc", "num_seqs")


def test_out_dtype_of_q_is_fine():
    assert ragged_paged_attention(*BATCH.args, out_dtype=np.float32).dtype == np.float32


@pytest.mark.parametrize(
    "name, value, error, message",
    [
        ("q", BATCH.q[0], ValueError, "q has shape"),
        ("q", BATCH.q[:, :3], ValueError, "q has 3 heads and kv_pages 2 kv heads"),
        ("q", np.zeros((8, 4, 9), np.float32), ValueError, "head_dim 8, less than head_dim=9"),
        ("q", np.zeros(BATCH.q.shape, np.int32), TypeError, "q has dtype int32"),
        ("kv_pages", BATCH.kv_pages[:, :, :3], ValueError, "3 combined heads: expected an even number"),
        ("kv_pages", BATCH.kv_pages[0], ValueError, "kv_pages has shape"),
        ("kv_pages", np.zeros(BATCH.kv_pages.shape, np.int16), TypeError, "kv_pages has dtype int16"),
        ("seq_lens", BATCH.seq_lens[1:], ValueError, r"seq_lens has shape \(3,\): expected \[4\]"),
        ("seq_lens", BATCH.seq_lens.astype(np.int16), TypeError, "seq_lens has dtype int16: expected int32"),
        ("block_tables", BATCH.block_tables[:, :0], ValueError, "block_tables has shape"),
        ("query_start_loc", BATCH.query_start_loc[1:], ValueError, "query_start_loc has shape"),
        ("num_seqs", np.int32(2), ValueError, r"num_seqs has shape \(\): expected \[1\]"),
    ],
)
def test_bad_arrays(name, value, error, message):
    arguments = dict(zip(ARGUMENTS, BATCH.args, strict=True)) | {name: value}
    with pytest.raises(error, match=message):
        ragged_paged_attention(**arguments)


@pytest.mark.parametrize(
    "option",
    [
        {"sliding_window": 0}, {"soft_cap": 0.0}, {"soft_cap": -1.0}, {"max_query_len": 0}, {"attention_chunk_size": 0},
        {"sinks": np.zeros(3)}, {"alibi_slopes": np.zeros((4, 1))}, {"k_scale": np.ones(4)}, {"v_scale": np.ones(3)},
        {"page_mask": np.ones((4, 1), bool)}, {"draft_mask": np.ones((3, 1), np.int32)},
        {"kv_scales": np.ones((2, 4, 4, 1))}, {"out_scale": 2.0},
        {"draft_mask": np.ones((len(BATCH.q), 1), np.int32), "sliding_window": 4},
        {"draft_mask": np.ones((len(BATCH.q), 1), np.int32), "causal": False},
    ],
    ids=str,
)  # fmt: skip
def test_bad_options(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        ragged_paged_attention(*BATCH.args, **option)


@pytest.mark.parametrize("op, arguments", [(ragged_paged_attention, BATCH.args), (kv_cache_update, BATCH.update_args)])
def test_an_implementation_that_cannot_run_is_an_error(op, arguments):
    with pytest.raises(ValueError, match="implementation='cuda': expected None or one of reference, xla"):
        op(*arguments, implementation="cuda")
    if jax.default_backend() != "tpu":
        with pytest.raises(ValueError, match="'pallas_tpu' needs a TPU, but the backend is"):
            op(*arguments, implementation="pallas_tpu")


@pytest.mark.parametrize("option", [{"page_mask": np.ones(BATCH.block_tables.shape)}, {"out_dtype": np.int16}], ids=str)
def test_bad_option_dtypes(option):
    with pytest.raises(TypeError, match=next(iter(option))):
        ragged_paged_attention(*BATCH.args, **option)


def test_scales_belong_to_quantised_caches():
    with pytest.raises(ValueError, match="k_scale and v_scale belong to an int8 or float8 cache"):
        kv_cache_update(*BATCH.update_args, k_scale=2.0)


def test_kernel_refuses_an_unpadded_cache():
    with pytest.raises(ValueError, match="multiple of 128"):
        ragged_paged_attention(*BATCH.args, implementation="pallas_tpu_interpret")


@pytest.mark.parametrize(
    "position, value, message",
    [
        (0, BATCH.kv_pages[:, :, :2], "expected .*4"),
        (1, BATCH.k[:, :, 0], "k has shape"),
        (2, BATCH.v[1:], "v has shape"),
        (3, BATCH.slot_mapping[:2], "slot_mapping has shape"),
        (4, np.zeros(2, np.int32), "num_kv_update_slices has shape"),
    ],
)
def test_bad_update_arrays(position, value, message):
    arguments = list(BATCH.update_args)
    arguments[position] = value
    with pytest.raises(ValueError, match=message):
        kv_cache_update(*arguments)


def change(name, index, value):
    array = getattr(BATCH, name).copy()
    array[index] = value
    return dataclasses.replace(BATCH, **{name: array})


@pytest.mark.parametrize(
    "batch, message",
    [
        (change("block_tables", (0, 1), 99), r"block_tables\[0\] holds page id 99"),
        (change("block_tables", (1, 0), -1), r"block_tables\[1\] holds page id -1"),
        (change("seq_lens", 0, 2), r"seq_lens\[0\]=2 is less than its 3 queries"),
        (change("seq_lens", 1, 1000), r"seq_lens\[1\]=1000 needs 250 pages"),
        (change("query_start_loc", 0, 1), r"query_start_loc\[0\]=1"),
        (change("query_start_loc", 1, 5), r"query_start_loc\[2\] is 1 less"),
        (change("query_start_loc", 2, 50), "expected at most num_tokens"),
        (change("num_seqs", 0, 5), "num_seqs=5"),
        (change("num_kv_update_slices", 0, 50), "num_kv_update_slices=50"),
        (change("slot_mapping", (0, 0), 10**6), "within the"),
        (change("slot_mapping", (2, 0), 5), "within one page of 4 tokens"),
        (change("slot_mapping", (1, 0), 100), "expected tokens within"),
    ],
)
def test_values_that_cannot_be_right(batch, message):
    with pytest.raises(ValueError, match=message):
        check_metadata_values(
            *batch.args[2:], num_pages=len(batch.kv_pages), page_size=4, num_tokens=len(batch.q),
            slot_mapping=batch.slot_mapping, num_kv_update_slices=batch.num_kv_update_slices,
        )  # fmt: skip
