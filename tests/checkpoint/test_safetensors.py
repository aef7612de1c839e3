import json
import struct

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import write_hf_folder, write_safetensors

from flax_paged.checkpoint.safetensors import SafetensorsSource

SHARDS = {"model-00001-of-00002.safetensors": ["a", "b"], "model-00002-of-00002.safetensors": ["c"]}


def tensors():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**16, (5, 7), np.uint16)  # every kind of bit pattern, NaN payloads too
    return {
        "a": bits.view(ml_dtypes.bfloat16),
        "b": bits[::-1].copy().view(np.float16),
        "c": rng.standard_normal((3, 2, 4)).astype(np.float32),
    }


def same_bits(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def read_all(source):
    return {name: source.read(name) for name in source.names()}


@pytest.mark.parametrize("shards", [None, SHARDS])
def test_bits_are_kept(tmp_path, shards):
    given = tensors()
    source = SafetensorsSource(write_hf_folder(tmp_path / "m", {}, given, shards))
    for name, array in read_all(source).items():
        assert same_bits(array, given[name])
        assert (source.shape(name), source.dtype(name)) == (array.shape, array.dtype)
    assert sorted(source.names()) == ["a", "b", "c"]


def test_reads_what_the_safetensors_package_writes(tmp_path):
    from safetensors.numpy import save_file

    given = tensors() | {"scalar": np.array(3.0, np.float32), "empty": np.zeros((0, 4), np.float32)}
    save_file(given, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = read_all(SafetensorsSource(tmp_path))
    assert found.keys() == given.keys()
    assert all(same_bits(found[name], given[name]) for name in given)


def test_a_single_file_may_be_given(tmp_path):
    write_safetensors(tmp_path / "any.safetensors", tensors())
    assert sorted(SafetensorsSource(tmp_path / "any.safetensors").names()) == ["a", "b", "c"]
    assert sorted(SafetensorsSource(tmp_path).names()) == ["a", "b", "c"], "the only file needs no index"


def test_the_index_decides(tmp_path):
    given = tensors()
    folder = write_hf_folder(tmp_path / "m", {}, given, SHARDS)
    wrong = {name: np.zeros_like(array) for name, array in given.items()}
    write_safetensors(folder / "consolidated.safetensors", wrong)
    write_safetensors(folder / "model.safetensors", wrong)
    # Stale copies inside the shards: `c` in the first, `a` in the second.
    first, second = SHARDS
    write_safetensors(folder / first, {"c": wrong["c"], "a": given["a"], "b": given["b"]})
    write_safetensors(folder / second, {"c": given["c"], "a": wrong["a"], "stale": wrong["a"]})
    found = read_all(SafetensorsSource(folder))
    assert found.keys() == given.keys()
    assert all(same_bits(found[name], given[name]) for name in given)


def test_stray_files_beside_a_single_file(tmp_path):
    given = tensors()
    folder = write_hf_folder(tmp_path / "m", {}, given)
    write_safetensors(folder / "adapter.safetensors", {"a": np.zeros(1, np.float32)})
    assert same_bits(SafetensorsSource(folder).read("a"), given["a"])


def test_a_missing_shard_is_named(tmp_path):
    folder = write_hf_folder(tmp_path / "m", {}, tensors(), SHARDS)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of 2 shards are missing: model-00002-of-00002\.safetensors"):
        SafetensorsSource(folder)


def test_shards_without_an_index(tmp_path):
    folder = write_hf_folder(tmp_path / "m", {}, tensors(), SHARDS)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors\.index\.json is missing"):
        SafetensorsSource(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not a safetensors index"),
        ("[]", "not a safetensors index"),
        ("{}", "not a safetensors index"),
        (json.dumps({"weight_map": {"x": "../other.safetensors"}}), "same folder"),
        (json.dumps({"weight_map": {"x": "model.safetensors"}}), r"x in model\.safetensors"),
    ],
)
def test_a_wrong_index(tmp_path, index, message):
    write_safetensors(tmp_path / "model.safetensors", tensors())
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=message):
        SafetensorsSource(tmp_path)


def test_a_cut_off_file_is_named_wherever_it_ends(tmp_path):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, tensors())
    whole = path.read_bytes()
    (header,) = struct.unpack("<Q", whole[:8])
    for length in (0, 5, 8, 20, 8 + header - 1, 8 + header, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors: cut off"):
            SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"PK\x03\x04" + b"\xff" * 60, "not a safetensors file"),
        (struct.pack("<Q", 4) + b"oops", "not a safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "not a safetensors file"),
        (struct.pack("<Q", 9) + b'{"a": {}}', "not a safetensors file"),
    ],
)
def test_files_that_are_something_else(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        SafetensorsSource(tmp_path)


def test_offsets_that_do_not_fit_the_shape(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    with pytest.raises(ValueError, match=r"model\.safetensors: .*damaged.*invalid shape"):
        SafetensorsSource(tmp_path)


def test_dtypes_that_are_no_weights(tmp_path):
    raw = np.zeros((2, 2), np.int8)
    write_safetensors(tmp_path / "model.safetensors", {"a": raw, "b": raw}, {"a": "F8_E4M3", "b": "F8_E8M0"})
    source = SafetensorsSource(tmp_path)
    assert source.dtype("a") == ml_dtypes.float8_e4m3fn
    with pytest.raises(ValueError, match=r"tensor b has dtype F8_E8M0; expected F32, F16 or BF16"):
        source.dtype("b")


def test_pickles_and_empty_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no weights: expected model\.safetensors"):
        SafetensorsSource(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin.*save_pretrained"):
        SafetensorsSource(tmp_path)


def test_what_is_read_does_not_change_with_the_file(tmp_path):
    given = tensors()
    write_safetensors(tmp_path / "model.safetensors", given)
    array = SafetensorsSource(tmp_path).read("c")
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(bytes((tmp_path / "model.safetensors").stat().st_size))
    np.testing.assert_array_equal(array, given["c"])


def test_a_file_cut_off_after_it_was_opened(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", tensors())
    source = SafetensorsSource(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="tensor c cannot be read"):
        source.read("c")
