"""Models by name from the Hugging Face hub, through its own client and into its own cache.

Knows: which files of a repository are worth downloading. Refuses to know: what is in them.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from branchline.base.errors import ModelError
from branchline.models.facts import clip

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_TEXTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors")

Result = TypeVar("Result")


class Hub(Protocol):
    def snapshot(self, name: str, patterns: Sequence[str]) -> str:
        """Download the files of a repository that match; returns their folder."""

    def files(self, name: str) -> list[str]:
        """Names of all files of a repository."""


class HuggingFaceHub:
    """The hub's own client, imported late: it takes half a second. It answers from its cache without a network."""

    def snapshot(self, name: str, patterns: Sequence[str]) -> str:
        import huggingface_hub

        return str(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))

    def files(self, name: str) -> list[str]:
        import huggingface_hub

        return list(huggingface_hub.list_repo_files(name))


def fetch_from_hub(name: str, hub: Hub) -> str:
    """Folder of safetensors, or path of a GGUF file if the repository has exactly one.

    Raises:
        ModelError: not a name, no such repository, no network, or nothing in it that can be served.
    """
    if not _NAME.fullmatch(name):
        raise ModelError(f"hf:{clip(name)[1:-1]} is not a name of the form hf:org/name")
    folder = _ask(name, lambda: hub.snapshot(name, (*_TEXTS, *_WEIGHTS)))
    if any(Path(folder).glob("*.safetensors")):
        return folder
    files = [file for file in _ask(name, lambda: hub.files(name)) if file.endswith(".gguf")]
    if len(files) != 1:
        raise ModelError(f"hf:{name} has no model.safetensors and {len(files)} GGUF files: download one and name its path")
    return os.path.join(_ask(name, lambda: hub.snapshot(name, files)), files[0])


def _ask(name: str, question: Callable[[], Result]) -> Result:
    """The client raises errors of several libraries and generations; all of them mean that there is no model."""
    try:
        return question()
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ModelError(
            f"hf:{name} cannot be downloaded ({reason}); without a network, name a folder or a GGUF file on this machine"
        ) from error
