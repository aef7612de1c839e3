"""Pure functions on arrays: attention over a paged cache, cache writes, dense attention for training."""

from flax_paged.ops.dense_attention import dense_attention
from flax_paged.ops.kv_cache_update import kv_cache_update
from flax_paged.ops.metadata_checks import check_metadata_values
from flax_paged.ops.page_layout import to_standard_layout, to_tpu_layout
from flax_paged.ops.paged_attention_with_update import paged_attention_with_update
from flax_paged.ops.ragged_paged_attention import ragged_paged_attention

__all__ = [
    "check_metadata_values",
    "dense_attention",
    "kv_cache_update",
    "paged_attention_with_update",
    "ragged_paged_attention",
    "to_standard_layout",
    "to_tpu_layout",
]
