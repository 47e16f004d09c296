"""Branchline: an LLM serving engine whose heart is a cache-aware scheduler.

`LLM` and `SamplingParams` are the whole of the offline interface; everything else is `branchline serve`.
"""

from typing import TYPE_CHECKING, Any

from branchline.base.version import __version__
from branchline.core.request import SamplingParams

if TYPE_CHECKING:
    from branchline.engine.offline import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # The engine brings numpy, the tokenizer and more: only those who want an engine pay for it.
    if name == "LLM":
        from branchline.engine.offline import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
