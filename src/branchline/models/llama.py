"""Llama 1 to 3 (Touvron et al. 2023) and Mistral 7B (Jiang et al. 2023): the plain pre-norm transformer.

Knows: which variations of the shared blocks these models allow. Refuses to know: files, arrays.
"""

from branchline.base.errors import ModelError
from branchline.models.blocks import transformer
from branchline.models.config import ModelConfig
from branchline.ops.graph import Graph


def build(config: ModelConfig) -> Graph:
    """Some descendants add a bias to q, k and v; none has norms of single heads."""
    if config.qk_norm:
        raise ModelError(f"a {config.architecture} model with norms of single heads is not supported")
    return transformer(config)
