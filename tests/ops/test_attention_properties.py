"""Random small batches: reference == xla == oracle, whatever the lengths and options."""

import jax
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import assert_close, make_ragged_batch, ragged_paged_attention_oracle

from flax_paged.ops import check_metadata_values, ragged_paged_attention

lengths = st.tuples(st.integers(1, 9), st.integers(0, 20)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(lengths, min_size=1, max_size=5),
    heads=st.sampled_from([(4, 2), (5, 1), (3, 3)]),
    page_size=st.integers(1, 9),
    window=st.none() | st.integers(1, 30),
    soft_cap=st.none() | st.sampled_from([2.0, 30.0]),
    shared_prefix_len=st.integers(0, 12),
    sharpness=st.sampled_from([0.5, 8.0]),
    padding=st.integers(0, 4),
)
def test_random_batches(lengths, heads, page_size, window, soft_cap, shared_prefix_len, sharpness, padding):
    batch = make_ragged_batch(
        lengths, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=8, page_size=page_size, sharpness=sharpness,
        shared_prefix_len=shared_prefix_len, num_padding_tokens=padding, num_padding_seqs=padding,
        num_padding_pages=padding,
    )  # fmt: skip
    check_metadata_values(
        *batch.args[2:], num_pages=len(batch.kv_pages), page_size=page_size, num_tokens=len(batch.q),
        slot_mapping=batch.slot_mapping, num_kv_update_slices=batch.num_kv_update_slices,
    )  # fmt: skip
    options = {"sm_scale": 0.35, "sliding_window": window, "soft_cap": soft_cap}
    expected = ragged_paged_attention_oracle(*batch.args, **options)
    for implementation in ("reference", "xla"):
        run = jax.jit(lambda *a, i=implementation: ragged_paged_attention(*a, implementation=i, **options))
        assert_close(run(*batch.args), expected, np.float32, implementation)
