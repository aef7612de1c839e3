import builtins

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import CONFIG, hf_tensors, write_gguf
from flax import nnx

from flax_paged.checkpoint.gguf import GGUFSource
from flax_paged.loading import load_model

gguf = pytest.importorskip("gguf")


def config_of(path, **changes):
    edit = changes.pop("edit", None)
    config = CONFIG | changes
    return GGUFSource(write_gguf(path, config, hf_tensors(config), edit=edit)).config()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_unquantised_tensors_keep_their_bits(tmp_path, dtype):
    given = hf_tensors(CONFIG, dtype)
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", CONFIG, given))
    array = source.read("blk.1.ffn_down.weight")
    assert array.dtype == source.dtype("blk.1.ffn_down.weight") == dtype
    assert array.tobytes() == given["model.layers.1.mlp.down_proj.weight"].tobytes()
    assert source.shape("token_embd.weight") == (48, 64)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_tensors_equal_the_reference_dequantisation(tmp_path, kind):
    given = hf_tensors(CONFIG)
    name = "model.layers.0.mlp.up_proj.weight"
    path = write_gguf(tmp_path / "m.gguf", CONFIG, given, kinds={name: kind})
    source = GGUFSource(path)
    reference = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.0.ffn_up.weight")
    expected = gguf.quants.dequantize(reference.data, reference.tensor_type)
    array = source.read("blk.0.ffn_up.weight")
    assert array.dtype == source.dtype("blk.0.ffn_up.weight") == np.float32
    np.testing.assert_array_equal(array, expected)
    assert np.abs(array - given[name]).max() < 0.1


def test_dequantising_in_pieces_changes_nothing(tmp_path, monkeypatch):
    name = "model.layers.0.mlp.up_proj.weight"
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", CONFIG, hf_tensors(CONFIG), kinds={name: "Q8_0"}))
    whole = source.read("blk.0.ffn_up.weight")
    monkeypatch.setattr("flax_paged.checkpoint.gguf._ROWS_BYTES", 7 * 4 * 64)  # 96 rows, 7 at a time
    np.testing.assert_array_equal(source.read("blk.0.ffn_up.weight"), whole)


def test_metadata_and_tensor_table_equal_the_gguf_package(tmp_path):
    def edit(writer):
        writer.add_array("some.strings", ["a", "", "č"])
        writer.add_array("some.numbers", [1, 2, 3])
        writer.add_bool("some.flag", True)
        writer.add_float32("some.float", 0.1)

    path = write_gguf(tmp_path / "m.gguf", CONFIG, hf_tensors(CONFIG), edit=edit)
    source, reader = GGUFSource(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert source.metadata.keys() == fields.keys()
    for key, value in fields.items():
        assert (
            np.float32(source.metadata[key]) == np.float32(value)
            if isinstance(value, float)
            else (source.metadata[key] == value)
        )
    assert source.metadata["some.float"] == 0.1
    assert source.names() == [tensor.name for tensor in reader.tensors]


def test_config(tmp_path):
    config = config_of(tmp_path / "m.gguf")
    for key in CONFIG:
        if key not in ("bos_token_id", "eos_token_id"):
            assert config[key] == CONFIG[key], key
    assert config["attention_bias"] is config["mlp_bias"] is False
    assert "rope_scaling" not in config


def test_head_dim_that_is_not_hidden_over_heads(tmp_path):
    config = config_of(tmp_path / "m.gguf", num_attention_heads=4, head_dim=32)
    assert config["head_dim"] == 32
    assert "partial_rotary_factor" not in config


def test_tied_embeddings_are_an_absent_output(tmp_path):
    assert config_of(tmp_path / "m.gguf", tie_word_embeddings=True)["tie_word_embeddings"] is True


def test_biases_are_found_in_the_tensors(tmp_path):
    tensors = hf_tensors(CONFIG)
    for layer in range(2):
        for module in ("self_attn.q_proj", "mlp.up_proj"):
            weight = tensors[f"model.layers.{layer}.{module}.weight"]
            tensors[f"model.layers.{layer}.{module}.bias"] = np.zeros(weight.shape[0], np.float32)
    config = GGUFSource(write_gguf(tmp_path / "m.gguf", CONFIG, tensors)).config()
    assert config["attention_bias"] is config["mlp_bias"] is True


def scaling_of(path, edit):
    return config_of(path, edit=edit).get("rope_scaling")


def test_rope_scaling(tmp_path):
    def linear(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    def yarn(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(8.0)
        writer.add_rope_scaling_orig_ctx_len(16)

    def none(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)

    def longrope(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)

    assert scaling_of(tmp_path / "l.gguf", linear) == {"rope_type": "linear", "factor": 4.0}
    assert scaling_of(tmp_path / "y.gguf", yarn) == {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
    }
    assert scaling_of(tmp_path / "n.gguf", none) is None
    with pytest.raises(ValueError, match="longrope"):
        scaling_of(tmp_path / "x.gguf", longrope)


def llama3_divisors(theta, head_dim, factor, low, high, context):
    """The loop of llama.cpp's converter, in plain Python."""
    divisors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (index / head_dim)
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path, factor):
    config = CONFIG | {"rope_theta": 500000.0, "num_attention_heads": 2, "head_dim": 64, "num_key_value_heads": 1}
    divisors = llama3_divisors(500000.0, 64, factor, 1.0, 4.0, 8192)
    path = write_gguf(
        tmp_path / "m.gguf", config, hf_tensors(config), edit=lambda w: w.add_tensor("rope_freqs.weight", divisors)
    )
    assert GGUFSource(path).config()["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_unknown_frequency_divisors_are_refused(tmp_path):
    odd = np.array([1.0, 3.0, 2.0, 5.0], np.float32)
    path = write_gguf(
        tmp_path / "m.gguf", CONFIG, hf_tensors(CONFIG), edit=lambda w: w.add_tensor("rope_freqs.weight", odd)
    )
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        GGUFSource(path).config()


def test_what_cannot_be_expressed_is_refused(tmp_path):
    with pytest.raises(ValueError, match="mixture of experts"):
        config_of(tmp_path / "e.gguf", edit=lambda writer: writer.add_expert_count(8))
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "mamba")
    writer.add_tensor("x", np.zeros((2, 2), np.float32))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    with pytest.raises(ValueError, match="architecture='mamba' is not supported"):
        GGUFSource(tmp_path / "a.gguf").config()
    with pytest.raises(ValueError, match="mamba"):
        load_model(tmp_path / "a.gguf")


def test_a_cut_off_file_is_named_wherever_it_ends(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", CONFIG, hf_tensors(CONFIG))
    whole = path.read_bytes()
    for length in (4, 10, 100, 1000, 2500, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"m\.gguf: .*(cut off|damaged)"):
            GGUFSource(path)


def test_files_that_are_something_else(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ValueError, match="not a GGUF file"):
        GGUFSource(path)
    path.write_bytes(b"GGUF\x00\x00\x00\x03" + bytes(64))  # big-endian
    with pytest.raises(ValueError, match="little-endian"):
        GGUFSource(path)
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 64)
    with pytest.raises(ValueError, match="damaged"):
        GGUFSource(path)


def test_a_file_written_anew_is_read_anew(tmp_path):
    assert config_of(tmp_path / "m.gguf", rope_theta=1e4)["rope_theta"] == 1e4
    assert config_of(tmp_path / "m.gguf", rope_theta=2e4)["rope_theta"] == 2e4


def test_the_header_of_a_file_is_read_once(tmp_path, monkeypatch):
    first = config_of(tmp_path / "m.gguf")
    monkeypatch.setattr(gguf, "GGUFReader", None)
    assert GGUFSource(tmp_path / "m.gguf").config() == first


def test_without_the_gguf_package(tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "gguf":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r'pip install "flax-paged\[gguf\]"'):
        GGUFSource(tmp_path / "m.gguf")


@pytest.mark.parametrize("bias", [False, True])
def test_gguf_and_safetensors_of_the_same_weights_load_bit_equal(tmp_path, bias):
    from checkpoint_files import write_hf_folder

    config = CONFIG | {"attention_bias": bias}
    tensors = hf_tensors(config)
    if bias:
        rng = np.random.default_rng(1)
        for name in [name for name in tensors if "self_attn" in name]:
            tensors[name.replace("weight", "bias")] = rng.standard_normal(tensors[name].shape[0], np.float32)
    left = load_model(write_hf_folder(tmp_path / "hf", config, tensors))
    right = load_model(write_gguf(tmp_path / "m.gguf", config, tensors))
    ours, theirs = (dict(nnx.to_flat_state(nnx.state(model))) for model in (left, right))
    assert ours.keys() == theirs.keys()
    for path, variable in ours.items():
        np.testing.assert_array_equal(variable[...], theirs[path][...], err_msg=str(path))
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
    np.testing.assert_array_equal(left(tokens), right(tokens))
    stored = GGUFSource(tmp_path / "m.gguf").read("blk.0.attn_k.weight")
    assert not np.array_equal(stored, tensors["model.layers.0.self_attn.k_proj.weight"]), "the file is permuted"
