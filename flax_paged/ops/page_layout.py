"""How the page pool is laid out in memory: the standard layout, and the one that the TPU kernels want.

| layout | head_dim | shape |
|---|---|---|
| standard | any | [num_pages, page_size, 2 * KV, padded D]; combined head 2h is K of kv head h, 2h + 1 its V |
| tpu | above 64 | [num_pages, page_size, KV, 2, padded D]: the same numbers in the same order |
| tpu, packed | up to 64 | [num_pages, page_size / 2, KV, 2, 128]: tokens 2i and 2i + 1, K in lanes 0-63, V in 64-127 |
| tpu, 8 bits | above 64 | [num_pages, page_size / 4, 2 * KV, 4, padded D]: combined heads, tokens 4i to 4i + 3 |
| tpu, 8 bits, packed | up to 64 | [num_pages, page_size / 4, KV, 4, 128]: the same, K in lanes 0-63, V in 64-127 |

A TPU tiles the last two dimensions of an array. With two rows the tile is exactly full for any number of heads and in
16 bits as well as in 32, with four rows in 8 bits, so that nothing is padded, a group (one token, or those that share
rows of words) can be copied without touching its neighbours, and XLA and the kernels agree about the layout. The rank,
and then head_dim and the dtype, say which layout it is.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

NUM_LANES = 128
# The largest head whose K and V share the lanes, and the lane where V begins.
MAX_PACKED_HEAD_DIM = V_LANE = NUM_LANES // 2


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """What an array's shape says about the pages in it; `PageLayout.of` reads it.

    Args:
        num_pages: Pages in the pool.
        page_size: Tokens in a page.
        num_kv_heads: KV heads.
        num_lanes: Size of the last dimension.
        is_standard: Whether this is the standard layout.
        is_packed: Whether K and V share the lanes.
        tokens_per_group: Tokens under one index of the second dimension; always 1 in the standard layout.
    """

    num_pages: int
    page_size: int
    num_kv_heads: int
    num_lanes: int
    is_standard: bool
    is_packed: bool
    tokens_per_group: int = 1

    @property
    def rows_per_token(self) -> int:
        """Rows of lanes that a token has: K and V of each KV head, or one for both."""
        return self.num_kv_heads * (1 if self.is_packed else 2)

    @classmethod
    def of(cls, kv_pages: Any, head_dim: int) -> "PageLayout":
        """Return the layout of a pool that holds heads of size `head_dim`.

        Raises:
            ValueError: The shape is that of no layout.
        """
        shape = kv_pages.shape
        if len(shape) not in (4, 5) or min(shape) < 1:
            raise ValueError(
                f"kv_pages has shape {shape}: expected [num_pages, page_size, 2 * num_kv_heads, padded head_dim] or one"
                " of the TPU's layouts, with 5 dimensions; CacheSpec.shape has it."
            )
        if len(shape) == 4:
            if shape[2] % 2:
                raise ValueError(f"kv_pages has {shape[2]} combined heads: expected an even number, K and V of each.")
            layout = cls(shape[0], shape[1], shape[2] // 2, shape[3], is_standard=True, is_packed=False)
        else:
            layout = cls._of_tpu(shape, head_dim, tokens_per_group(kv_pages.dtype, head_dim))
        if layout.num_lanes < head_dim:
            raise ValueError(
                f"kv_pages has head_dim {shape[-1]}, less than {head_dim=} of the tokens: expected at least as much;"
                " make the cache with this head_dim."
            )
        return layout

    @classmethod
    def _of_tpu(cls, shape, head_dim, group):
        is_packed = head_dim <= MAX_PACKED_HEAD_DIM
        rows, num_rows = shape[2:4]
        lanes_fit = shape[4] == NUM_LANES if is_packed else shape[4] % NUM_LANES == 0
        is_split = group == 4 and not is_packed  # K and V in rows of the third dimension, not of the fourth
        if num_rows != max(group, 2) or not lanes_fit or (is_split and rows % 2):
            heads = "2 * num_kv_heads" if is_split else "num_kv_heads"
            size = f"page_size / {group}" if group > 1 else "page_size"
            expected = f"{size}, {heads}, {max(group, 2)}, {'128' if is_packed else '128 * n'}"
            raise ValueError(
                f"kv_pages has shape {shape}: expected [num_pages, {expected}], the TPU's layout for {head_dim=} in"
                f" {'8 bits' if group == 4 else '16 or 32 bits'}."
            )
        num_kv_heads = rows // 2 if is_split else rows
        return cls(shape[0], shape[1] * group, num_kv_heads, shape[4], False, is_packed, group)


def tokens_per_group(dtype: Any, head_dim: int) -> int:
    """Return how many tokens share rows of words in the TPU's layout: 1, 2 or 4; a page holds a multiple of it."""
    if jnp.dtype(dtype).itemsize == 1:
        return 4
    return 2 if head_dim <= MAX_PACKED_HEAD_DIM else 1


def token_rows(k: jax.Array, v: jax.Array, num_lanes: int, *, is_packed: bool) -> jax.Array:
    """Bring keys and values [T, KV, D] to the form they have in the pages, zeros in the lanes that are left over.

    Returns:
        [T, KV, 2, num_lanes], K and V; packed: [T, KV, 128], K and V in one row.
    """

    def pad(x, size):
        return jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[2])))

    if is_packed:
        return jnp.concatenate([pad(k, V_LANE), pad(v, V_LANE)], axis=2)
    return jnp.stack([pad(k, num_lanes), pad(v, num_lanes)], axis=2)


def to_standard_layout(kv_pages: jax.Array, head_dim: int) -> jax.Array:
    """Return the pool in the standard layout [num_pages, page_size, 2 * KV, padded D]; packed heads come 64 wide."""
    layout = PageLayout.of(kv_pages, head_dim)
    if layout.tokens_per_group > 1:
        kv_pages = kv_pages.swapaxes(2, 3)  # [num_pages, groups, tokens of the group, rows of a token, lanes]
    return kv_pages.reshape(layout.num_pages, layout.page_size, 2 * layout.num_kv_heads, -1)


def to_tpu_layout(kv_pages: jax.Array, head_dim: int) -> jax.Array:
    """Return the pool in the TPU's layout for this head_dim; lanes are added or dropped as that needs.

    Raises:
        ValueError: Pages that do not hold whole groups of tokens (`tokens_per_group`).
    """
    layout = PageLayout.of(kv_pages, head_dim)
    if not layout.is_standard:
        return kv_pages
    num_pages, page_size, num_kv_heads = layout.num_pages, layout.page_size, layout.num_kv_heads
    is_packed, group = head_dim <= MAX_PACKED_HEAD_DIM, tokens_per_group(kv_pages.dtype, head_dim)
    num_lanes = V_LANE if is_packed else -(-head_dim // NUM_LANES) * NUM_LANES
    kv_pages = kv_pages[..., :num_lanes]
    kv_pages = jnp.pad(kv_pages, ((0, 0), (0, 0), (0, 0), (0, num_lanes - kv_pages.shape[3])))
    if group == 1:
        return kv_pages.reshape(num_pages, page_size, num_kv_heads, 2, num_lanes)
    if page_size % group:
        raise ValueError(
            f"kv_pages has {page_size=}: expected a multiple of {group}, as so many tokens of {head_dim=} and"
            f" {kv_pages.dtype} share words."
        )
    return kv_pages.reshape(num_pages, page_size // group, group, -1, 2 * V_LANE if is_packed else num_lanes).swapaxes(
        2, 3
    )
