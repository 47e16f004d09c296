"""A model as data: a straight line of about a dozen kinds of operators over named values.

Models build it (``models.*``), executors run it (``ops.reference``, ``native``). Values are float32 arrays of shape
``[tokens, width]`` where *tokens* are all positions of a step, row after row. Weights are named tensors of shape
``[out, in]`` (or ``[width]``); names are those of GGUF files ("blk.0.attn_q.weight").

Knows: order and shapes. Refuses to know: arrays, files, pages.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Value: TypeAlias = str
Weight: TypeAlias = str


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021), with its frequencies spelled out."""

    head_dim: int
    inverse_frequencies: tuple[float, ...]
    """``rotary_dim / 2`` numbers, any long-context scaling (linear, Llama 3, ...) already applied."""
    layout: Literal["half", "interleaved"]
    """Pairs are (i, i + rotary_dim/2), or (2i, 2i + 1)."""
    magnitude: float = 1.0
    """Factor on cos and sin (YaRN's attention factor)."""


@dataclass(frozen=True, slots=True)
class Embed:
    """``out[t] = table[token[t]]``"""

    out: Value
    table: Weight


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm over groups of ``width`` (the whole row, or each head): ``x / rms(x) * weight``."""

    out: Value
    x: Value
    weight: Weight
    width: int
    eps: float


@dataclass(frozen=True, slots=True)
class Linear:
    """``out = x @ weight.T (+ bias)``"""

    out: Value
    x: Value
    weight: Weight
    bias: Weight | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotate each head by the position of its token."""

    out: Value
    x: Value
    spec: RopeSpec


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Write k and v of the step into the pages of ``layer``, then causal attention over them (grouped queries)."""

    out: Value
    q: Value
    k: Value
    v: Value
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    """Look back at most so many positions, the own one included; ``None``: all."""


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """``out = f(gate) * up``"""

    out: Value
    gate: Value
    up: Value
    kind: Literal["silu", "gelu_tanh"] = "silu"


@dataclass(frozen=True, slots=True)
class Add:
    out: Value
    a: Value
    b: Value


@dataclass(frozen=True, slots=True)
class Logits:
    """Like Linear, for the tokens that need logits only."""

    out: Value
    x: Value
    weight: Weight


Op: TypeAlias = Embed | Norm | Linear | Rope | PagedAttention | GatedActivation | Add | Logits


@dataclass(frozen=True, slots=True)
class Graph:
    """Operators in execution order; the last one is ``Logits``."""

    ops: tuple[Op, ...]
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def kv_shape(self) -> dict[str, int]:
        """What a KV pool must know of the model, by the names of its arguments."""
        return {"layers": self.layers, "kv_heads": self.kv_heads, "head_dim": self.head_dim}

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Names of all weights the operators use, each once, in order of first use."""
        names: dict[Weight, None] = {}
        for op in self.ops:
            for field in ("table", "weight", "bias"):
                name = getattr(op, field, None)
                if name is not None:
                    names.setdefault(name)
        return tuple(names)
