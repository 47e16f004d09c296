"""A folder of files that nobody vouches for: small texts and JSON out of it, and never anything from outside.

Knows: names, links and sizes. Refuses to know: what the files mean.
"""

import os
import re
from pathlib import Path
from typing import Any

import msgspec

from branchline.base.errors import ModelError
from branchline.models.facts import Facts, blame

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class Folder:
    """Reads by plain file name. A link may lead to a file of the folder or, in a Hugging Face cache, to its blobs."""

    def __init__(self, path: str) -> None:
        self.path = Path(os.path.realpath(path))
        self.name = self.path.name
        self._roots = [self.path]
        if self.path.parent.name == "snapshots":
            self._roots.append(self.path.parent.parent / "blobs")
            self.name = self.path.parent.parent.name.split("--")[-1]

    def has(self, file_name: str) -> bool:
        return (self.path / file_name).is_file()

    def names(self, suffix: str) -> list[str]:
        return sorted(name for name in os.listdir(self.path) if name.endswith(suffix))

    def locate(self, file_name: str) -> str:
        """Path of a file. Raises ModelError if it does not exist or leads out of the folder."""
        if not _FILE_NAME.fullmatch(file_name):
            raise ModelError(f"{file_name[:60]!r} is not the name of a file of this folder")
        path = Path(os.path.realpath(self.path / file_name))
        if not any(path.is_relative_to(root) for root in self._roots):
            raise ModelError(f"{file_name} leads out of the folder")
        if not path.is_file():
            raise ModelError(f"{file_name} is missing")
        return str(path)

    def text(self, file_name: str, limit_bytes: int) -> str:
        with blame(file_name), open(self.locate(file_name), "rb") as file:
            data = file.read(limit_bytes + 1)
            if len(data) > limit_bytes:
                raise ModelError(f"it is larger than {limit_bytes} bytes")
            try:
                return data.decode("utf-8")
            except UnicodeDecodeError:
                raise ModelError("it is not a UTF-8 text") from None

    def facts(self, file_name: str, limit_bytes: int = 1 << 20) -> Facts:
        """A JSON object. Raises ModelError if the file is missing, larger than the limit or anything else."""
        text = self.text(file_name, limit_bytes)
        try:
            return Facts(msgspec.json.decode(text, type=dict[str, Any]))
        except (msgspec.MsgspecError, RecursionError):
            raise ModelError(f"{file_name}: it is not a JSON object") from None

    def optional_facts(self, file_name: str, limit_bytes: int = 1 << 20) -> Facts:
        """The same, empty if there is no such file."""
        return self.facts(file_name, limit_bytes) if self.has(file_name) else Facts({})
