"""Hugging Face safetensors folders as a tensor source: one file, or shards whose index is obeyed to the letter."""

import json
from pathlib import Path

import ml_dtypes  # also gives numpy the name `bfloat16`, under which safetensors asks for it
import numpy as np
from safetensors import SafetensorError, safe_open

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "BOOL": np.bool_,
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
}


class SafetensorsSource:
    """Tensors of a Hugging Face folder, or of one `.safetensors` file, by their names.

    In a folder `model.safetensors.index.json` decides which file each tensor comes from: other files, and other copies
    of a tensor in other shards, do not exist. Without an index the folder must hold one safetensors file.

    Args:
        path: The folder or file.

    Raises:
        FileNotFoundError: A shard is missing, or there are no safetensors.
        ValueError: A file is damaged or cut off, or disagrees with the index.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._shards = _open_file(self.path) if self.path.is_file() else _open_folder(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        """Return the name of every tensor, in the order of the index or file."""
        return list(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(self._shards[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> np.dtype:
        """Return a tensor's dtype as stored.

        Raises:
            ValueError: The format has this dtype, numpy does not.
        """
        stored = self._shards[name].get_slice(name).get_dtype()
        if stored not in _DTYPES:
            raise ValueError(f"{self.path}: tensor {name} has dtype {stored}; expected F32, F16 or BF16.")
        return np.dtype(_DTYPES[stored])

    def read(self, name: str) -> np.ndarray:
        """Return one tensor, bit for bit as stored.

        Raises:
            ValueError: The file was cut off after it was opened, or safetensors gives no arrays of its dtype (F8).
        """
        try:
            return self._shards[name].get_tensor(name)
        except (SafetensorError, AttributeError) as error:
            raise ValueError(f"{self.path}: tensor {name} cannot be read ({error}).") from None


def _open_folder(folder: Path) -> dict[str, safe_open]:
    """Return the open file of each tensor of a folder: the files its index names, or its only file."""
    if (folder / INDEX_FILE).is_file():
        return _open_index(folder)
    if (folder / SINGLE_FILE).is_file():
        return _open_file(folder / SINGLE_FILE)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return _open_file(files[0])
    if files:
        names = [file.name for file in files]
        raise FileNotFoundError(
            f"{folder}: {INDEX_FILE} is missing, which says how the files {names} make one model. Download it too."
        )
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickles:
        raise FileNotFoundError(
            f"{folder} holds PyTorch pickles ({', '.join(pickles[:3])}), which can run code when loaded and are not "
            "read. Convert them once, with transformers: AutoModelForCausalLM.from_pretrained(folder, dtype='auto')"
            ".save_pretrained(new_folder)."
        )
    raise FileNotFoundError(f"{folder}: no weights: expected {SINGLE_FILE}, or {INDEX_FILE} and its shards.")


def _open_index(folder: Path) -> dict[str, safe_open]:
    """Return the open file of each tensor that the index names: the file it names."""
    index = folder / INDEX_FILE
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: not a safetensors index ({error!r}).") from None
    foreign = [shard for shard in shards if Path(shard).name != shard]
    if foreign:
        raise ValueError(f"{index}: shards must lie in the same folder, got {foreign}.")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}.")
    files = {shard: _open_file(folder / shard) for shard in shards}
    absent = [f"{name} in {shard}" for name, shard in weight_map.items() if name not in files[shard]]
    if absent:
        raise ValueError(f"{folder}: the index names tensors that their shards do not hold: {', '.join(absent[:5])}.")
    return {name: files[shard][name] for name, shard in weight_map.items()}


def _open_file(path: Path) -> dict[str, safe_open]:
    """Return the open file of each tensor of one file, in file order; the file must be whole."""
    try:
        # Read, not mapped: mapped pages would count as our memory, and would change when the file is overwritten.
        file = safe_open(path, "numpy", backend="pread")
    except SafetensorError as error:
        with path.open("rb") as start:
            if start.read(8) == b"version ":
                raise ValueError(
                    f"{path}: a Git LFS pointer, not the weights. Run `git lfs pull`, or download the file."
                ) from None
        raise ValueError(f"{path}: cut off, damaged, or not a safetensors file ({error}). Download it again.") from None
    return dict.fromkeys(file.offset_keys(), file)
