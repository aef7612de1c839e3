"""Paged attention for Flax NNX: train a decoder, then serve the same module."""

from flax_paged.attention import PagedAttention, cache_spec_for, drop_cache, init_cache
from flax_paged.cache import CacheSpec, KVCache
from flax_paged.generation import AsyncEngine, CompletionOutput, Engine, RequestOutput, SamplingParams
from flax_paged.generation.text import Tokenizer
from flax_paged.loading import load_model, load_tokenizer, save_model
from flax_paged.metadata import PagedMetadata, SequenceSlice, build_metadata
from flax_paged.step import CompiledStep

__all__ = [
    "AsyncEngine",
    "CacheSpec",
    "CompiledStep",
    "CompletionOutput",
    "Engine",
    "KVCache",
    "PagedAttention",
    "PagedMetadata",
    "RequestOutput",
    "SamplingParams",
    "SequenceSlice",
    "Tokenizer",
    "build_metadata",
    "cache_spec_for",
    "drop_cache",
    "init_cache",
    "load_model",
    "load_tokenizer",
    "save_model",
]
