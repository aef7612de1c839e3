"""What a checkpoint file looks like to the rest of the library: named tensors, read one at a time."""

import math
from collections.abc import Iterable
from typing import Protocol

import ml_dtypes
import numpy as np

# The kinds of weight we load; everything else (integers, 8-bit floats) is refused by name.
FLOAT_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


class TensorSource(Protocol):
    """Named tensors of a checkpoint, read lazily.

    `shape` and `dtype` come from headers and cost nothing; `read` reads one tensor into memory of its own.
    """

    def names(self) -> list[str]:
        """Return the name of every tensor, in the order of the file."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that `read` will give."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype that `read` will give: float32, float16 or bfloat16."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Return the tensor in an array that shares no memory with the file."""
        ...


def main_dtype(arrays: Iterable[tuple[tuple[int, ...], np.dtype]]) -> np.dtype:
    """Return the float dtype that holds most of a checkpoint's elements: the dtype a user would say it is in.

    Args:
        arrays: Shape and dtype of each array; those that are no weights do not count.

    Returns:
        The dtype; float32 where nothing counts.
    """
    elements: dict[np.dtype, int] = {}
    for shape, dtype in arrays:
        if np.dtype(dtype) in FLOAT_DTYPES:
            elements[np.dtype(dtype)] = elements.get(np.dtype(dtype), 0) + math.prod(shape)
    return max(elements, key=lambda dtype: elements[dtype], default=np.dtype(np.float32))
