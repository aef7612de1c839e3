import json
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import CONFIG, byte_level_tokenizer, hf_tensors, write_gguf, write_hf_folder
from flax import nnx

from flax_paged.attention import cache_spec_for
from flax_paged.calibration import calibrate_kv_scales
from flax_paged.loading import load_generation_config, load_model, load_tokenizer, save_model
from flax_paged.models.llama import Llama

TIED = CONFIG | {"tie_word_embeddings": True}


def flat(model):
    return {
        ".".join(map(str, path)): np.asarray(variable[...])
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.dtype == right[name].dtype and array.tobytes() == right[name].tobytes(), name


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder with a tokenizer."""
    root = write_hf_folder(tmp_path / "hf", CONFIG, hf_tensors(CONFIG))
    byte_level_tokenizer(vocab_size=300).save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}))
    (root / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "temperature": 0.6}))
    return root


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_hugging_face_to_ours_and_back_is_bit_equal(tmp_path, dtype):
    tensors = hf_tensors(CONFIG, dtype)
    model = load_model(write_hf_folder(tmp_path / "hf", CONFIG, tensors))
    assert isinstance(model, Llama)
    loaded = flat(model)
    assert_same_bits(loaded, {name.removeprefix("model."): array for name, array in tensors.items()})
    save_model(model, tmp_path / "ours")
    again = load_model(tmp_path / "ours")
    assert_same_bits(flat(again), loaded)
    assert again.config == model.config


def test_a_calibrated_model_is_saved_without_its_caches_scales(tmp_path, folder):
    model = load_model(folder)
    spec = cache_spec_for(model, num_pages=4, page_size=4, dtype="float8_e4m3fn")
    calibrate_kv_scales(model, [[1, 2, 3]], spec)
    save_model(model, tmp_path / "ours")
    assert_same_bits(flat(load_model(tmp_path / "ours")), flat(model))


def test_the_tokenizer_travels_along(tmp_path, folder):
    tokenizer = load_tokenizer(folder)
    save_model(load_model(folder), tmp_path / "ours", tokenizer)
    loaded = load_tokenizer(tmp_path / "ours")
    text = "The quick 😀 fox <|im_end|>"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert set(loaded.eos_token_ids) == set(tokenizer.eos_token_ids) == {0, 2, 7}
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert set(config["eos_token_id"]) == {0, 2, 7} and config["bos_token_id"] == 1
    assert load_generation_config(tmp_path / "ours")["temperature"] == 0.6


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(2, [2, 7], [2, 7]), ([3, 4], 5, [5, 3, 4]), (2, None, [2]), (None, None, []), (None, [9], [9])],
)
def test_generation_config_joins_every_eos(tmp_path, config, generation, expected):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config, "bos_token_id": 1}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation, "top_p": 0.9}))
    values = load_generation_config(tmp_path)
    assert values["eos_token_id"] == expected and values["bos_token_id"] == 1
    assert values.get("top_p") == (None if generation is None else 0.9)


def test_dtypes(tmp_path, folder):
    assert flat(load_model(folder))["norm.weight"].dtype == np.float32
    for dtype in ("bfloat16", jnp.bfloat16, np.dtype(np.float16)):
        assert {array.dtype for array in flat(load_model(folder, dtype=dtype)).values()} == {jnp.dtype(dtype)}
    mixed = hf_tensors(CONFIG, ml_dtypes.bfloat16)
    mixed["model.norm.weight"] = mixed["model.norm.weight"].astype(np.float32)
    model = load_model(write_hf_folder(tmp_path / "mixed", CONFIG, mixed))
    assert {array.dtype for array in flat(model).values()} == {jnp.dtype(jnp.bfloat16)}, "the dtype of most weights"
    for wrong in ("int8", "float8_e4m3fn", "nonsense", np.int32, "float64"):
        with pytest.raises(ValueError, match="expected None, float32, bfloat16 or float16"):
            load_model(folder, dtype=wrong)


def test_a_quantised_gguf_is_float32(tmp_path):
    pytest.importorskip("gguf")
    tensors = hf_tensors(CONFIG)
    kinds = {name: "Q8_0" for name, array in tensors.items() if array.ndim == 2}
    model = load_model(write_gguf(tmp_path / "m.gguf", CONFIG, tensors, kinds=kinds))
    assert {array.dtype for array in flat(model).values()} == {np.dtype(np.float32)}


def test_tied_embeddings(tmp_path):
    tensors = hf_tensors(TIED)
    tokens = np.arange(6, dtype=np.int32)[None]
    absent = load_model(write_hf_folder(tmp_path / "absent", TIED, tensors))
    table = tensors["model.embed_tokens.weight"]
    equal = load_model(write_hf_folder(tmp_path / "equal", TIED, tensors | {"lm_head.weight": table}))
    np.testing.assert_array_equal(absent(tokens), equal(tokens))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_model(write_hf_folder(tmp_path / "other", TIED, tensors | {"lm_head.weight": table + 1}))
    untied = write_hf_folder(tmp_path / "untied", CONFIG, tensors)
    with pytest.raises(ValueError, match=r"Missing tensors:\n  lm_head\.weight"):
        load_model(untied)


def test_what_does_not_fit_is_listed(tmp_path):
    tensors = hf_tensors(CONFIG)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((95, 64), np.float32)
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    with pytest.raises(ValueError) as caught:
        load_model(write_hf_folder(tmp_path / "hf", CONFIG, tensors))
    message = str(caught.value)
    assert "Missing tensors:\n  model.layers.1.self_attn.o_proj.weight" in message
    assert "no place for:\n  model.layers.0.self_attn.q_proj.bias" in message
    assert "model.layers.1.mlp.up_proj.weight: (95, 64) in the checkpoint, (96, 64) expected" in message


def test_a_truncated_file_fails_before_any_compute(folder, monkeypatch):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    monkeypatch.setattr("flax_paged.loading.assign", lambda *args, **kwargs: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=r"model\.safetensors: cut off"):
        load_model(folder)


def test_unknown_architectures_are_named(tmp_path):
    folder = write_hf_folder(tmp_path / "m", {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, {})
    with pytest.raises(ValueError, match="MambaForCausalLM"):
        load_model(folder)


def test_a_mesh_shards_every_kind_of_checkpoint(tmp_path, folder):
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    single = load_model(folder)
    save_model(single, tmp_path / "ours")
    for source in (folder, tmp_path / "ours"):
        model = load_model(source, mesh=mesh)
        assert len(model.embed_tokens.weight[...].sharding.device_set) == 2
        assert model.embed_tokens.weight[...].addressable_shards[0].data.shape[0] == CONFIG["vocab_size"] // 2
        assert_same_bits(flat(model), flat(single))


# Names that are no checkpoint


@pytest.mark.parametrize("load", [load_model, load_tokenizer, load_generation_config])
def test_paths_that_do_not_exist(tmp_path, load):
    for name in ("no-such-thing", tmp_path / "missing" / "folder", "./a/b/c", "models/x.gguf"):
        with pytest.raises(FileNotFoundError, match=r"does not exist\. Expected a folder of ours"):
            load(name)


def test_a_repository_id_that_cannot_be_fetched():
    pytest.importorskip("huggingface_hub")
    with pytest.raises(FileNotFoundError, match="'nobody/nothing' is no file or folder here"):
        load_model("nobody/nothing")


def test_a_repository_id_without_huggingface_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r'pip install "flax-paged\[hub\]"'):
        load_model("nobody/nothing")


def test_folders_and_files_of_unknown_kind(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json\. Expected a folder of ours"):
        load_model(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"It holds m\.gguf: give the path"):
        load_model(tmp_path)
    (tmp_path / "m.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="unknown kind of file"):
        load_model(tmp_path / "m.bin")
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object"):
        load_model(tmp_path)


def test_saving_refuses_what_it_would_destroy_or_cannot_describe(tmp_path, folder):
    model = load_model(folder)
    with pytest.raises(FileExistsError, match="exists already"):
        save_model(model, folder)
    with pytest.raises(TypeError, match="got Linear"):
        save_model(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tmp_path / "x")
    assert not (tmp_path / "x").exists()
    save_model(model, tmp_path / "x")
    save_model(model, tmp_path / "x", overwrite=True)


@pytest.mark.smollm2
def test_smollm2_speaks(smollm2_path):
    model, tokenizer = load_model(smollm2_path), load_tokenizer(smollm2_path)
    ids = tokenizer.encode("The capital of France is")
    tokens = np.zeros((1, 8), np.int32)
    tokens[0, : len(ids)] = ids
    best = int(model(tokens)[0, len(ids) - 1].argmax())
    assert tokenizer.decode([best]) == " Paris"
