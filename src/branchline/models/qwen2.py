"""Qwen 2 and 2.5 (Yang et al. 2024): Llama with a bias on q, k and v.

Knows: which variations of the shared blocks these models require. Refuses to know: files, arrays.
"""

from branchline.base.errors import ModelError
from branchline.models.blocks import transformer
from branchline.models.config import ModelConfig
from branchline.ops.graph import Graph


def build(config: ModelConfig) -> Graph:
    if not config.qkv_bias or config.qk_norm:
        raise ModelError("a qwen2 model has a bias on q, k and v and no norms of single heads; this one differs")
    return transformer(config)
