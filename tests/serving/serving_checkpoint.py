"""A small random model with a byte-level BPE tokenizer and a chat template, as a folder that the server can load."""

import json
from pathlib import Path

import tokenizers
from flax import nnx

from flax_paged import Tokenizer, save_model
from flax_paged.models.llama import Llama, LlamaConfig

_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_tokenizer() -> Tokenizer:
    """Return one of all 256 bytes and 253 merges, so that any text goes in and anything comes out."""
    documents = [str(Path(__file__).parents[2] / "LICENSE")]
    backend = tokenizers.ByteLevelBPETokenizer()
    backend.train(documents, vocab_size=512, min_frequency=1, special_tokens=list(_SPECIAL), show_progress=False)
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": _CHAT_TEMPLATE}
    return Tokenizer({"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(config)})


def make_checkpoint(path: str | Path, *, max_model_len: int = 512) -> None:
    """Write the checkpoint."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_model_len,
        initializer_range=0.4,
    )
    save_model(Llama(config, rngs=nnx.Rngs(0)), path, make_tokenizer())
