"""From what the user typed to an open checkpoint.

Knows: which kinds of answers there are to "which model?". Refuses to know: formats and downloads themselves.
"""

import os

from branchline.base.errors import ModelError
from branchline.models.checkpoint import Checkpoint
from branchline.models.default import Progress, locate_default_model
from branchline.models.gguf import GgufCheckpoint
from branchline.models.hub import Hub, HuggingFaceHub, fetch_from_hub
from branchline.models.huggingface import HuggingFaceCheckpoint


def open_checkpoint(model: str | None, cache_dir: str, progress: Progress, hub: Hub | None = None) -> Checkpoint:
    """Open a GGUF file, a Hugging Face folder, ``hf:org/name``, or (``None``) the default model.

    ``progress`` hears a sentence before something slow begins. ``hub`` defaults to the real one.

    Raises:
        ModelError: one sentence about what is wrong and, where it helps, what to do.
    """
    if model is None:
        return GgufCheckpoint.open(locate_default_model(cache_dir, progress))
    if model.startswith("hf:"):
        progress(f"Fetching {model} from the Hugging Face hub, unless it is here already.")
        return _open_path(fetch_from_hub(model.removeprefix("hf:"), hub or HuggingFaceHub()))
    return _open_path(model)


def _open_path(path: str) -> Checkpoint:
    if os.path.isdir(path):
        return HuggingFaceCheckpoint.open(path)
    if os.path.isfile(path):
        return GgufCheckpoint.open(path)
    name = os.path.basename(path.rstrip("/")) or path
    hint = f"; to download it, write hf:{path}" if path.count("/") == 1 else ""
    raise ModelError(f"{name[:100]}: there is no such file or folder{hint}")
