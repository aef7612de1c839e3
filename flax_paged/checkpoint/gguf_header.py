"""Read the header of a GGUF file: its key-value metadata and the table of its tensors.

The `gguf` package has a reader too, but it maps the whole file and takes seconds over a tokenizer's string arrays.

Reference: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_STRING, _ARRAY, _BOOL, _FLOAT32 = 8, 9, 7, 6
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_MAX_NUM_DIMS = 4


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One row of the tensor table.

    Args:
        name: Name of the tensor.
        shape: Shape as numpy says it, slowest axis first (the file has it reversed).
        ggml_type: Number of the storage type.
        offset: Where its bytes begin, from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


class _Reader:
    """Little-endian values from a file, one after the other; the end of the file is a readable error."""

    def __init__(self, file: BinaryIO, size: int):
        self.file, self.size = file, size

    def take(self, count: int) -> bytes:
        if count > self.size - self.file.tell():
            raise EOFError
        return self.file.read(count)

    def scalar(self, kind: int) -> Any:
        form = _SCALARS[kind]
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        if kind == _BOOL:
            return bool(value)
        # The shortest decimal that is this float32, so that 1e-5 reads as 1e-5 and not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def string(self) -> str:
        return self.take(self.scalar(10)).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(kind)
        item_kind, count = self.scalar(4), self.scalar(10)
        if item_kind in _SCALARS and item_kind != _BOOL:
            form = np.dtype(_SCALARS[item_kind])
            return np.frombuffer(self.take(count * form.itemsize), form).tolist()
        return [self.value(item_kind) for _ in range(count)]


def read_gguf_header(path: Path) -> tuple[dict[str, Any], list[TensorInfo]]:
    """Return a GGUF file's metadata and tensor table.

    Args:
        path: The file.

    Returns:
        Metadata by key (numbers, strings, booleans, lists) and the tensors in file order.

    Raises:
        ValueError: The file is no GGUF file, of a version or byte order we cannot read, or cut off.
    """
    with path.open("rb") as file:
        reader = _Reader(file, path.stat().st_size)
        if file.read(4) != _MAGIC:
            raise ValueError(f"{path}: not a GGUF file (it does not begin with the bytes 'GGUF').")
        try:
            version = reader.scalar(4)
            if version not in _VERSIONS:
                raise ValueError(f"{path}: GGUF {version=}, expected 2 or 3 in little-endian byte order.")
            num_tensors, num_keys = reader.scalar(10), reader.scalar(10)
            metadata = {reader.string(): reader.value(reader.scalar(4)) for _ in range(num_keys)}
            rows = [_tensor_row(reader) for _ in range(num_tensors)]
        except (EOFError, MemoryError):
            raise ValueError(f"{path}: the GGUF header is cut off or damaged. Download the file again.") from None
        except (KeyError, struct.error) as error:
            raise ValueError(f"{path}: the GGUF header is damaged ({error!r}). Download the file again.") from None
        start = file.tell()
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    start += -start % alignment
    return metadata, [TensorInfo(name, shape, kind, start + offset) for name, shape, kind, offset in rows]


def _tensor_row(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """Read one row of the tensor table: name, shape, type, offset in the data section."""
    name, num_dims = reader.string(), reader.scalar(4)
    if num_dims > _MAX_NUM_DIMS:
        raise KeyError(f"{num_dims} dimensions of {name[:80]!r}")
    shape = tuple(reader.scalar(10) for _ in range(num_dims))[::-1]
    return name, shape, reader.scalar(4), reader.scalar(10)
