"""What the ops' public functions share: the choice of an implementation and the static checks of their arguments."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flax_paged.ops.page_layout import PageLayout
from flax_paged.ops.quantization import QUANTIZED_DTYPES

IMPLEMENTATIONS = ("reference", "xla", "pallas_tpu", "pallas_tpu_interpret")
FLOAT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def choose_implementation(implementation: str | None, *, kernel_can: bool) -> str:
    """Return the implementation to run; a named one is taken at its word.

    Args:
        implementation: None or one of `IMPLEMENTATIONS`.
        kernel_can: Whether the TPU kernel takes these shapes and dtypes; matters to None on a TPU only.
    """
    if implementation is None:
        return "pallas_tpu" if kernel_can and jax.default_backend() == "tpu" else "xla"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}: expected None or one of {', '.join(IMPLEMENTATIONS)}.")
    if implementation == "pallas_tpu" and jax.default_backend() != "tpu":
        raise ValueError(
            f"implementation='pallas_tpu' needs a TPU, but the backend is {jax.default_backend()!r}; use 'xla', or"
            " 'pallas_tpu_interpret' to run the kernel's code without one."
        )
    return implementation


def product_dtype(a: jax.Array, b: jax.Array) -> Any:
    """Return the dtype in which two arrays are multiplied: their own if they agree, else float32."""
    return a.dtype if a.dtype == b.dtype else jnp.dtype(jnp.float32)


def check_shape(name: str, array: jax.Array, expected: Sequence[int | str]) -> None:
    """Check the rank and the known sizes of an array; a string names a size that may be anything from 1 up."""
    fits = array.ndim == len(expected) and all(
        size >= 1 if isinstance(want, str) else size == want for size, want in zip(array.shape, expected, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} has shape {array.shape}: expected [{', '.join(map(str, expected))}].")


def check_dtype(name: str, array: jax.Array, expected: Sequence[Any]) -> None:
    """Check an array's dtype against the allowed ones."""
    if array.dtype not in expected:
        names = ", ".join(jnp.dtype(dtype).name for dtype in expected)
        raise TypeError(f"{name} has dtype {array.dtype}: expected {names}; convert it with .astype().")


def check_int32(**arrays: jax.Array) -> None:
    """Check that index arrays are int32, as every kernel reads them."""
    for name, array in arrays.items():
        check_dtype(name, array, (jnp.int32,))


def check_kv_pages(kv_pages: jax.Array, num_kv_heads: int | None, head_dim: int) -> PageLayout:
    """Check a page pool against the heads and head_dim that read or write it; returns its layout."""
    check_dtype("kv_pages", kv_pages, (*FLOAT_DTYPES, *QUANTIZED_DTYPES))
    layout = PageLayout.of(kv_pages, head_dim)
    if num_kv_heads not in (None, layout.num_kv_heads):
        raise ValueError(
            f"kv_pages has shape {kv_pages.shape}, which holds {layout.num_kv_heads} kv heads: expected {num_kv_heads},"
            f" {2 * num_kv_heads} combined heads."
        )
    return layout
