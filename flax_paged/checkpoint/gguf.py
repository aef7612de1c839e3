"""GGUF files as a tensor source: dequantised one tensor at a time, with a Hugging Face style config and tokenizer."""

import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from flax_paged.checkpoint.gguf_tokenizer import tokenizer_files

_UNQUANTISED = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_INTEGERS = {f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)}
_ROWS_BYTES = 4 << 20  # dequantise about this much float32 at a time: the numpy code has many temporaries
# general.architecture -> architecture in a Hugging Face config; Mistral files say llama too.
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# (low_freq_factor, high_freq_factor, original_max_position_embeddings) of the llama3 rope scaling seen in releases.
_LLAMA3_ROPE = [(1.0, 4.0, context) for context in (8192, 4096, 2048, 16384, 32768, 131072)]


class _Tensor(NamedTuple):
    """Where a tensor lies: shape, slowest axis first; storage type, gguf's enum; first byte and number of bytes."""

    shape: tuple[int, ...]
    kind: Any
    start: int
    num_bytes: int


class GGUFSource:
    """Tensors of a GGUF file, by their GGUF names (`blk.0.attn_q.weight`).

    F32, F16 and BF16 tensors keep their dtype; quantised ones are dequantised to float32. Data is read on demand.

    Args:
        path: The file.

    Raises:
        ImportError: The `gguf` package is not installed.
        ValueError: The file is damaged, cut off or of an unknown kind.
    """

    def __init__(self, path: str | Path):
        try:
            import gguf
        except ImportError:
            raise ImportError('reading a GGUF file needs the gguf package: pip install "flax-paged[gguf]"') from None
        self._gguf = gguf
        self.path = Path(path)
        status = self.path.stat()
        self.metadata, self._tensors = _read_header(self.path, status.st_size, status.st_mtime_ns)

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        """Return the name of every tensor, in the order of the file."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, slowest axis first: a linear weight is [out, in]."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype that `read` gives: as stored, or float32 for a quantised tensor."""
        kind = self._tensors[name].kind.name
        return _UNQUANTISED.get(kind) or _INTEGERS.get(kind) or np.dtype(np.float64 if kind == "F64" else np.float32)

    def read(self, name: str) -> np.ndarray:
        """Return one tensor, dequantised if need be.

        Raises:
            ValueError: The `gguf` package cannot dequantise its type.
        """
        info = self._tensors[name]
        kind = info.kind
        with self.path.open("rb") as file:
            file.seek(info.start)
            if kind.name in _UNQUANTISED or kind.name in _INTEGERS or kind.name == "F64":
                return np.fromfile(file, self.dtype(name), math.prod(info.shape)).reshape(info.shape)
            out = np.empty((math.prod(info.shape[:-1]), info.shape[-1]), np.float32)
            row_bytes = info.num_bytes // len(out)
            step = max(1, _ROWS_BYTES // (4 * info.shape[-1]))
            for start in range(0, len(out), step):
                rows = out[start : start + step]
                packed = np.fromfile(file, np.uint8, len(rows) * row_bytes).reshape(len(rows), row_bytes)
                try:
                    rows[:] = self._gguf.quants.dequantize(packed, kind)
                except NotImplementedError:
                    raise ValueError(
                        f"{self.path}: tensor {name} is {kind.name}, which this version of gguf cannot dequantise. "
                        "Upgrade gguf, or use a file in another quantisation."
                    ) from None
        return out.reshape(info.shape)

    def config(self) -> dict[str, Any]:
        """Return the model's config in Hugging Face's `config.json` form.

        Raises:
            ValueError: The architecture is unknown, a key is missing, or the rope scaling cannot be expressed.
        """
        architecture = self.metadata.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise ValueError(
                f"{self.path}: {architecture=} is not supported. Expected one of {sorted(_ARCHITECTURES)}."
            )
        if self.metadata.get(f"{architecture}.expert_count"):
            raise ValueError(f"{self.path}: a mixture of experts ({architecture}.expert_count) is not supported.")
        hidden, heads = self._key("embedding_length"), self._key("attention.head_count")
        head_dim = self._key("attention.key_length", hidden // heads)
        config = {
            "architectures": [_ARCHITECTURES[architecture]],
            "model_type": architecture,
            "hidden_size": hidden,
            "intermediate_size": self._key("feed_forward_length"),
            "num_hidden_layers": self._key("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._key("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self._key("context_length"),
            "rms_norm_eps": self._key("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._key("rope.freq_base", 10000.0),
            "vocab_size": self._tensors["token_embd.weight"].shape[0] if "token_embd.weight" in self._tensors else 0,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self._tensors,
        }
        if scaling := self._rope_scaling(config["rope_theta"], head_dim):
            config["rope_scaling"] = scaling
        rotary = self._key("rope.dimension_count", head_dim)
        if rotary != head_dim:
            config["partial_rotary_factor"] = rotary / head_dim
        for side in ("bos", "eos", "pad"):
            key = "tokenizer.ggml.padding_token_id" if side == "pad" else f"tokenizer.ggml.{side}_token_id"
            if key in self.metadata:
                config[f"{side}_token_id"] = self.metadata[key]
        return config

    def tokenizer_files(self) -> dict[str, Any]:
        """Return the tokenizer as the contents of Hugging Face's files; see `gguf_tokenizer.tokenizer_files`."""
        return tokenizer_files(self.metadata, str(self.path))

    def _key(self, key: str, default: Any = None) -> Any:
        """Return a hyperparameter; one that differs by layer or is missing is an error."""
        name = f"{self.metadata['general.architecture']}.{key}"
        value = self.metadata.get(name, default)
        if value is None:
            raise ValueError(f"{self.path}: the metadata key {name} is missing.")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ValueError(f"{self.path}: {name} differs by layer ({value}), which is not supported.")
            value = value[0]
        return value

    def _rope_scaling(self, theta: float, head_dim: int) -> dict[str, Any] | None:
        """Return Hugging Face's `rope_scaling`, or None where positions are not scaled."""
        if "rope_freqs.weight" in self._tensors:
            return _llama3_scaling(self.read("rope_freqs.weight"), theta, head_dim, str(self.path))
        architecture = self.metadata["general.architecture"]
        kind = self.metadata.get(f"{architecture}.rope.scaling.type", "none")
        factor = self.metadata.get(f"{architecture}.rope.scaling.factor")
        linear = self.metadata.get(f"{architecture}.rope.scale_linear")  # the key of old files
        if kind == "none":
            return {"rope_type": "linear", "factor": linear} if linear not in (None, 1.0) else None
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor or linear or 1.0}
        if kind != "yarn":
            raise ValueError(f"{self.path}: {architecture}.rope.scaling.type={kind!r}: expected none, linear or yarn.")
        scaling = {"rope_type": "yarn", "factor": factor or 1.0}
        for ours, theirs in {
            "original_max_position_embeddings": "original_context_length",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }.items():
            if (value := self.metadata.get(f"{architecture}.rope.scaling.{theirs}")) is not None:
                scaling[ours] = value
        if attention := self.metadata.get(f"{architecture}.rope.scaling.attn_factor"):
            # llama.cpp multiplies yarn's own factor by it; Hugging Face's attention_factor replaces yarn's own.
            scaling["attention_factor"] = attention * (0.1 * math.log(scaling["factor"]) + 1.0)
        return scaling


@functools.lru_cache(maxsize=1)  # gguf takes seconds over a vocabulary, and model and tokenizer are loaded apart
def _read_header(path: Path, size: int, mtime_ns: int) -> tuple[dict[str, Any], dict[str, _Tensor]]:
    """Return a GGUF file's metadata by key, and its tensors by name in file order.

    Args:
        path: The file.
        size: Its size in bytes; with `mtime_ns`, tells a file that has changed since from the one remembered.
        mtime_ns: When it was last modified.
    """
    import gguf

    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file (it does not begin with the bytes 'GGUF').")
    try:
        reader = gguf.GGUFReader(path)
        metadata = {key: _value(gguf, field) for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    except (ValueError, LookupError, ArithmeticError, MemoryError) as error:
        raise ValueError(
            f"{path}: the GGUF file is cut off, damaged, or newer than the gguf package ({error}). "
            "Download it again, or upgrade gguf."
        ) from None
    if reader.byte_order != "I":
        raise ValueError(f"{path}: a GGUF file in big-endian byte order. Expected little-endian.")
    # The reader maps the file. Nothing here keeps the map: its pages would count as our memory.
    return metadata, {
        tensor.name: _Tensor(
            tuple(reversed(tensor.shape.tolist())), tensor.tensor_type, int(tensor.data_offset), int(tensor.n_bytes)
        )
        for tensor in reader.tensors
    }


def _value(gguf: Any, field: Any) -> Any:
    """Return a metadata value as Python has it; a float32 as its shortest decimal: 1e-5, not 9.999999747378752e-06."""
    value = field.contents()
    return float(str(np.float32(value))) if field.types[0] == gguf.GGUFValueType.FLOAT32 else value


def _llama3_scaling(divisors: np.ndarray, theta: float, head_dim: int, where: str) -> dict[str, Any]:
    """Return the llama3 rope scaling whose frequency divisors a file's `rope_freqs.weight` holds.

    GGUF keeps the result of the formula, a divisor a frequency, and not its parameters. Only the factor can be read off
    (the largest divisor); the others are found by trying those in use.
    """
    factor = float(str(np.float32(divisors.max())))
    for low, high, context in _LLAMA3_ROPE:
        if divisors.shape == (head_dim // 2,) and np.allclose(
            _llama3_divisors(theta, head_dim, factor, low, high, context), divisors, rtol=1e-4
        ):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    raise ValueError(f"{where}: rope_freqs.weight {divisors.tolist()} is no llama3 rope scaling known to us.")


def _llama3_divisors(theta: float, head_dim: int, factor: float, low: float, high: float, context: int) -> np.ndarray:
    """Return what llama3 scaling divides each rotary frequency by, float64[head_dim // 2]."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
