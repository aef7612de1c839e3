"""The model families: which architecture names of config.json belong to which config, model and weight tables."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from flax_paged.checkpoint.assign import WeightRule
from flax_paged.models import llama


@dataclasses.dataclass(frozen=True)
class Family:
    """What loading and saving need to know of a model family.

    Args:
        name: Name of the family.
        architectures: Names in config.json's `architectures`, by its `model_type`.
        config_from_hf: Parsed config.json -> config; the config's `to_hf()` is the way back.
        model: `model(config, *, rngs, dtype, mesh, ...)` -> module.
        hf_rules: Config -> rule of each parameter for safetensors of Hugging Face; `gguf_rules` for GGUF files.
        gguf_rules: See hf_rules.
        hf_ignorable: Whether a tensor of such a file may go unused; `gguf_ignorable` for GGUF files.
        gguf_ignorable: See hf_ignorable.
    """

    name: str
    architectures: Mapping[str, str]
    config_from_hf: Callable[[Mapping[str, Any]], Any]
    model: Callable[..., nnx.Module]
    hf_rules: Callable[[Any], dict[str, WeightRule]]
    gguf_rules: Callable[[Any], dict[str, WeightRule]]
    hf_ignorable: Callable[[str], bool]
    gguf_ignorable: Callable[[str], bool]


FAMILIES = (
    Family(
        name="llama",
        architectures=llama.ARCHITECTURES,
        config_from_hf=llama.LlamaConfig.from_hf,
        model=llama.Llama,
        hf_rules=llama.hf_rules,
        gguf_rules=llama.gguf_rules,
        hf_ignorable=llama.hf_ignorable,
        gguf_ignorable=llama.gguf_ignorable,
    ),
)


def find_family(values: Mapping[str, Any]) -> Family:
    """Return the family of a parsed config.json, by its `architectures`, or its `model_type` where it names none.

    Raises:
        ValueError: No family has that architecture.
    """
    names = values.get("architectures") or ()
    by_architecture = {name: family for family in FAMILIES for name in family.architectures.values()}
    if names:
        for name in names:
            if name in by_architecture:
                return by_architecture[name]
        got = f"architectures={list(names)}"
    else:
        model_type = values.get("model_type")
        for family in FAMILIES:
            if model_type in family.architectures:
                return family
        got = f"model_type={model_type!r} and no architectures"
    raise ValueError(f"config.json says {got}, which is not supported; expected one of {sorted(by_architecture)}.")
