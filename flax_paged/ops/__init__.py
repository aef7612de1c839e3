"""Pure functions on arrays: attention over a paged cache, cache writes, dense attention for training."""

from flax_paged.ops.dense_attention import dense_attention
from flax_paged.ops.kv_cache_update import kv_cache_update, kv_scales_update
from flax_paged.ops.merge_attention import cascade_attention, merge_attention
from flax_paged.ops.metadata_checks import check_metadata_values
from flax_paged.ops.page_layout import to_standard_layout, to_tpu_layout
from flax_paged.ops.page_operations import copy_pages, defragment, read_pages, write_pages
from flax_paged.ops.paged_attention_with_update import paged_attention_with_update
from flax_paged.ops.quantization import quantize, quantize_per_head
from flax_paged.ops.ragged_paged_attention import ragged_paged_attention

__all__ = [
    "cascade_attention",
    "check_metadata_values",
    "copy_pages",
    "defragment",
    "dense_attention",
    "kv_cache_update",
    "kv_scales_update",
    "merge_attention",
    "paged_attention_with_update",
    "quantize",
    "quantize_per_head",
    "ragged_paged_attention",
    "read_pages",
    "to_standard_layout",
    "to_tpu_layout",
    "write_pages",
]
