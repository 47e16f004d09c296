"""A weight on its way into an executor that computes in its own encoding: numbers, or codes in groups with scales.

Nothing is rounded on the way: each encoding holds exactly what the checkpoint says.

Knows: shapes and meaning of the parts. Refuses to know: file formats (``models.repack``), layouts of kernels.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from branchline.memory.kv import FloatArray
from branchline.ops.graph import Weight

GROUP = 32
"""Inputs that share a scale."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Rows ``[first, first + n)`` of a matrix without groups."""

    first: int
    rows: FloatArray | npt.NDArray[np.uint16]
    """``[n, in]``: float32, or the bits of 16-bit floats."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows ``[first, first + n)`` of a matrix in groups of 32 inputs: ``weight = scale * code + minimum``."""

    first: int
    codes: npt.NDArray[np.uint8]
    """``[n, in]``: 0 to 15 if the encoding is ``q4``; the bits of signed bytes if it is ``q8``."""
    scales: FloatArray
    """``[n, in / 32 * splits]``"""
    minima: FloatArray | None
    """``[n, in / 32]``"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A matrix, to be taken slab by slab: nobody ever holds a second copy of all of it."""

    shape: tuple[int, int]
    """``(out, in)``"""
    encoding: Literal["f32", "f16", "bf16", "q4", "q8"]
    slabs: Iterable[Numbers | Groups]
    half: bool = False
    """Scales and minima are 16-bit floats exactly."""
    minima: bool = False
    splits: int = 1
    """Scales of a group: 2 means one for each half of it."""


MatrixSource: TypeAlias = Callable[[Weight], PackedWeight]
VectorSource: TypeAlias = Callable[[Weight], FloatArray]
