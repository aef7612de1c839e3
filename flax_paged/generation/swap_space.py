"""`SwapSpace`: host memory that holds the pages of preempted sequences."""

import jax
import numpy as np
from flax import nnx

from flax_paged.cache import KVCache
from flax_paged.ops.page_operations import read_pages, write_pages
from flax_paged.step import CompiledStep

# Pages moved by one compiled call. Fewer would take more calls, more would move more padding.
_PAGES_PER_CALL = 16


class SwapSpace:
    """Copies pages of every layer's cache to slots in host memory, and back.

    Reading is dispatched behind the steps that have been launched, and the copy to the host goes on while later steps
    run. Pages move in groups of one size, so that two programs are compiled.

    Args:
        step: Any step over the module with the caches.
        num_pages: Pages in the pool.
        num_slots: Pages that host memory may hold.
    """

    def __init__(self, step: CompiledStep, *, num_pages: int, num_slots: int):
        self._read = step.with_function(_read, name="read_pages")
        self._write = step.with_function(_write, name="write_pages")
        self._num_pages = num_pages
        caches = [cache.get_value() for _, cache in nnx.to_flat_state(nnx.state(step.module(), KVCache))]
        # Untouched memory costs nothing: the operating system provides it as it is written.
        self._slots = [np.empty((num_slots, *cache.shape[1:]), cache.dtype) for cache in caches]
        self._arriving: list[tuple[np.ndarray, list[jax.Array]]] = []

    @property
    def num_traces(self) -> int:
        """How many programs have been traced."""
        return self._read.num_traces + self._write.num_traces

    def swap_out(self, moves: list[tuple[int, int]]) -> None:
        """Copy pages, as the launched steps leave them, to slots.

        Args:
            moves: (page, slot) pairs.
        """
        for group in _groups(moves):
            pages, slots = np.array(group, np.int32).T
            padded = np.pad(pages, (0, _PAGES_PER_CALL - len(pages)), mode="edge")
            on_device = self._read(padded)
            for array in on_device:
                array.copy_to_host_async()
            self._arriving.append((slots, on_device))

    def swap_in(self, moves: list[tuple[int, int]]) -> None:
        """Copy slots to pages, before the steps that are launched later.

        Args:
            moves: (slot, page) pairs.
        """
        self.settle()
        for group in _groups(moves):
            slots, pages = np.array(group, np.int32).T
            num_padding = _PAGES_PER_CALL - len(pages)
            padded_slots = np.pad(slots, (0, num_padding), mode="edge")
            padded_pages = np.pad(pages, (0, num_padding), constant_values=self._num_pages)  # dropped
            self._write(padded_pages, [array[padded_slots] for array in self._slots])

    def settle(self) -> None:
        """Put what has been read into its slots, waiting for it."""
        for slots, on_device in self._arriving:
            for array, pages in zip(self._slots, on_device, strict=True):
                array[slots] = np.asarray(pages)[: len(slots)]
        self._arriving = []

    def reset(self) -> None:
        """Forget what is on its way."""
        self._arriving = []

    def warmup(self) -> None:
        """Compile both programs; no page is changed."""
        self._read(np.zeros(_PAGES_PER_CALL, np.int32))
        nowhere = np.full(_PAGES_PER_CALL, self._num_pages, np.int32)
        self._write(nowhere, [np.zeros((_PAGES_PER_CALL, *array.shape[1:]), array.dtype) for array in self._slots])


def _groups(moves: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    return [moves[start : start + _PAGES_PER_CALL] for start in range(0, len(moves), _PAGES_PER_CALL)]


def _read(model: nnx.Module, page_ids: jax.Array) -> list[jax.Array]:
    return [read_pages(cache[...], page_ids) for _, cache in nnx.to_flat_state(nnx.state(model, KVCache))]


def _write(model: nnx.Module, page_ids: jax.Array, pages: list[jax.Array]) -> None:
    caches = [cache for _, cache in nnx.to_flat_state(nnx.state(model, KVCache))]
    for cache, new in zip(caches, pages, strict=True):
        cache[...] = write_pages(cache[...], page_ids, new)
