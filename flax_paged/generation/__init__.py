"""Generating text with a module: the engine, its scheduler and page pool, and sampling."""

from flax_paged.generation.engine import Engine
from flax_paged.generation.outputs import CompletionOutput, RequestMetrics, RequestOutput
from flax_paged.generation.sampling_params import SamplingParams

__all__ = ["CompletionOutput", "Engine", "RequestMetrics", "RequestOutput", "SamplingParams"]
