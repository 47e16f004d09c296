"""From what the user typed to an open checkpoint, with a hub made of folders."""

import pytest

from branchline.base.errors import ModelError
from branchline.models import source
from branchline.models.hub import HuggingFaceHub, fetch_from_hub
from branchline.models.random import RandomCheckpoint, tiny_config
from branchline.models.source import open_checkpoint
from tests.support.checkpoints import assert_one_sentence, write_folder, write_gguf


class FakeHub:
    def __init__(self, folder, files=()):
        self.folder = folder
        self.listed = list(files)
        self.asked = []

    def snapshot(self, name, patterns):
        self.asked.append((name, tuple(patterns)))
        return str(self.folder)

    def files(self, name):
        return self.listed


class Offline:
    def snapshot(self, name, patterns):
        raise ConnectionError("no route\nto host\nand a very long story")

    files = snapshot


def opened(model, tmp_path, hub=None, heard=None):
    return open_checkpoint(model, str(tmp_path / "cache"), (heard if heard is not None else []).append, hub)


def test_gguf_file(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", RandomCheckpoint(tiny_config()))
    assert opened(str(path), tmp_path).config.name == "tiny"


def test_folder(tmp_path):
    path = write_folder(tmp_path / "tiny", RandomCheckpoint(tiny_config("qwen3")))
    assert opened(f"{path}/", tmp_path).config.name == "tiny"


def test_nothing_is_the_default_model(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", RandomCheckpoint(tiny_config()))
    monkeypatch.setattr(source, "locate_default_model", lambda cache_dir, progress: str(path))
    assert opened(None, tmp_path).config.name == "tiny"


@pytest.mark.parametrize("model", ["absent.gguf", "a/b/c/absent", "", "bad\0name", "../.."])
def test_nothing_there(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        opened(model, tmp_path)
    assert_one_sentence(caught.value)


def test_a_name_of_the_hub_gets_a_hint(tmp_path):
    with pytest.raises(ModelError, match=r"no such file or folder; to download it, write hf:org/model"):
        opened("org/model", tmp_path)


def test_hub_with_safetensors(tmp_path):
    hub = FakeHub(write_folder(tmp_path / "tiny", RandomCheckpoint(tiny_config("qwen2"))))
    heard = []
    assert opened("hf:org/tiny", tmp_path, hub, heard).config.architecture == "qwen2"
    assert len(heard) == len(hub.asked) == 1
    name, patterns = hub.asked[0]
    assert name == "org/tiny"
    assert "config.json" in patterns
    assert not any("py" in pattern or "bin" in pattern or pattern.startswith("*") for pattern in patterns)


def test_hub_with_one_gguf_file(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", RandomCheckpoint(tiny_config()))
    hub = FakeHub(tmp_path, ["README.md", "tiny.gguf"])
    assert opened("hf:org/tiny", tmp_path, hub).config.name == "tiny"
    assert hub.asked[-1] == ("org/tiny", ("tiny.gguf",))


@pytest.mark.parametrize("files", [[], ["a.gguf", "b.gguf"], ["pytorch_model.bin"]])
def test_hub_with_nothing_to_choose(files, tmp_path):
    with pytest.raises(ModelError, match=r"hf:org/tiny has no model.safetensors and \d GGUF files"):
        fetch_from_hub("org/tiny", FakeHub(tmp_path, files))


@pytest.mark.parametrize("name", ["", "tiny", "a/b/c", "../etc", "a/..", "org/na me", "org/x" + "y" * 100, "-o/x", "org/\n"])
def test_names_the_hub_is_never_asked_for(name, tmp_path):
    hub = FakeHub(tmp_path)
    with pytest.raises(ModelError, match="not a name of the form") as caught:
        fetch_from_hub(name, hub)
    assert hub.asked == []
    assert_one_sentence(caught.value)


def test_no_network(tmp_path):
    with pytest.raises(ModelError, match=r"hf:org/tiny cannot be downloaded \(no route\); without a network") as caught:
        opened("hf:org/tiny", tmp_path, Offline())
    assert_one_sentence(caught.value)


def test_the_real_hub_calls_the_client_that_is_installed(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    calls = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, allow_patterns: calls.append(allow_patterns) or "f"
    )
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name: ["a.gguf"])
    assert HuggingFaceHub().snapshot("org/name", ("config.json",)) == "f"
    assert HuggingFaceHub().files("org/name") == ["a.gguf"]
    assert calls == [["config.json"]]
