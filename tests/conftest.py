"""Settings of the whole suite: two CPU devices, strict dtype and rank promotion, no network."""

import gc
import importlib.util
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# CI sets this, so that nothing is skipped there for want of an oracle, a library or the real model.
if os.environ.get("FLAX_PAGED_REQUIRE_PARITY"):
    NEEDED = ("torch", "transformers", "peft", "sentencepiece", "regex", "gguf", "huggingface_hub", "httpx")
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ImportError(f"FLAX_PAGED_REQUIRE_PARITY is set, but these are not installed: {', '.join(missing)}.")


@pytest.fixture(scope="module", autouse=True)
def free_compiled_programs():
    """Drop a module's programs: Linux grants a process 65,530 memory maps, and each program on a CPU takes several."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def smollm2_path():
    """The real model as a GGUF file. Tests do not fetch: any command with `--model smollm2` does, once."""
    pytest.importorskip("gguf")
    from flax_paged.checkpoint import hub

    path = hub.cached_smollm2()
    if path is None:
        message = "SmolLM2 is not in the cache; run scripts/generate.py --model smollm2 once to fetch it"
        if os.environ.get("FLAX_PAGED_REQUIRE_PARITY"):
            pytest.fail(message)
        pytest.skip(message)
    return path
