"""How scales for each token and KV head are laid out beside the pages.

| layout | shape |
|---|---|
| standard | [num_pages, page_size, 2 * KV, 1]: like the standard pages with a head_dim of 1 |
| lines | [num_pages, page_size * KV / 128, 2, 128]: lines of 128 scales of keys and as many of values |

Lines hold the scales in the order of the rows of 8-bit pages in the TPU's layout: groups of four tokens, then KV heads,
then the tokens of the group. So the TPU kernel fetches those of a page with one copy and multiplies scores with them as
they are. Two rows fill a tile (`ops.page_layout`), so that nothing is padded.
"""

import jax

from flax_paged.ops.page_layout import NUM_LANES

_GROUP = 4  # tokens that share words in 8 bits


def fit_lines(page_size: int, num_kv_heads: int) -> bool:
    """Whether the scales of a page fill whole lines."""
    return page_size % _GROUP == 0 and page_size * num_kv_heads % NUM_LANES == 0


def lines_shape(num_pages: int, page_size: int, num_kv_heads: int) -> tuple[int, int, int, int]:
    """Shape of scales in lines."""
    return num_pages, page_size * num_kv_heads // NUM_LANES, 2, NUM_LANES


def are_lines(shape: tuple[int, ...]) -> bool:
    """Whether scales of this shape are in lines."""
    return shape[-1] == NUM_LANES


def rows_of(token: jax.Array, head: jax.Array, num_kv_heads: int) -> jax.Array:
    """Return the place of a token's scale among those of its page; 128 of them are a line."""
    return (token // _GROUP * num_kv_heads + head) * _GROUP + token % _GROUP


def to_scale_lines(kv_scales: jax.Array) -> jax.Array:
    """Bring scales from the standard layout to lines.

    Raises:
        ValueError: The scales of a page do not fill whole lines.
    """
    num_pages, page_size, num_heads, _ = kv_scales.shape
    if not fit_lines(page_size, num_heads // 2):
        raise ValueError(
            f"kv_scales has shape {kv_scales.shape}: expected page_size * num_kv_heads to be a multiple of {NUM_LANES}."
        )
    groups = kv_scales.reshape(num_pages, page_size // _GROUP, _GROUP, num_heads // 2, 2)
    lines = groups.swapaxes(2, 3).reshape(num_pages, -1, NUM_LANES, 2)
    return lines.swapaxes(2, 3)


def to_standard_scales(lines: jax.Array, num_kv_heads: int) -> jax.Array:
    """The inverse of `to_scale_lines`."""
    num_pages, num_lines = lines.shape[:2]
    page_size = num_lines * NUM_LANES // num_kv_heads
    groups = lines.swapaxes(2, 3).reshape(num_pages, page_size // _GROUP, num_kv_heads, _GROUP, 2)
    return groups.swapaxes(2, 3).reshape(num_pages, page_size, 2 * num_kv_heads, 1)
