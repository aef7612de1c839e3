import importlib.util
import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from checkpoint_files import CONFIG, byte_level_tokenizer, hf_tensors, write_hf_folder

from flax_paged.loading import load_model, load_tokenizer

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("convert_script", ROOT / "scripts" / "convert.py")
convert = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(convert)


@pytest.fixture
def folder(tmp_path):
    root = write_hf_folder(tmp_path / "hf", CONFIG, hf_tensors(CONFIG))
    byte_level_tokenizer().save(str(root / "tokenizer.json"))
    return root


def test_converts_weights_config_and_tokenizer(tmp_path, folder, capsys):
    assert convert.main([str(folder), str(tmp_path / "ours"), "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == ""
    model = load_model(tmp_path / "ours")
    assert model.norm.weight.dtype == jnp.bfloat16
    assert model.config == load_model(folder).config
    assert load_tokenizer(tmp_path / "ours").encode("fox 12") == load_tokenizer(folder).encode("fox 12")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_refuses_to_overwrite(tmp_path, folder, capsys):
    target = tmp_path / "ours"
    target.mkdir()
    (target / "precious").write_text("x")
    assert convert.main([str(folder), str(target)]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert (target / "precious").exists()
    assert convert.main([str(folder), str(target), "--overwrite"]) == 0
    assert not (target / "precious").exists() and (target / "weights").is_dir()


def test_a_failure_leaves_nothing(tmp_path, folder, capsys):
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    assert convert.main([str(folder), str(tmp_path / "ours")]) == 1
    assert "error: " in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_a_folder_without_a_tokenizer(tmp_path, folder, capsys):
    (folder / "tokenizer.json").unlink()
    assert convert.main([str(folder), str(tmp_path / "ours")]) == 1
    assert "tokenizer.json" in capsys.readouterr().err
    assert convert.main([str(folder), str(tmp_path / "ours"), "--no-tokenizer"]) == 0
