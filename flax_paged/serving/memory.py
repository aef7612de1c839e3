"""Whether a model, its cache and its steps fit the memory there is; asked before anything is loaded."""

import dataclasses
from pathlib import Path

import jax
from flax import nnx

from flax_paged.attention import cache_spec_for, num_caches
from flax_paged.generation.runner import default_num_pages

# Logits are float32, and sampling works on a changed copy beside the model's own.
_NUM_LOGITS_COPIES = 2


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes that an engine needs.

    Fields:
        num_params: Parameters of the model.
        params_nbytes: Their bytes.
        num_pages: Pages of the pool.
        page_nbytes: Bytes of a page, in all layers.
        logits_nbytes: Bytes of the logits of the largest step.
    """

    num_params: int
    params_nbytes: int
    num_pages: int
    page_nbytes: int
    logits_nbytes: int

    @property
    def nbytes(self) -> int:
        """All of them."""
        return self.params_nbytes + self.num_pages * self.page_nbytes + self.logits_nbytes

    def check(self, num_free_bytes: int, device: str) -> None:
        """Refuse what does not fit.

        Raises:
            ValueError: It does not; the message shows the arithmetic.
        """
        if self.nbytes <= num_free_bytes:
            return
        raise ValueError(
            f"The model does not fit: {_size(self.params_nbytes)} of weights ({self.num_params:,} parameters) +"
            f" {_size(self.num_pages * self.page_nbytes)} of KV cache ({self.num_pages:,} pages of"
            f" {_size(self.page_nbytes)}) + {_size(self.logits_nbytes)} of logits = {_size(self.nbytes)}, but"
            f" {_size(num_free_bytes)} are free on {device}. Give a smaller --num-pages, --max-num-batched-tokens or"
            " --dtype, or a smaller model."
        )


def plan_memory(
    model: nnx.Module,
    *,
    num_pages: int | None,
    page_size: int,
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    vocab_size: int,
) -> MemoryPlan:
    """Return what an engine of these sizes needs.

    Args:
        model: The model, or its shapes alone.
        num_pages: Pages in the pool; None for as many as every sequence needs at full length, within 1 GiB.
        page_size: Tokens in a page.
        max_num_seqs: Most sequences in a step.
        max_model_len: Most tokens of a sequence.
        max_num_batched_tokens: Most tokens in a step.
        vocab_size: Width of the logits.

    Returns:
        The plan, with the number of pages to make.
    """
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    spec = cache_spec_for(model, num_pages=1, page_size=page_size)
    if num_pages is None:
        num_pages = default_num_pages(
            model, page_size=page_size, max_num_seqs=max_num_seqs, max_model_len=max_model_len
        )
    return MemoryPlan(
        num_params=sum(param.size for param in params),
        params_nbytes=sum(param.size * param.dtype.itemsize for param in params),
        num_pages=num_pages,
        page_nbytes=spec.page_nbytes * num_caches(model),
        logits_nbytes=max_num_batched_tokens * vocab_size * 4 * _NUM_LOGITS_COPIES,
    )


def free_memory() -> tuple[int, str]:
    """Return the free bytes of the first device, and its name; of a CPU, what its host or container has left."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0), str(device)
    return _free_host_memory(), "the host"


def _free_host_memory() -> int:
    """Return the host's available bytes, or a container's if that is less; without limit where Linux does not tell."""
    free = 2**63
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdigit():
        free = min(free, max(int(text) - int(used.read_text()), 0))
    return free


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} B"
