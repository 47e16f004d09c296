"""The one door for randomness: a counter-based generator keyed by (seed, position).

A draw depends on nothing but its key, so a seeded output is the same alone or in a batch, chunked or not, with or
without overlap and after a retraction. The mixer is SplitMix64's finaliser (Steele, Lea, Flood: "Fast Splittable
Pseudorandom Number Generators", OOPSLA 2014), applied twice; ``native`` kernels can repeat it bit by bit.
"""

import secrets

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """SplitMix64 finaliser: a bijection of 64-bit integers with full avalanche."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in ``[0, 1)`` with 53 random bits, a pure function of its two arguments."""
    key = mix64((seed + _GOLDEN) & _MASK)
    return (mix64(key ^ mix64(position + 1)) >> 11) * 2.0**-53


def fresh_seed() -> int:
    """A 63-bit seed from the operating system, for a request that brought none."""
    return secrets.randbits(63)
