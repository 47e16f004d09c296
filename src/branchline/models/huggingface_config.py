"""What the keys of a Hugging Face ``config.json`` mean, for the architectures in the registry.

Defaults are those of the configuration classes in transformers (4 and 5 spell rope settings differently).

Knows: keys and defaults. Refuses to know: files.
"""

from typing import Literal

from branchline.base.errors import ModelError
from branchline.models.config import ModelConfig, RopeConfig
from branchline.models.facts import Facts, clip
from branchline.models.registry import require_architecture
from branchline.models.rope import yarn_magnitude


def model_config(facts: Facts, name: str) -> ModelConfig:
    """Raises ModelError if a key is missing, out of range or asks for something this engine cannot do."""
    architecture = require_architecture(facts.text("model_type"))
    _refuse_the_unsupported(facts)
    hidden, heads = facts.integer("hidden_size"), facts.integer("num_attention_heads")
    head_dim = facts.integer("head_dim", 128 if architecture == "qwen3" else hidden // max(heads, 1))
    layers = facts.integer("num_hidden_layers")
    context_length = facts.integer("max_position_embeddings")
    epsilon = facts.number("rms_norm_eps", 1e-6)
    if not 0 < epsilon < 1:
        raise ModelError(f"rms_norm_eps is {epsilon}, which is not between 0 and 1")
    return ModelConfig(
        architecture=architecture,
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=facts.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        ffn=facts.integer("intermediate_size"),
        vocab_size=facts.integer("vocab_size"),
        context_length=context_length,
        norm_eps=epsilon,
        rope=_rope(facts, head_dim, context_length),
        tied_embeddings=facts.flag("tie_word_embeddings", False),
        qkv_bias=architecture == "qwen2" or facts.flag("attention_bias", False),
        qk_norm=architecture == "qwen3",
        sliding_window=_sliding_window(facts, architecture, layers, context_length),
    )


def _refuse_the_unsupported(facts: Facts) -> None:
    if "quantization_config" in facts:
        raise ModelError("quantized safetensors are not supported; use the original weights or a GGUF file")
    activation = facts.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"activation {clip(activation)} is not supported (silu is)")
    if facts.number("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("a partial rotary factor is not supported")


# ---------------------------------------------------------------- rope


def _rope(facts: Facts, head_dim: int, context_length: int) -> RopeConfig:
    own = facts.section("rope_parameters" if "rope_parameters" in facts else "rope_scaling")
    if own.number("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("a partial rotary factor is not supported")
    if "full_attention" in own or "sliding_attention" in own:
        raise ModelError("rope settings that differ between layers are not supported")
    theta = own.number("rope_theta", facts.number("rope_theta", 10_000.0))
    scaling = _scaling(own)
    if scaling == "none":
        return RopeConfig(theta=theta, rotary_dim=head_dim)
    factor = own.number("factor")
    return RopeConfig(
        theta=theta,
        rotary_dim=head_dim,
        scaling=scaling,
        factor=factor,
        low_freq_factor=own.number("low_freq_factor") if scaling == "llama3" else 1.0,
        high_freq_factor=own.number("high_freq_factor") if scaling == "llama3" else 4.0,
        original_context=_original_context(facts, own, context_length),
        magnitude=_magnitude(own, factor) if scaling == "yarn" else 1.0,
        beta_fast=own.number("beta_fast", 0) or 32.0,
        beta_slow=own.number("beta_slow", 0) or 1.0,
    )


def _scaling(own: Facts) -> Literal["none", "linear", "llama3", "yarn"]:
    match own.text("rope_type", own.text("type", "default")):
        case "default":
            return "none"
        case "linear" | "llama3" as kind:
            return kind
        case "yarn" if own.flag("truncate", True):
            return "yarn"
        case other:
            raise ModelError(f"rope scaling {clip(other)} is not supported (default, linear, llama3 and yarn are)")


def _original_context(facts: Facts, own: Facts, context_length: int) -> int:
    key = "original_max_position_embeddings"
    return facts.integer(key, own.integer(key, context_length))


def _magnitude(own: Facts, factor: float) -> float:
    """YaRN's attention factor: given, or recommended by the paper, or DeepSeek's ratio of two of them."""
    if "attention_factor" in own:
        return own.number("attention_factor")
    scale, scale_all = own.number("mscale", 0), own.number("mscale_all_dim", 0)
    if scale and scale_all:
        return (1 + scale * (yarn_magnitude(factor) - 1)) / (1 + scale_all * (yarn_magnitude(factor) - 1))
    return yarn_magnitude(factor)


# ---------------------------------------------------------------- sliding window


def _sliding_window(facts: Facts, architecture: str, layers: int, context_length: int) -> int | None:
    """One window for all layers or none at all: a model that mixes both is refused."""
    if architecture == "llama" or (architecture.startswith("qwen") and not facts.flag("use_sliding_window", False)):
        return None
    window = facts.integer("sliding_window", 0)
    if not 0 < window < context_length:
        return None
    full = _full_attention_layers(facts, architecture, layers)
    if 0 < full < layers:
        raise ModelError("a sliding window in some layers only is not supported")
    return window if full == 0 else None


def _full_attention_layers(facts: Facts, architecture: str, layers: int) -> int:
    kinds = facts.items("layer_types")
    if kinds:
        return sum(kind == "full_attention" for kind in kinds)
    return min(facts.integer("max_window_layers", 28), layers) if architecture.startswith("qwen") else 0
