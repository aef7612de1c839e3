"""Which tensor of a checkpoint fills which parameter: one table, for Hugging Face and for GGUF names.

Parameters have the names that Hugging Face gives them, less the prefix `model.`, and the same layout.
"""

import functools
import re
from collections.abc import Callable, Iterator

import numpy as np

from flax_paged.checkpoint.assign import WeightRule
from flax_paged.models.llama.config import LlamaConfig

# Module of a layer, as in Hugging Face files after "model.layers.N." -> name in GGUF files after "blk.N."
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Parameter outside the layers -> (Hugging Face, GGUF).
_TOP = {
    "embed_tokens.weight": ("model.embed_tokens.weight", "token_embd.weight"),
    "norm.weight": ("model.norm.weight", "output_norm.weight"),
    "lm_head.weight": ("lm_head.weight", "output.weight"),
}


def hf_rules(config: LlamaConfig) -> dict[str, WeightRule]:
    """Return the rule of each parameter for safetensors files of Hugging Face.

    With tied embeddings a file may hold `lm_head.weight` too, as long as it equals the embedding.
    """
    return {
        path: WeightRule(hf, aliases=(_TOP["lm_head.weight"][0],) if _is_tied_table(config, path) else ())
        for path, hf, _ in _names(config)
    }


def gguf_rules(config: LlamaConfig) -> dict[str, WeightRule]:
    """Return the rule of each parameter for GGUF files, which store q and k of Llama in another order of rows."""
    return {
        path: WeightRule(
            gguf,
            transform=_unpermutation(config, path),
            aliases=(_TOP["lm_head.weight"][1],) if _is_tied_table(config, path) else (),
        )
        for path, _, gguf in _names(config)
    }


def hf_ignorable(name: str) -> bool:
    """Whether a tensor may go unused: the rotary tables that old checkpoints hold; the config gives them."""
    return re.fullmatch(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", name) is not None


def gguf_ignorable(name: str) -> bool:
    """Whether a tensor is not a parameter: the divisors of the rotary frequencies, which `GGUFSource.config` reads."""
    return name == "rope_freqs.weight"


def _names(config: LlamaConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (parameter path, Hugging Face name, GGUF name) of every parameter that the config gives the model."""
    for path, (hf, gguf) in _TOP.items():
        if path != "lm_head.weight" or not config.tie_word_embeddings:
            yield path, hf, gguf
    for layer in range(config.num_hidden_layers):
        for module, gguf in _LAYER.items():
            if module.endswith(("q_norm", "k_norm")) and not config.qk_norm:
                continue
            for leaf in ("weight", "bias") if _has_bias(config, module) else ("weight",):
                path = f"layers.{layer}.{module}.{leaf}"
                yield path, f"model.{path}", f"blk.{layer}.{gguf}.{leaf}"


def _has_bias(config: LlamaConfig, module: str) -> bool:
    if module.endswith(("q_proj", "k_proj", "v_proj")):
        return config.attention_bias
    if module.endswith("o_proj"):
        return config.attention_output_bias
    return module.startswith("mlp.") and config.mlp_bias


def _is_tied_table(config: LlamaConfig, path: str) -> bool:
    return config.tie_word_embeddings and path == "embed_tokens.weight"


def _unpermutation(config: LlamaConfig, path: str) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return the transform of a q or k tensor; only llama.cpp's "llama" architecture (Mistral's too) permutes them."""
    if config.architecture not in ("LlamaForCausalLM", "MistralForCausalLM"):
        return None
    if ".q_proj." in path:
        return functools.partial(unpermute_rope_rows, num_heads=config.num_attention_heads)
    if ".k_proj." in path:
        return functools.partial(unpermute_rope_rows, num_heads=config.num_key_value_heads)
    return None


def unpermute_rope_rows(array: np.ndarray, *, num_heads: int) -> np.ndarray:
    """Put the rows of each head from pairs side by side (2i, 2i + 1) into half-split order (i, i + D / 2).

    Args:
        array: [num_heads * D, in] weight or [num_heads * D] bias.
        num_heads: Heads of this tensor: KV heads for k.
    """
    pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)
