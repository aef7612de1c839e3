"""Layers that the models share: rotary embedding, norms, linear maps, embeddings, the gated MLP."""

from flax_paged.nn.embedding import Embedding
from flax_paged.nn.linear import Linear
from flax_paged.nn.mlp import ACTIVATIONS, GatedMLP
from flax_paged.nn.norms import RMSNorm
from flax_paged.nn.rope import apply_rope, inverse_frequencies, rope_tables
from flax_paged.nn.rope_config import ROPE_TYPES, RopeConfig

__all__ = [
    "ACTIVATIONS",
    "ROPE_TYPES",
    "Embedding",
    "GatedMLP",
    "Linear",
    "RMSNorm",
    "RopeConfig",
    "apply_rope",
    "inverse_frequencies",
    "rope_tables",
]
