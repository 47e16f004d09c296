"""What a checkpoint says about its model, in one vocabulary for GGUF and Hugging Face.

Knows: numbers with bounds. Refuses to know: file formats (``gguf``, ``safetensors``) and operators (``llama``, ...).
"""

from dataclasses import dataclass
from typing import Literal

from branchline.base.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    theta: float = 10_000.0
    rotary_dim: int
    layout: Literal["half", "interleaved"] = "half"
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    """llama3 only."""
    high_freq_factor: float = 4.0
    """llama3 only."""
    original_context: int = 0
    """llama3 and yarn."""
    frequency_divisors: tuple[float, ...] = ()
    """GGUF's ``rope_freqs.weight``: each inverse frequency is divided by its number (Llama 3 scaling, precomputed)."""
    magnitude: float = 1.0
    """Factor on cos and sin; yarn only."""
    beta_fast: float = 32.0
    """yarn only."""
    beta_slow: float = 1.0
    """yarn only."""

    def __post_init__(self) -> None:
        if not 1.0 < self.theta < 1e15 or not 1 <= self.factor < 1e6:
            raise ModelError(
                f"the model says rope theta = {self.theta!r} and factor = {self.factor!r}, which is out of range"
            )
        if self.scaling == "llama3" and not (0 < self.low_freq_factor < self.high_freq_factor < 1e6):
            raise ModelError("the model's llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor")
        if self.scaling == "yarn" and not (0 < self.beta_slow < self.beta_fast < 1e6 and 0 < self.magnitude < 1e3):
            raise ModelError("the model's yarn rope scaling needs 0 < beta_slow < beta_fast and a positive attention factor")
        if self.scaling in ("llama3", "yarn") and not 1 <= self.original_context <= 1 << 24:
            raise ModelError(f"the model's {self.scaling} rope scaling needs the original context length")
        if not all(0 < divisor < 1e9 for divisor in self.frequency_divisors):
            raise ModelError("the model's rope frequency divisors are out of range")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str
    """A key of ``models.registry.BUILDERS``."""
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    """The output head is the embedding table."""
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        limits = {
            "layers": 1024, "hidden": 1 << 17, "heads": 1024, "kv_heads": 1024, "head_dim": 1024, "ffn": 1 << 19,
            "vocab_size": 1 << 21, "context_length": 1 << 24,
        }  # fmt: skip
        for field, most in limits.items():
            value = getattr(self, field)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ModelError(f"the model says {field} = {value!r}, which is not between 1 and {most}")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} query heads cannot share {self.kv_heads} key heads evenly")
