"""The paged KV cache: its shape and bytes (`CacheSpec`) and the Variable that holds it (`KVCache`)."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import reprlib

from flax_paged.ops.page_layout import MAX_PACKED_HEAD_DIM, NUM_LANES, tokens_per_group
from flax_paged.ops.quantization import is_quantized
from flax_paged.ops.scales_layout import fit_lines, lines_shape

# Half of a TPU core's 1 MiB of SMEM may hold a step's block tables (the rule of the vLLM Pallas backend).
_BLOCK_TABLE_BYTES = 1024 * 1024 // 2
_PAGE_ID_BYTES = 4
_MAX_INT32 = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Shape, dtype and bytes of one layer's paged KV cache.

    The standard layout is one array `[num_pages, page_size, 2 * num_kv_heads, padded_head_dim]`. Combined head `2h`
    holds the keys of KV head `h` and `2h + 1` its values. The TPU's layout has five dimensions; it pads no heads, and
    keys and values of up to 64 elements share the 128 lanes. `flax_paged.ops` describes, reads and converts both
    (`to_standard_layout`, `to_tpu_layout`).

    Args:
        num_kv_heads: KV heads of the layer.
        head_dim: Logical size of a head, before padding.
        num_pages: Pages in the pool.
        page_size: Tokens in a page.
        dtype: Element type; float32, bfloat16 or float16, or int8, float8_e4m3fn or float8_e5m2 with scales.
        head_dim_alignment: `head_dim` is padded up to a multiple of this. None means 128 on TPU, where the Pallas
            kernels need full lanes, and 1 elsewhere. Packed heads take 64.
        layout: "standard" or "tpu". None means "tpu" on TPU wherever its kernels read it.
        scales: Of a quantised cache. "per_token_head" computes a scale for each token and head as it is written and
            keeps it beside the pages; "per_head" has one for each KV head, constant while serving, 1 until
            `calibrate_kv_scales` sets it. None means the first for int8 and the second for float8. The TPU kernel reads
            the first in the TPU's layout with `page_size * num_kv_heads` a multiple of 128; `xla` reads it always.

    Raises:
        ValueError: A count is below 1, the dtype is not a supported cache dtype, the pool has more token slots than an
            int32 can number, or the TPU's layout cannot hold the shape.
    """

    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    dtype: Any = jnp.bfloat16
    head_dim_alignment: int | None = None
    layout: Literal["standard", "tpu"] | None = None
    scales: Literal["per_token_head", "per_head"] | None = None

    def __post_init__(self):
        is_for_tpu = self.layout == "tpu" or jax.default_backend() == "tpu"
        if self.head_dim_alignment is None:
            object.__setattr__(self, "head_dim_alignment", NUM_LANES if is_for_tpu else 1)
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        for name in ("num_kv_heads", "head_dim", "page_size", "head_dim_alignment"):
            if getattr(self, name) < 1:
                raise ValueError(f"CacheSpec({name}={getattr(self, name)}): expected at least 1.")
        if self.num_pages < 0:
            raise ValueError(f"CacheSpec(num_pages={self.num_pages}): expected 0 (no cache) or more.")
        if not is_quantized(self.dtype) and self.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise ValueError(
                f"CacheSpec(dtype={self.dtype}): expected float32, bfloat16, float16, int8, float8_e4m3fn or"
                " float8_e5m2."
            )
        self._choose_scales()
        num_slots = self.num_pages * self.page_size
        if num_slots > _MAX_INT32:
            raise ValueError(
                f"CacheSpec(num_pages={self.num_pages}, page_size={self.page_size}) has {num_slots} token slots, more"
                f" than the {_MAX_INT32} that an int32 slot number can address; use fewer pages."
            )
        self._choose_layout(is_for_tpu)

    def _choose_scales(self) -> None:
        if self.scales not in (None, "per_token_head", "per_head"):
            raise ValueError(f"CacheSpec(scales={self.scales!r}): expected 'per_token_head', 'per_head' or None.")
        if self.scales is not None and not is_quantized(self.dtype):
            raise ValueError(
                f"CacheSpec(scales={self.scales!r}, dtype={self.dtype}): only int8 and float8 have scales."
            )
        if self.scales is None and is_quantized(self.dtype):
            object.__setattr__(self, "scales", "per_token_head" if self.dtype == jnp.int8 else "per_head")

    def _choose_layout(self, is_for_tpu: bool) -> None:
        if self.layout not in (None, "standard", "tpu"):
            raise ValueError(f"CacheSpec(layout={self.layout!r}): expected 'standard', 'tpu' or None.")
        group = tokens_per_group(self.dtype, self.head_dim)
        obstacle = None
        if self.head_dim_alignment % NUM_LANES:
            obstacle = f"head_dim_alignment={self.head_dim_alignment}): expected a multiple of {NUM_LANES}"
        elif self.page_size % group:
            obstacle = (
                f"page_size={self.page_size}): expected a multiple of {group}, as so many tokens of"
                f" head_dim={self.head_dim} and {self.dtype} share words"
            )
        if self.layout == "tpu" and obstacle:
            raise ValueError(f"CacheSpec(layout='tpu', {obstacle}, or layout='standard'.")
        if self.layout is None:
            is_read = is_for_tpu and not obstacle and self.dtype != jnp.float16
            object.__setattr__(self, "layout", "tpu" if is_read else "standard")

    @property
    def is_packed(self) -> bool:
        """Whether keys and values share the lanes of a row."""
        return self.layout == "tpu" and self.head_dim <= MAX_PACKED_HEAD_DIM

    @property
    def padded_head_dim(self) -> int:
        """What a head takes in the cache: `head_dim` rounded up to a multiple of `head_dim_alignment`; 64 if packed."""
        if self.is_packed:
            return MAX_PACKED_HEAD_DIM
        return -(-self.head_dim // self.head_dim_alignment) * self.head_dim_alignment

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the cache array: `(num_pages, page_size, 2 * num_kv_heads, padded_head_dim)`, or the TPU's."""
        if self.layout == "standard":
            return (self.num_pages, self.page_size, 2 * self.num_kv_heads, self.padded_head_dim)
        group = tokens_per_group(self.dtype, self.head_dim)
        if self.is_packed:
            return (self.num_pages, self.page_size // group, self.num_kv_heads, group, NUM_LANES)
        if group > 1:
            return (self.num_pages, self.page_size // group, 2 * self.num_kv_heads, group, self.padded_head_dim)
        return (self.num_pages, self.page_size, self.num_kv_heads, 2, self.padded_head_dim)

    @property
    def scales_shape(self) -> tuple[int, ...] | None:
        """Shape of the float32 scales kept beside the pages on one device, or None; see `scales_shape_for`."""
        return self.scales_shape_for(1)

    def scales_shape_for(self, num_shards: int) -> tuple[int, ...] | None:
        """Shape of the scales where the KV heads are split over so many devices.

        `(num_pages, page_size, 2 * num_kv_heads, 1)`; beside pages in the TPU's layout, lines of 128 scales where each
        device's fill them (`flax_paged.ops.scales_layout`).
        """
        if self.scales != "per_token_head":
            return None
        if self.layout == "tpu" and fit_lines(self.page_size, self.num_kv_heads // num_shards):
            return lines_shape(self.num_pages, self.page_size, self.num_kv_heads)
        return (self.num_pages, self.page_size, 2 * self.num_kv_heads, 1)

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page of one layer, padding and its scales included."""
        bytes_per_head = self.padded_head_dim * self.dtype.itemsize + (4 if self.scales == "per_token_head" else 0)
        return self.page_size * 2 * self.num_kv_heads * bytes_per_head

    @property
    def nbytes(self) -> int:
        """Bytes of one layer's cache, padding and scales included."""
        return self.num_pages * self.page_nbytes

    def pages_that_fit(self, num_bytes: int, num_layers: int = 1) -> int:
        """Number of pages that `num_bytes` of memory hold for `num_layers` layers of this shape."""
        return num_bytes // (self.page_nbytes * num_layers)

    @staticmethod
    def choose_page_size(max_model_len: int) -> int:
        """Page size for a context length: a sixteenth of it, rounded to a power of two, within [16, 256].

        Sequences longer than 8192 tokens get 16. Reference: `PallasAttentionBackend.get_page_size` of vLLM.
        """
        if max_model_len > 8192:
            return 16
        return min(max(_next_power_of_two(max_model_len) // 16, 16), 256)

    @staticmethod
    def min_page_size(max_model_len: int, max_num_seqs: int) -> int:
        """Smallest power-of-two page size whose block tables fit half of a 1 MiB SMEM.

        Raises:
            ValueError: So many sequences that not even one page id a sequence fits.
        """
        max_pages_per_seq = _BLOCK_TABLE_BYTES // _PAGE_ID_BYTES // max_num_seqs
        if max_pages_per_seq < 1:
            raise ValueError(
                f"max_num_seqs={max_num_seqs}: expected at most {_BLOCK_TABLE_BYTES // _PAGE_ID_BYTES}, so that the"
                " block tables fit in SMEM."
            )
        return _next_power_of_two(-(-max_model_len // max_pages_per_seq))

    @staticmethod
    def max_num_seqs(model_len: int, page_size: int) -> int:
        """Most sequences of `model_len` tokens whose block tables fit half of a 1 MiB SMEM."""
        return _BLOCK_TABLE_BYTES // -(-model_len // page_size) // _PAGE_ID_BYTES


class KVCache(nnx.Cache):
    """The Variable that holds a layer's paged KV cache; `nnx.split(model, nnx.Param, KVCache, ...)` separates it.

    A compiled step donates its array, so the handle in the module that the step was made from goes stale; reading it
    then raises a `RuntimeError` that says so.
    """

    @property
    def is_stale(self) -> bool:
        """Whether the array was donated, so that this handle no longer holds the cache."""
        value = self.get_raw_value()
        return isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer) and value.is_deleted()

    def get_value(self, *args, **kwargs):
        """Return the array, or explain why there is none any more."""
        if self.is_stale:
            raise RuntimeError(
                "This KVCache is stale: its array was donated to a compiled step, which holds the current one. Call the"
                " step, take `step.module()` to look at the current cache, or `init_cache` to start an empty one."
            )
        return super().get_value(*args, **kwargs)

    def __nnx_repr__(self):
        if not self.is_stale:
            yield from super().__nnx_repr__()
            return
        yield reprlib.Object(type=type(self))
        yield reprlib.Attr("value", "<donated to a compiled step>")


class KVScale(nnx.Variable):
    """The Variable that holds a quantised cache's scales for each KV head, f32[num_kv_heads]; a step reads it only."""


def _next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
