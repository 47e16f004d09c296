"""Qwen 3 (Yang et al. 2025), dense: Llama with a norm on each query and key head, and no bias.

Knows: which variations of the shared blocks these models require. Refuses to know: files, arrays.
"""

from branchline.base.errors import ModelError
from branchline.models.blocks import transformer
from branchline.models.config import ModelConfig
from branchline.ops.graph import Graph


def build(config: ModelConfig) -> Graph:
    if not config.qk_norm:
        raise ModelError("a qwen3 model has norms on query and key heads; this one lacks them")
    return transformer(config)
