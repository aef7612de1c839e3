"""Generating text with a module: the engine, its scheduler and page pool, and sampling."""

from flax_paged.generation.async_engine import AsyncEngine
from flax_paged.generation.compilation_cache import use_compilation_cache
from flax_paged.generation.engine import Engine
from flax_paged.generation.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from flax_paged.generation.sampling_params import SamplingParams
from flax_paged.generation.stats import EngineStats

__all__ = [
    "AsyncEngine",
    "CompletionOutput",
    "Engine",
    "EngineStats",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "use_compilation_cache",
]
