"""Small checkpoints on disk, written by hand: Hugging Face folders, GGUF files in llama.cpp's layout, tokenizers."""

import json
import struct

import ml_dtypes
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

# GGUF permutes rows by head: 8 query and 2 kv heads, so that a wrong head count shows.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DTYPE_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int8": "I8"}


def hf_tensors(config, dtype=np.float32, seed=0):
    """Return random weights by their Hugging Face names."""
    rng = np.random.default_rng(seed)
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    return {
        name: (rng.standard_normal(shape) * (0.2 if len(shape) > 1 else 1.0)).astype(dtype)
        for name, shape in shapes.items()
    }


def write_safetensors(path, tensors, dtype_names=None):
    """Write a safetensors file by the format's description, without the safetensors package."""
    header, data = {}, b""
    for name, array in tensors.items():
        kind = (dtype_names or {}).get(name) or _DTYPE_NAMES[array.dtype.name]
        raw = array.tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def write_hf_folder(folder, config, tensors, shards=None):
    """Write a Hugging Face folder: one file, or {shard file: names} with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards is None:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    for shard, names in shards.items():
        write_safetensors(folder / shard, {name: tensors[name] for name in names})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def permute_for_gguf(array, num_heads):
    """Reorder rows as llama.cpp's converter does: half-split rotary halves become neighbours."""
    split = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def write_gguf(path, config, tensors, *, kinds=None, edit=None):
    """Write a GGUF file as llama.cpp's converter does, through `gguf.GGUFWriter`.

    Args:
        kinds: GGML type name by Hugging Face tensor name; others are stored as they are.
        edit: Called with the writer before anything is written.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    if edit:
        edit(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, array in tensors.items():
        stored = array
        if ".q_proj." in name:
            stored = permute_for_gguf(array, config["num_attention_heads"])
        elif ".k_proj." in name:
            stored = permute_for_gguf(array, config["num_key_value_heads"])
        kind = (kinds or {}).get(name)
        if array.dtype == ml_dtypes.bfloat16:
            kind, stored = "BF16", stored.astype(np.float32)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if kind:
            kind = gguf.GGMLQuantizationType[kind]
            stored = gguf.quants.quantize(stored.astype(np.float32), kind)
        writer.add_tensor(target, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


CORPUS = [
    "The quick brown fox jumps over the lazy dog. Don't we'll they've 1234 5678",
    "def encode(text):\n    return [ord(c) for c in text]\n\n\tif x == 10:\r\n        pass",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. 한국어 텍스트 日本語テキスト",
    "emoji 😀 😃 and 👩‍👩‍👧 family, spaces   and    tabs\t\t",
] * 3
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_tokenizer(pre_tokenizer=None, vocab_size=400):
    """Train a small byte-level BPE tokenizer with special tokens 0, 1, 2."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizer or byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


# Texts that tokenizers disagree over.
TEXTS = [
    "The capital of France is",
    "",
    " ",
    "  two spaces",
    "trailing   ",
    "line\nbreaks\n\n\nand\r\nCRLF\r\n",
    "\ttabs\t\tand \t mixed",
    "don't I'LL we've They'RE",
    "def f(x):\n    return x**2  # comment\n",
    '{"key": [1.5, null], "a": "b\\n"}',
    "Příliš žluťoučký kůň",
    "한국어와 日本語 и русский العربية",
    "😀👩‍👩‍👧🏳️‍🌈",
    "a\u0301 combining \u00e1",
    "\u00a0nbsp\u3000ideographic\u200bzero",
    "\ufffd replacement",
    "<|im_start|>user\nhello<|im_end|>\n",
    "a<|im_end|>b  <|endoftext|>  c",
    "<|im_sta rt|> not special",
    "MiXeD CaSe_snake-kebab/path.ext?x=y&z",
    "!!!...---===###",
    "x" * 200,
]
DIGIT_TEXTS = [
    "1234567",
    "a1b22c333 4444",
    " 12 34",
    "½ ²³ Ⅷ ٣٤٥ \uff14\uff12",
    "3.14159e-10",
    "room101 2024-01-02T03:04:05Z",
]
