"""Block sizes stay within every generation's memory, and a budget that cannot hold them is named."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_paged.ops.ragged_paged_attention.block_sizes import (
    SMEM_BUDGET,
    VMEM_BUDGET,
    Problem,
    choose_block_sizes,
    padded_rows,
    smem_bytes,
    vmem_bytes,
)


@st.composite
def problems(draw):
    num_kv_heads = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 32]))
    return Problem(
        num_q_heads=num_kv_heads * draw(st.sampled_from([1, 2, 3, 4, 8])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([128, 256])),
        page_size=draw(st.sampled_from([1, 8, 16, 32, 33, 64, 128, 256])),
        pages_per_seq=draw(st.integers(1, 4096)),
        num_tokens=draw(st.integers(1, 8192)),
        q_bytes=draw(st.sampled_from([2, 4])),
        kv_bytes=draw(st.sampled_from([2, 4])),
        decode_only=draw(st.booleans()),
        is_packed=draw(st.booleans()),
    )


def rows_of_a_tile(problem):
    return 8 if problem.q_bytes == problem.kv_bytes == 4 else 16


@settings(max_examples=200, deadline=None)
@given(problems(), st.sampled_from([None, *VMEM_BUDGET]))
def test_default_block_sizes_fit_and_divide(problem, generation):
    try:
        blocks = choose_block_sizes(problem, generation=generation)
    except ValueError as error:
        # Only where the smallest blocks do not fit: odd page sizes of many wide heads, or v4's 16 MiB.
        smallest = vmem_bytes(problem, problem.page_unit, 1 if problem.decode_only else rows_of_a_tile(problem))
        assert smallest > VMEM_BUDGET.get(generation, VMEM_BUDGET["7x"]) - 2 * 2**20
        assert "num_kv_pages_per_block" in str(error)
        return
    tokens = blocks.pages_per_block * problem.page_size
    keys = tokens * (problem.num_kv_heads if problem.decode_only else 1)
    assert blocks.vmem_bytes < blocks.vmem_limit_bytes <= VMEM_BUDGET.get(generation, VMEM_BUDGET["7x"])
    assert keys % 128 == 0
    assert tokens % blocks.edge_chunk == 0
    assert (problem.num_q_heads // problem.num_kv_heads) % blocks.heads_per_chunk == 0
    assert blocks.queries_per_block % (1 if problem.decode_only else rows_of_a_tile(problem)) == 0


def test_common_shapes_fit_every_generation():
    heads, head_dims = ((32, 8), (9, 3), (64, 8), (8, 1), (16, 16)), (128, 256)
    for head, head_dim, page_size, nbytes, decode_only, generation in itertools.product(
        heads, head_dims, (16, 64, 128), (2, 4), (True, False), VMEM_BUDGET
    ):
        problem = Problem(*head, head_dim, page_size, 4096 // page_size, 2048, nbytes, nbytes, decode_only)
        if (generation, *head, head_dim, nbytes, decode_only) == ("v4", 16, 16, 256, 4, False):
            continue  # a block of 128 keys takes 16 MiB, all that there is
        choose_block_sizes(problem, generation=generation)


def test_overrides_are_kept_or_refused():
    problem = Problem(32, 8, 128, 16, 256, 2048, 2, 2, False)
    blocks = choose_block_sizes(problem, num_kv_pages_per_block=10, num_queries_per_block=20)
    assert (blocks.pages_per_block, blocks.queries_per_block) == (16, 32)
    with pytest.raises(ValueError, match="num_queries_per_block"):
        choose_block_sizes(problem, num_kv_pages_per_block=4096, num_queries_per_block=512)
    with pytest.raises(ValueError, match="vmem_limit_bytes"):
        choose_block_sizes(problem, vmem_limit_bytes=2**21)


def test_page_table_does_not_have_to_fit_in_smem():
    problem = Problem(32, 8, 128, 16, 2048, 256, 2, 2, True)
    assert 256 * 2048 * 4 > 2**20
    assert smem_bytes(problem, 256) < SMEM_BUDGET // 8


@pytest.mark.parametrize("heads, rows", [(1, 2), (2, 2), (3, 4), (6, 8), (8, 8), (9, 16), (18, 24)])
def test_padded_rows(heads, rows):
    assert padded_rows(heads) == rows
