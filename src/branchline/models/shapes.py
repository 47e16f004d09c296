"""Which weights a configuration implies, and of which shape.

Knows: canonical (GGUF) names. Refuses to know: file formats and values.
"""

from collections.abc import Mapping

from branchline.base.errors import ModelError
from branchline.models.config import ModelConfig
from branchline.models.facts import clip

Shape = tuple[int, ...]


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape (``(out, in)`` or ``(width,)``) of every weight of the model."""
    shapes: dict[str, Shape] = {"token_embd.weight": (config.vocab_size, config.hidden)}
    for layer in range(config.layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes["output_norm.weight"] = (config.hidden,)
    if not config.tied_embeddings:
        shapes["output.weight"] = (config.vocab_size, config.hidden)
    return shapes


def check_shapes(config: ModelConfig, found: Mapping[str, Shape]) -> None:
    """Compare what a file has with what its configuration implies.

    Raises:
        ModelError: a weight is missing, has another shape, or is one that this engine would silently ignore.
    """
    expected = weight_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(f"{len(missing)} of {len(expected)} tensors are missing, the first is {missing[0]!r}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(f"tensor {name!r} has shape {found[name]} where the configuration implies {shape}")
    extra = sorted(found.keys() - expected.keys() - {"rope_freqs.weight", "output.weight"})
    if extra:
        raise ModelError(f"{len(extra)} tensors are not part of a {config.architecture} model, for example {clip(extra[0])}")


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "attn_norm.weight": (config.hidden,),
        "attn_q.weight": (q, config.hidden),
        "attn_k.weight": (kv, config.hidden),
        "attn_v.weight": (kv, config.hidden),
        "attn_output.weight": (config.hidden, q),
        "ffn_norm.weight": (config.hidden,),
        "ffn_gate.weight": (config.ffn, config.hidden),
        "ffn_up.weight": (config.ffn, config.hidden),
        "ffn_down.weight": (config.hidden, config.ffn),
    }
    if config.qkv_bias:
        shapes |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if config.qk_norm:
        shapes |= {"attn_q_norm.weight": (config.head_dim,), "attn_k_norm.weight": (config.head_dim,)}
    return shapes
