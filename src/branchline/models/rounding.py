"""Rounds float weights to groups of 32: what ``quantize`` does to a matrix on its way into an executor.

    int8    weight = scale * code             -127 <= code <= 127    34 bytes a group
    int4    weight = scale * code + minimum      0 <= code <= 15     20 bytes a group

Scales and minima are 16-bit floats, a scale rounded up and a minimum down, so that codes reach every weight of their group:
none moves by more than half a scale. To the nearest code, without looking at what the model does: no calibration, no search.

Knows: numbers. Refuses to know: files, tensors, layouts of kernels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from branchline.memory.kv import FloatArray

Rounded: TypeAlias = tuple[npt.NDArray[np.uint8], FloatArray, FloatArray | None]
"""Codes ``[n, 32]``, scales ``[n]`` and minima ``[n]``."""
LARGEST = 65504.0
"""Of weights that can be rounded: the largest 16-bit float."""


@dataclass(frozen=True, slots=True)
class Rounding:
    encoding: Literal["q4", "q8"]
    """Of ``ops.packed``."""
    round: Callable[[FloatArray], Rounded]
    """Of groups ``[n, 32]`` of magnitudes up to LARGEST, which it may overwrite."""
    minima: bool


def _int8(groups: FloatArray) -> Rounded:
    scales = _half_above(np.maximum(groups.max(axis=1), -groups.min(axis=1)) / np.float32(127))
    return _codes(groups, scales).astype(np.int8).view(np.uint8), scales, None


def _int4(groups: FloatArray) -> Rounded:
    minima = -_half_above(-groups.min(axis=1))
    groups -= minima[:, None]
    scales = _half_above(groups.max(axis=1) / np.float32(15))
    return _codes(groups, scales).astype(np.uint8), scales, minima


def _codes(groups: FloatArray, scales: FloatArray) -> FloatArray:
    """``groups / scales``, rounded, in the place of ``groups``."""
    groups /= np.where(scales == 0, np.float32(1), scales)[:, None]
    return np.rint(groups, out=groups)


def _half_above(numbers: FloatArray) -> FloatArray:
    """The smallest 16-bit float that is not below each number."""
    halves = numbers.astype(np.float16)
    return np.where(halves < numbers, np.nextafter(halves, np.float16(np.inf)), halves).astype(np.float32)


ROUNDINGS: Mapping[str, Rounding] = {
    "int8": Rounding("q8", _int8, minima=False),
    "int4": Rounding("q4", _int4, minima=True),
}
"""By the names of ``base.config.QUANTIZE_NAMES``."""
