"""The frequencies of rotary position embedding (Su et al. 2021), with every long-context rule already applied.

Knows: formulas. Refuses to know: where the numbers in a ``RopeConfig`` came from, and how heads are rotated.
"""

import math

from branchline.base.errors import ModelError
from branchline.models.config import RopeConfig
from branchline.ops.graph import RopeSpec


def rope_spec(rope: RopeConfig, head_dim: int) -> RopeSpec:
    """Spell out ``rotary_dim / 2`` inverse frequencies (radians per position, computed in double precision).

    Raises:
        ModelError: the numbers contradict each other.
    """
    _check(rope, head_dim)
    plain = [rope.theta ** (-2 * i / rope.rotary_dim) for i in range(rope.rotary_dim // 2)]
    scaled = {"none": _as_is, "linear": _linear, "llama3": _llama3, "yarn": _yarn}[rope.scaling](plain, rope)
    divisors = rope.frequency_divisors or (1.0,) * len(scaled)
    return RopeSpec(
        head_dim=head_dim,
        inverse_frequencies=tuple(f / d for f, d in zip(scaled, divisors, strict=True)),
        layout=rope.layout,
        magnitude=rope.magnitude,
    )


def yarn_magnitude(factor: float) -> float:
    """Attention factor recommended by YaRN (Peng et al. 2023, section 3.4), as a factor on cos and sin."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def _as_is(plain: list[float], rope: RopeConfig) -> list[float]:
    return plain


def _linear(plain: list[float], rope: RopeConfig) -> list[float]:
    """Position interpolation (Chen et al. 2023)."""
    return [f / rope.factor for f in plain]


def _llama3(plain: list[float], rope: RopeConfig) -> list[float]:
    """Llama 3.1: long wavelengths are interpolated, short ones kept, those between blended."""
    scaled = []
    for frequency in plain:
        turns = rope.original_context * frequency / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = min(1.0, max(0.0, keep))
        scaled.append((1 - keep) * frequency / rope.factor + keep * frequency)
    return scaled


def _yarn(plain: list[float], rope: RopeConfig) -> list[float]:
    """YaRN's "NTK by parts" (Peng et al. 2023, section 3.2), bounds rounded outwards to whole dimensions."""
    low = max(0, math.floor(_dimension_of(rope.beta_fast, rope)))
    high = min(rope.rotary_dim - 1, math.ceil(_dimension_of(rope.beta_slow, rope)))
    span = max(high - low, 0.001)
    scaled = []
    for i, frequency in enumerate(plain):
        keep = 1 - min(1.0, max(0.0, (i - low) / span))
        scaled.append((1 - keep) * frequency / rope.factor + keep * frequency)
    return scaled


def _dimension_of(turns: float, rope: RopeConfig) -> float:
    """Index of the pair that turns so many times within the original context."""
    return rope.rotary_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _check(rope: RopeConfig, head_dim: int) -> None:
    if not 0 < rope.rotary_dim <= head_dim or rope.rotary_dim % 2:
        raise ModelError(f"rotary dimension {rope.rotary_dim} does not suit heads of {head_dim} numbers")
    if rope.frequency_divisors and len(rope.frequency_divisors) != rope.rotary_dim // 2:
        raise ModelError(f"{len(rope.frequency_divisors)} rope frequency divisors for {rope.rotary_dim // 2} frequencies")
