"""What pip installs, and that importing it needs no extra."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_folder_is_listed():
    folders = {"flax_paged": ROOT / "flax_paged", "flax_paged.models": ROOT / "models"}
    found = set()
    for name, folder in folders.items():
        for init in folder.rglob("__init__.py"):
            found.add(".".join([name, *init.parent.relative_to(folder).parts]))
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_import_needs_no_extra():
    extras = ["torch", "transformers", "gguf", "huggingface_hub", "hypothesis", "pytest", "grain", "matplotlib"]
    extras += ["fastapi", "uvicorn", "pydantic", "prometheus_client"]
    code = f"import sys; sys.modules.update(dict.fromkeys({extras!r})); import flax_paged; print(flax_paged.__all__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name in ("PagedAttention", "PagedMetadata", "KVCache", "CacheSpec", "Engine", "SamplingParams", "load_model"):
        assert f"'{name}'" in result.stdout


def test_import_directions(tmp_path):
    """import-linter sees `models/` only where it is installed to, so the check runs on a copy laid out that way."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "flax_paged", tmp_path / "flax_paged", ignore=ignore)
    shutil.copytree(ROOT / "models", tmp_path / "flax_paged" / "models", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    lint = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([lint, "--no-cache"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_style():
    result = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
