import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_paged.metadata import PagedMetadata, SequenceSlice, build_metadata, slot_mapping_width

SHAPE = {"page_size": 4, "num_pages": 10, "max_num_tokens": 16, "max_num_seqs": 4, "max_pages_per_seq": 5}


def test_a_mixed_batch_by_hand():
    metadata = build_metadata([SequenceSlice([7, 2, 5], 3, 6), SequenceSlice([9], 0, 1)], **SHAPE)
    np.testing.assert_array_equal(metadata.positions[:7], [3, 4, 5, 6, 7, 8, 0])
    np.testing.assert_array_equal(metadata.seq_lens, [9, 1, 0, 0])
    np.testing.assert_array_equal(metadata.query_start_loc, [0, 6, 7, 7, 7])
    np.testing.assert_array_equal(metadata.block_tables[:2], [[7, 2, 5, 0, 0], [9, 0, 0, 0, 0]])
    assert metadata.num_seqs.tolist() == [2]
    assert metadata.num_kv_update_slices.tolist() == [4]
    # page 7 slot 3, page 2 slots 0-3, page 5 slot 0, page 9 slot 0
    np.testing.assert_array_equal(metadata.slot_mapping[:, :4], [[31, 8, 20, 36], [0, 1, 5, 6], [1, 4, 1, 1]])
    np.testing.assert_array_equal(metadata.logits_rows(), [5, 6, 6, 6])


def test_all_logits():
    metadata = build_metadata([SequenceSlice([1], 0, 2)], **SHAPE, logits="all")
    np.testing.assert_array_equal(metadata.logits_rows(), np.arange(16))


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_slices_cover_exactly_the_new_tokens(data):
    page_size = data.draw(st.integers(1, 9))
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=6))
    num_pages = sum(-(-(c + n) // page_size) for c, n in lengths)
    free = data.draw(st.permutations(range(num_pages)))
    sequences, expected, row = [], {}, 0
    for context_len, new in lengths:
        pages, free = free[: -(-(context_len + new) // page_size)], free[-(-(context_len + new) // page_size) :]
        sequences.append(SequenceSlice(pages, context_len, new))
        for position in range(context_len, context_len + new):
            expected[row] = pages[position // page_size] * page_size + position % page_size
            row += 1
    max_num_tokens = row + data.draw(st.integers(0, 5))
    max_num_seqs = len(lengths) + data.draw(st.integers(0, 3))
    metadata = build_metadata(
        sequences,
        page_size=page_size,
        num_pages=num_pages,
        max_num_tokens=max_num_tokens,
        max_num_seqs=max_num_seqs,
        max_pages_per_seq=max(len(s.pages) for s in sequences),
    )
    assert metadata.slot_mapping.shape == (3, slot_mapping_width(max_num_tokens, max_num_seqs, page_size))
    written = {}
    for start, token, length in metadata.slot_mapping[:, : metadata.num_kv_update_slices[0]].T.tolist():
        assert start // page_size == (start + length - 1) // page_size, "a slice crosses a page"
        written |= {token + i: start + i for i in range(length)}
    assert written == expected


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (SequenceSlice([10], 0, 1), r"sequences\[0\].pages holds page id 10: expected 0 <= id < num_pages=10"),
        (SequenceSlice([-1], 0, 1), r"page id -1"),
        (SequenceSlice([1, 2], 7, 2), r"has 2 pages of 4 tokens, but its 7 \+ 2 tokens need 3"),
        (SequenceSlice([], 0, 1), r"has 0 pages of 4 tokens, but its 0 \+ 1 tokens need 1"),
        (SequenceSlice([1], -1, 3), r"a query of 3 tokens is longer than its sequence of 2"),
        (SequenceSlice([1], 2, 0), r"num_new_tokens=0: expected at least 1"),
        (SequenceSlice([1, 2, 3, 4, 5, 6], 0, 1), r"has 6 pages, more than max_pages_per_seq=5"),
        (SequenceSlice([1, 2, 3, 4, 5], 0, 17), r"17 new tokens do not fit max_num_tokens=16"),
        (SequenceSlice([1, 1], 0, 8), r"writes page 1, which another slice"),
    ],
)
def test_what_cannot_be_right_is_refused(sequence, message):
    with pytest.raises(ValueError, match=message):
        build_metadata([sequence], **SHAPE)


def test_batches_beyond_the_bucket_are_refused():
    with pytest.raises(ValueError, match="5 sequences do not fit max_num_seqs=4"):
        build_metadata([SequenceSlice([i], 0, 1) for i in range(5)], **SHAPE)
    with pytest.raises(ValueError, match="writes page 3, which another slice"):
        build_metadata([SequenceSlice([3], 0, 1), SequenceSlice([3], 1, 1)], **SHAPE)
    with pytest.raises(ValueError, match="num_new_tokens=2 is more than max_query_len=1"):
        build_metadata([SequenceSlice([3], 0, 2)], **SHAPE, max_query_len=1)
    with pytest.raises(ValueError, match="logits='first'"):
        build_metadata([SequenceSlice([3], 0, 2)], **SHAPE, logits="first")


def test_slots_beyond_int32_elements_are_right():
    """Page ids near the end of a pool of 2^31 token slots, whose element offsets pass 2^31 by far."""
    metadata = build_metadata(
        [SequenceSlice(np.array([134_217_726], np.int32), 0, 3)],
        page_size=16,
        num_pages=134_217_727,
        max_num_tokens=4,
        max_num_seqs=1,
        max_pages_per_seq=1,
    )
    assert metadata.slot_mapping[:, 0].tolist() == [134_217_726 * 16, 0, 3]


def test_it_is_a_pytree_whose_static_part_is_hashable():
    metadata = build_metadata([SequenceSlice([1], 0, 2)], **SHAPE, max_query_len=2)
    leaves, treedef = jax.tree.flatten(metadata)
    assert len(leaves) == 7 and all(leaf.dtype == np.int32 for leaf in leaves)
    hash(treedef)
    assert isinstance(jax.tree.map(lambda x: x, metadata), PagedMetadata)
    traces = []
    function = jax.jit(lambda m: traces.append(1) or m.seq_lens + 0)
    for context_len in range(3):
        function(build_metadata([SequenceSlice([1, 2], context_len, 2)], **SHAPE, max_query_len=2))
    assert len(traces) == 1
