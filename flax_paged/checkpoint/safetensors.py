"""Hugging Face safetensors folders as a tensor source: one file, or shards with an index that is obeyed to the letter.

Files are read with plain reads into memory of our own. A mapped file would count as our memory while it is read, and
would change under a loaded model when somebody overwrites it.

Reference: https://huggingface.co/docs/safetensors (format)
"""

import dataclasses
import json
import math
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
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


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where a tensor lies: file, format's dtype name, shape, first byte and number of bytes."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


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
        self._entries = _read_header(self.path) if self.path.is_file() else _read_folder(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        """Return the name of every tensor, in the order of the index or file."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._entries[name].shape

    def dtype(self, name: str) -> np.dtype:
        """Return a tensor's dtype as stored.

        Raises:
            ValueError: The format has this dtype, numpy does not.
        """
        entry = self._entries[name]
        if entry.dtype not in _DTYPES:
            raise ValueError(f"{entry.path}: tensor {name} has dtype {entry.dtype}; expected F32, F16 or BF16.")
        return np.dtype(_DTYPES[entry.dtype])

    def read(self, name: str) -> np.ndarray:
        """Return one tensor, bit for bit as stored."""
        entry = self._entries[name]
        array = np.empty(entry.shape, self.dtype(name))
        with entry.path.open("rb") as file:
            file.seek(entry.start)
            read = file.readinto(array.reshape(-1).view(np.uint8)) if array.size else 0
        if read != entry.num_bytes:
            raise ValueError(f"{entry.path}: the file ended inside tensor {name}: it changed while it was read.")
        return array


def _read_folder(folder: Path) -> dict[str, _Entry]:
    """Return the tensors of a folder: of the files its index names, or of its only file."""
    if (folder / INDEX_FILE).is_file():
        return _read_index(folder)
    if (folder / SINGLE_FILE).is_file():
        return _read_header(folder / SINGLE_FILE)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return _read_header(files[0])
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


def _read_index(folder: Path) -> dict[str, _Entry]:
    """Return the tensors that the index names, each from the file it names."""
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
    headers = {shard: _read_header(folder / shard) for shard in shards}
    absent = [f"{name} in {shard}" for name, shard in weight_map.items() if name not in headers[shard]]
    if absent:
        raise ValueError(f"{folder}: the index names tensors that their shards do not hold: {', '.join(absent[:5])}.")
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _read_header(path: Path) -> dict[str, _Entry]:
    """Return the tensors of one file; the file must be whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise ValueError(f"{path}: a Git LFS pointer, not the weights. Run `git lfs pull`, or download the file.")
        if len(start) < 8:
            raise ValueError(f"{path}: cut off: {size} bytes. Download it again.")
        (header_bytes,) = struct.unpack("<Q", start)
        if header_bytes > _MAX_HEADER_BYTES:
            raise ValueError(f"{path}: not a safetensors file (its header would take {header_bytes} bytes).")
        if header_bytes > size - 8:
            raise ValueError(f"{path}: cut off inside its header. Download it again.")
        try:
            header = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            entries = {name: _entry(path, 8 + header_bytes, **fields) for name, fields in header.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not a safetensors file, or damaged: {error}") from None
    end = max((entry.start + entry.num_bytes for entry in entries.values()), default=8 + header_bytes)
    if end > size:
        raise ValueError(f"{path}: cut off: its tensors end at byte {end}, the file at {size}. Download it again.")
    return entries


def _entry(path: Path, data_start: int, dtype: str, shape: list[int], data_offsets: list[int]) -> _Entry:
    """Return one checked row of a header."""
    begin, end = data_offsets
    expected = math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize if dtype in _DTYPES else end - begin
    if begin < 0 or end - begin != expected:
        raise ValueError(f"a tensor of {shape} {dtype} takes {expected} bytes, not {end - begin}.")
    return _Entry(path, dtype, tuple(shape), data_start + begin, end - begin)
