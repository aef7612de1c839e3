"""Layers that the models share: rotary embedding, norms, linear maps and their adapters, embeddings, the gated MLP."""

from flax_paged.nn.embedding import Embedding
from flax_paged.nn.linear import Linear
from flax_paged.nn.lora import LoRA, StackedLoRA
from flax_paged.nn.mlp import ACTIVATIONS, GatedMLP
from flax_paged.nn.norms import RMSNorm
from flax_paged.nn.remat import REMAT_POLICIES, call_layer
from flax_paged.nn.rope import apply_rope, inverse_frequencies, rope_tables
from flax_paged.nn.rope_config import ROPE_TYPES, RopeConfig

__all__ = [
    "ACTIVATIONS",
    "REMAT_POLICIES",
    "ROPE_TYPES",
    "Embedding",
    "GatedMLP",
    "Linear",
    "LoRA",
    "RMSNorm",
    "RopeConfig",
    "StackedLoRA",
    "apply_rope",
    "call_layer",
    "inverse_frequencies",
    "rope_tables",
]
