"""`use_compilation_cache`: keep compiled steps on disk, so that the next process does not compile them again."""

from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def use_compilation_cache(folder: str | Path) -> None:
    """Keep what is compiled from here on in a folder, and look there before compiling.

    This turns on JAX's persistent compilation cache, which is one for the whole process: it serves all engines and all
    other JAX code alike, not one engine. Programs of any compile time are kept, where JAX alone keeps those that took a
    second. They are found again by the same program on the same kind of device with the same versions of JAX and XLA;
    for anything else the folder just grows. Tracing is not saved, only compiling.

    Args:
        folder: Where to keep them; made if missing. Others who can write there can make this process run their code.
    """
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    # JAX decides at its first compilation, once, whether there is a cache; let it decide again.
    compilation_cache.reset_cache()
