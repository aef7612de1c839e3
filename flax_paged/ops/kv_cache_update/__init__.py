"""Writing new keys and values into the paged cache."""

from flax_paged.ops.kv_cache_update.api import kv_cache_update
from flax_paged.ops.kv_cache_update.scales import kv_scales_update

__all__ = ["kv_cache_update", "kv_scales_update"]
