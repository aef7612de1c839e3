"""Llama 1, 2, 3.x, SmolLM2, Mistral, Qwen2, Qwen3 and others of the same build."""

from flax_paged.models.llama.config import ARCHITECTURES, LlamaConfig
from flax_paged.models.llama.model import Llama
from flax_paged.models.llama.weights import gguf_ignorable, gguf_rules, hf_ignorable, hf_rules

__all__ = ["ARCHITECTURES", "Llama", "LlamaConfig", "gguf_ignorable", "gguf_rules", "hf_ignorable", "hf_rules"]
