"""The layouts of the page pool: conversion, and every portable implementation on both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import BF16, assert_close, make_ragged_batch, ragged_paged_attention_oracle

from flax_paged.ops import kv_cache_update, ragged_paged_attention, to_standard_layout, to_tpu_layout
from flax_paged.ops.page_layout import PageLayout

LENGTHS = ((1, 20), (5, 9), (9, 30), (1, 3))


def make_batch(head_dim, num_kv_heads=3, dtype=np.float32, **options):
    return make_ragged_batch(
        LENGTHS, num_q_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=4, dtype=dtype,
        padded_head_dim=64 if head_dim <= 64 else -(-head_dim // 128) * 128, **options,
    )  # fmt: skip


def packed_by_hand(kv_pages):
    num_pages, page_size, combined, width = kv_pages.shape
    packed = np.empty((num_pages, page_size // 2, combined // 2, 2, 2 * width), kv_pages.dtype)
    for token in range(page_size):
        for head in range(combined // 2):
            packed[:, token // 2, head, token % 2, :64] = kv_pages[:, token, 2 * head]
            packed[:, token // 2, head, token % 2, 64:] = kv_pages[:, token, 2 * head + 1]
    return packed


@pytest.mark.parametrize("head_dim", [16, 64])
def test_packed_layout_is_what_the_docstring_says(head_dim):
    pages = make_batch(head_dim).kv_pages
    packed = np.asarray(to_tpu_layout(jnp.asarray(pages), head_dim))
    np.testing.assert_array_equal(packed, packed_by_hand(pages))
    np.testing.assert_array_equal(to_standard_layout(packed, head_dim), pages)
    assert PageLayout.of(packed, head_dim) == PageLayout(
        len(pages), 4, 3, 128, is_standard=False, is_packed=True, tokens_per_group=2
    )


@pytest.mark.parametrize("head_dim", [80, 128, 256])
def test_unpacked_layout_keeps_the_order(head_dim):
    pages = make_batch(head_dim).kv_pages
    converted = to_tpu_layout(jnp.asarray(pages), head_dim)
    np.testing.assert_array_equal(converted.reshape(pages.shape), pages)
    np.testing.assert_array_equal(to_standard_layout(converted, head_dim), pages)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("head_dim", [24, 64, 80])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_attention_and_update(implementation, head_dim, dtype):
    batch = make_batch(head_dim, dtype=dtype)
    pages = to_tpu_layout(jnp.asarray(batch.kv_pages), head_dim)
    for max_query_len in (None, 9):
        out = ragged_paged_attention(
            batch.q, pages, *batch.args[2:], max_query_len=max_query_len, implementation=implementation
        )
        assert_close(out, ragged_paged_attention_oracle(*batch.args), dtype)
    before = to_tpu_layout(jnp.asarray(batch.kv_pages_before), head_dim)
    updated = kv_cache_update(before, *batch.update_args[1:], implementation=implementation)
    np.testing.assert_array_equal(np.asarray(updated).view(np.uint8), np.asarray(pages).view(np.uint8))


@pytest.mark.parametrize(
    "shape, head_dim, message",
    [
        ((4, 8, 3, 2, 64), 64, r"expected \[num_pages, page_size / 2, num_kv_heads, 2, 128\]"),
        ((4, 8, 3, 1, 128), 64, r"page_size / 2"),
        ((4, 8, 3, 2, 80), 80, r"expected \[num_pages, page_size, num_kv_heads, 2, 128 \* n\]"),
        ((4, 8, 3, 2, 128), 256, "less than head_dim=256"),
        ((4, 8, 128), 64, "kv_pages has shape"),
    ],
)
def test_a_shape_of_no_layout_is_refused(shape, head_dim, message):
    with pytest.raises(ValueError, match=message):
        PageLayout.of(jax.ShapeDtypeStruct(shape, jnp.float32), head_dim)


def test_pages_of_an_odd_number_of_tokens_cannot_be_packed():
    with pytest.raises(ValueError, match="page_size=5: expected a multiple of 2"):
        to_tpu_layout(jnp.zeros((4, 5, 6, 64)), 64)


@pytest.mark.parametrize("head_dim", [24, 128])
def test_eight_bits_have_a_layout_of_four_tokens(head_dim):
    """Conversion there and back, and the portable implementations on it."""
    batch = make_batch(head_dim)
    pages = np.clip(np.nan_to_num(np.round(batch.kv_pages * 40), nan=127), -127, 127).astype(np.int8)
    converted = to_tpu_layout(jnp.asarray(pages), head_dim)
    rows = 3 if head_dim <= 64 else 6
    assert converted.shape == (len(pages), 1, rows, 4, 128)
    assert PageLayout.of(converted, head_dim).tokens_per_group == 4
    np.testing.assert_array_equal(to_standard_layout(converted, head_dim), pages)
    scales = {"k_scale": np.float32(0.03), "v_scale": np.array([0.01, 0.02, 0.03], np.float32)}
    expected = ragged_paged_attention_oracle(batch.q, pages, *batch.args[2:], **scales)
    for implementation in ("reference", "xla"):
        out = ragged_paged_attention(batch.q, converted, *batch.args[2:], **scales, implementation=implementation)
        assert_close(out, expected, np.float32)
        before = jnp.full_like(converted, 99)
        k, v = (jnp.asarray(np.round(x * 40)).astype(jnp.int8) for x in (batch.k, batch.v))
        updated = kv_cache_update(before, k, v, *batch.update_args[3:], implementation=implementation)
        standard = kv_cache_update(
            jnp.full_like(jnp.asarray(pages), 99), k, v, *batch.update_args[3:], implementation="reference"
        )  # fmt: skip
        np.testing.assert_array_equal(to_standard_layout(updated, head_dim)[..., :head_dim], standard[..., :head_dim])
