"""A weight on its way into an executor that computes in its own encoding: numbers, or codes in groups with scales.

Knows: shapes and meaning of the parts. Refuses to know: file formats and whether something was rounded (``models.repack``),
layouts of kernels.
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

    def to_float(self) -> FloatArray:
        """``[out, in]``: the numbers that are meant, for who computes with floats. Takes the slabs."""
        out = np.empty(self.shape, np.float32)
        for slab in self.slabs:
            if isinstance(slab, Numbers):
                out[slab.first : slab.first + len(slab.rows)] = self._numbers(slab.rows)
            else:
                out[slab.first : slab.first + len(slab.codes)] = self._weights(slab)
        return out

    def _numbers(self, rows: FloatArray | npt.NDArray[np.uint16]) -> npt.NDArray[np.floating]:
        if self.encoding == "bf16":
            return (rows.astype(np.uint32) << 16).view(np.float32)
        return rows.view(np.float16) if self.encoding == "f16" else rows.view(np.float32)

    def _weights(self, slab: Groups) -> FloatArray:
        codes = (slab.codes.view(np.int8) if self.encoding == "q8" else slab.codes).astype(np.float32)
        weights = codes * np.repeat(slab.scales, GROUP // self.splits, axis=1)
        return weights if slab.minima is None else weights + np.repeat(slab.minima, GROUP, axis=1)


MatrixSource: TypeAlias = Callable[[Weight], PackedWeight]
VectorSource: TypeAlias = Callable[[Weight], FloatArray]
