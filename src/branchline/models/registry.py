"""From an architecture's name to its graph.

Knows: which module builds which architecture. Refuses to know: files, arrays, executors.
"""

from collections.abc import Callable, Collection, Mapping

from branchline.base.errors import ModelError
from branchline.models import llama, qwen2, qwen3
from branchline.models.config import ModelConfig
from branchline.models.facts import clip
from branchline.ops.graph import Graph

BUILDERS: Mapping[str, Callable[[ModelConfig], Graph]] = {
    "llama": llama.build,
    "mistral": llama.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
}


def require_architecture(name: str) -> str:
    """Raises ModelError unless there is a builder for ``name``."""
    if name not in BUILDERS:
        raise ModelError(f"architecture {clip(name)} is not supported (supported: {', '.join(sorted(BUILDERS))})")
    return name


def build_graph(config: ModelConfig, names: Collection[str]) -> Graph:
    """The operators of a model whose checkpoint has the tensors ``names``.

    Raises:
        ModelError: unknown architecture, or the graph needs a tensor that the checkpoint lacks.
    """
    graph = BUILDERS[require_architecture(config.architecture)](config)
    missing = [name for name in graph.weights if name not in names]
    if missing:
        raise ModelError(f"{config.name}: {len(missing)} tensors are missing, the first is {missing[0]!r}")
    return graph
