"""Reading blocks of keys and values out of the page pool, for the portable implementation."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flax_paged.ops.page_layout import NUM_LANES, V_LANE, PageLayout
from flax_paged.ops.scales_layout import are_lines, rows_of


class KeyBlock(NamedTuple):
    """L keys and values of each of W sequences, head-major.

    Fields:
        k: [W, KV, L, D].
        v: [W, KV, L, D].
        positions: i32[W, L], of the keys in their sequences; not cut at the last key.
        is_live: bool[W, L], whether this is a key that was asked for.
        k_scale: f32, broadcasts to [W, KV, 1, L]; None if keys are stored as they are.
        v_scale: Likewise.
    """

    k: jax.Array
    v: jax.Array
    positions: jax.Array
    is_live: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None


@dataclasses.dataclass(frozen=True)
class PageReader:
    """The page pool seen through the block tables, by sequence and slot.

    A slot is a place in the sequence's pages. It is the key's position, unless a page mask leaves pages out: then the
    tables hold the visible pages only, and `page_numbers` says which page of the sequence each of them is.

    Args:
        kv_pages: The pool, in any layout.
        block_tables: i32[S, P].
        head_dim: D.
        compute_dtype: Dtype in which keys and values are multiplied.
        page_numbers: i32[S, P] or None.
        kv_scales: One for each token and head, in any layout of `ops.scales_layout`, or None.
        k_scale: f32[KV], one for each head, or None.
        v_scale: Likewise.
    """

    kv_pages: jax.Array
    block_tables: jax.Array
    head_dim: int
    compute_dtype: jnp.dtype
    page_numbers: jax.Array | None = None
    kv_scales: jax.Array | None = None
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None

    @property
    def layout(self) -> PageLayout:
        """The pool's layout."""
        return PageLayout.of(self.kv_pages, self.head_dim)

    @property
    def num_kv_heads(self) -> int:
        """KV."""
        return self.layout.num_kv_heads

    @property
    def max_seq_len(self) -> int:
        """Tokens that the tables have room for."""
        return self.block_tables.shape[1] * self.layout.page_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values, as they are multiplied."""
        return 2 * self.num_kv_heads * self.head_dim * self.compute_dtype.itemsize

    def read(self, seqs: jax.Array, first_slots: jax.Array, last_slots: jax.Array, num_keys: int) -> KeyBlock:
        """Read a block of keys and values of each of W sequences.

        Slots past the last one may hold NaN, and a weight of 0 times NaN is NaN: they are never read, the last key is
        read again in their place.

        Args:
            seqs: i32[W], rows of the block tables.
            first_slots: i32[W], the block's first slot.
            last_slots: i32[W], the last slot that may be read.
            num_keys: Size L of the block.

        Returns:
            The block.
        """
        page_size, num_kv_heads = self.layout.page_size, self.num_kv_heads
        all_slots = first_slots[:, None] + jnp.arange(num_keys, dtype=jnp.int32)[None]
        slots = jnp.clip(all_slots, 0, jnp.maximum(last_slots, 0)[:, None])[:, None]  # [W, 1, L]
        table_entries = seqs[:, None, None], slots // page_size
        pages, tokens = self.block_tables[table_entries], slots % page_size
        positions = all_slots
        if self.page_numbers is not None:
            positions = (self.page_numbers[table_entries] * page_size + tokens)[:, 0]

        heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
        # One gather a row of head_dim, straight into head-major order: a transpose afterwards costs more. Page and row
        # in it stay two indices, as the number of a row in the whole pool can pass 2**31.
        group, rows_per_token = self.layout.tokens_per_group, self.layout.rows_per_token
        first_rows = heads if self.layout.is_packed else 2 * heads  # of K; that of V comes next
        rows = (tokens // group * rows_per_token + first_rows) * group + tokens % group  # [W, KV, L]
        pages = jnp.broadcast_to(pages, rows.shape)
        pool = self.kv_pages.reshape(self.layout.num_pages, -1, self.layout.num_lanes)
        if self.layout.is_packed:
            kv = pool.at[pages, rows].get(mode="promise_in_bounds")
            k, v = kv[..., : self.head_dim], kv[..., V_LANE : V_LANE + self.head_dim]
        else:
            k, v = (pool.at[pages, rows + i * group, : self.head_dim].get(mode="promise_in_bounds") for i in (0, 1))
        return KeyBlock(k, v, positions, all_slots <= last_slots[:, None], *self._scales(pages, tokens, heads))

    def _scales(self, pages, tokens, heads):
        """Return the factors on keys and on values, [W, KV, 1, L] or [1, KV, 1, 1]; None where there are none."""
        scales = [None if scale is None else scale[None, :, None, None] for scale in (self.k_scale, self.v_scale)]
        if self.kv_scales is None:
            return scales
        rows, step = (tokens * self.num_kv_heads + heads) * 2, 1
        if are_lines(self.kv_scales.shape):  # 128 of keys, 128 of values, and so on
            place, step = rows_of(tokens, heads, self.num_kv_heads), NUM_LANES
            rows = place + place // NUM_LANES * NUM_LANES
        pool = self.kv_scales.reshape(self.layout.num_pages, -1)
        of_tokens = (pool.at[pages, rows + i * step].get(mode="promise_in_bounds")[:, :, None] for i in (0, 1))
        return [x.astype(jnp.float32) * (1.0 if s is None else s) for x, s in zip(of_tokens, scales, strict=True)]


def visible_pages(
    block_tables: jax.Array, seq_lens: jax.Array, page_mask: jax.Array, page_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Leave masked pages out of the tables.

    Args:
        block_tables: i32[S, P].
        seq_lens: i32[S].
        page_mask: bool[S, P].
        page_size: Tokens in a page.

    Returns:
        Tables with the visible live pages first and in order, i32[S, P]; which page of the sequence each entry is,
        i32[S, P]; and the number of slots in them, i32[S].
    """
    numbers = jnp.arange(block_tables.shape[1], dtype=jnp.int32)[None]
    lengths = jnp.clip(seq_lens[:, None] - numbers * page_size, 0, page_size)
    lengths = jnp.where(page_mask, lengths, 0)
    order = jnp.argsort(lengths == 0, axis=1, stable=True).astype(jnp.int32)
    return jnp.take_along_axis(block_tables, order, axis=1), order, jnp.sum(lengths, axis=1, dtype=jnp.int32)
