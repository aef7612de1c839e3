"""Attention of a ragged batch over the paged cache."""

from flax_paged.ops.ragged_paged_attention.api import ragged_paged_attention

__all__ = ["ragged_paged_attention"]
