"""`LlamaConfig`: the hyperparameters, read from and written to Hugging Face's config.json."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from flax_paged.nn.mlp import check_activation
from flax_paged.nn.rope_config import RopeConfig

# model_type -> architecture; each is this model with some fields fixed or defaulted.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What a config.json means that leaves a key out (the defaults of transformers).
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3ForCausalLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}
# Keys that change the numbers of look-alike models and mean nothing to this one, with the values that change nothing.
_UNSUPPORTED: dict[str, tuple] = {
    "no_rope_layers": (None,),
    "no_rope_layer_interval": (None, 0),
    "parallel_attn": (None, False),
    "quantization_config": (None,),
    "rope_interleaved": (None, False),
    "clip_qkv": (None,),
    "query_pre_attn_scalar": (None,),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
    "attention_chunk_size": (None,),
    "use_qk_norm": (None, False),
    "is_encoder_decoder": (None, False),
}
_UNSUPPORTED_KIND = re.compile(r"(multiplier|scaling|_scale|scale_\w+|soft_?cap(ping)?)$")


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Hyperparameters of a Llama-style decoder. The names are those of Hugging Face's config.json.

    Args:
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the MLP.
        num_hidden_layers: Blocks.
        num_attention_heads: Query heads.
        num_key_value_heads: KV heads; None means as many as query heads.
        head_dim: Size of a head; None means `hidden_size // num_attention_heads`.
        hidden_act: Activation of the MLP, by its name in `flax_paged.nn.ACTIVATIONS`.
        rms_norm_eps: Epsilon of every norm.
        rope: Rotary embedding.
        max_position_embeddings: Context length the model was made for.
        attention_bias: Whether q, k and v have biases.
        attention_output_bias: Whether o has one; None means as attention_bias.
        mlp_bias: Whether the MLP's maps have biases.
        qk_norm: Whether each head's query and key are normalised before the rotation (Qwen3).
        sliding_window: Keys a query sees, its own included; None for all.
        layer_types: "full_attention" or "sliding_attention" for each layer; None means that the window holds in all.
        tie_word_embeddings: Whether the logits come from the embedding's table.
        initializer_range: Standard deviation of initial weights.
        architecture: Name in config.json.

    Raises:
        ValueError: Sizes that do not fit each other, or an unknown name.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    attention_output_bias: bool | None = None
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    architecture: str = "LlamaForCausalLM"

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            _check_count(name, getattr(self, name))
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads="
                    f"{self.num_attention_heads}; give head_dim if that is meant."
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.attention_output_bias is None:
            object.__setattr__(self, "attention_output_bias", self.attention_bias)
        if self.layer_types is not None:
            object.__setattr__(self, "layer_types", tuple(self.layer_types))
        self._check()

    def _check(self):
        for name in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
            _check_count(name, getattr(self, name))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of num_key_value_heads="
                f"{self.num_key_value_heads}; each KV head serves as many query heads."
            )
        self.rope.rotary_dim(self.head_dim)
        check_activation(self.hidden_act)
        if not self.rms_norm_eps > 0 or not self.initializer_range >= 0:
            raise ValueError(
                f"rms_norm_eps={self.rms_norm_eps} must be positive and initializer_range={self.initializer_range}"
                " must not be negative."
            )
        if self.sliding_window is not None:
            _check_count("sliding_window", self.sliding_window)
        if self.layer_types is not None:
            self._check_layer_types()
        if self.architecture not in ARCHITECTURES.values():
            raise ValueError(f"architecture={self.architecture!r}: expected one of {sorted(ARCHITECTURES.values())}.")

    def _check_layer_types(self):
        unknown = sorted(set(self.layer_types) - {"full_attention", "sliding_attention"})
        if unknown or len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types={list(self.layer_types)}: expected 'full_attention' or 'sliding_attention' for each of"
                f" the {self.num_hidden_layers} layers."
            )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types asks for sliding_attention, but sliding_window is not given.")

    def window_of_layer(self, layer: int) -> int | None:
        """Return the sliding window of a layer, or None where it sees everything."""
        if self.layer_types is not None and self.layer_types[layer] == "full_attention":
            return None
        return self.sliding_window

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "LlamaConfig":
        """Read a parsed config.json, of transformers 4 or 5.

        Keys that do not concern the model's numbers are ignored (token ids, dtype, dropout, which is off here).

        Args:
            values: The parsed file.

        Raises:
            ValueError: A size is missing, the architecture is unknown, or a key asks for what this model does not do.
        """
        architecture = _architecture(values)
        _refuse_unsupported(values)
        values = {**_DEFAULTS[architecture], **values}
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        missing = [name for name in sizes if values.get(name) is None]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}.")
        plain = (*sizes, "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings")
        plain = (*plain, "tie_word_embeddings", "initializer_range")
        fields = {name: values[name] for name in plain if values.get(name) is not None}
        return cls(
            **fields,
            **_attention_fields(architecture, values),
            mlp_bias=bool(values.get("mlp_bias")),
            rope=RopeConfig.from_hf(values),
            architecture=architecture,
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of a config.json that `from_hf`, and transformers 4 and 5, read as this config."""
        values = dataclasses.asdict(self)
        values.pop("rope")
        architecture = values.pop("architecture")
        model_type = next(name for name, other in ARCHITECTURES.items() if other == architecture)
        # Fields of ours that an architecture fixes, and so has no key for; where they differ, one that can say so must.
        values.pop("qk_norm")
        values.pop("attention_output_bias")
        if architecture.startswith("Qwen"):
            values["use_sliding_window"] = self.sliding_window is not None
            values["max_window_layers"] = 0
        layer_types = values.pop("layer_types")
        if layer_types is not None:
            values["layer_types"] = list(layer_types)
        values = {"architectures": [architecture], "model_type": model_type, **values, **self.rope.to_hf()}
        if LlamaConfig.from_hf(values) != self:
            raise ValueError(
                f"a config.json of {architecture} cannot express this config: it would be read as"
                f" {LlamaConfig.from_hf(values)}, not as {self}."
            )
        return values


def _architecture(values: Mapping[str, Any]) -> str:
    names = values.get("architectures") or [ARCHITECTURES.get(values.get("model_type"), values.get("model_type"))]
    for name in names:
        if name in _DEFAULTS:
            return name
    raise ValueError(f"architecture {names[0]!r} is not known; expected one of {sorted(_DEFAULTS)}.")


def _attention_fields(architecture: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read what the architectures differ in: biases, head norms, windows."""
    window, layer_types = values.get("sliding_window"), values.get("layer_types")
    fields: dict[str, Any] = {"attention_bias": bool(values.get("attention_bias"))}
    if architecture.startswith("Qwen"):
        if not values.get("use_sliding_window"):
            window = None
        elif layer_types is None:
            first = values.get("max_window_layers", 28)
            num_layers = values["num_hidden_layers"]
            layer_types = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    if architecture == "Qwen2ForCausalLM":
        fields.update(attention_bias=True, attention_output_bias=False)
    if architecture == "Qwen3ForCausalLM":
        fields.update(qk_norm=True)
    uniform = {"full_attention"} if window is None else {"sliding_attention"}
    if layer_types is not None and set(layer_types) != uniform:
        fields["layer_types"] = tuple(layer_types)
    return {**fields, "sliding_window": window}


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name in _UNSUPPORTED:
            neutral = value in _UNSUPPORTED[name]
        elif _UNSUPPORTED_KIND.search(name) and name != "rope_scaling":
            neutral = value in (None, False, 1)
        else:
            continue
        if not neutral:
            raise ValueError(
                f"config.json says {name}={value!r}, which changes this model's numbers and is not supported."
            )


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: expected a whole number of at least 1.")
