"""From the encodings of checkpoints to those that native kernels compute with, without rounding anything unless asked to.

4-bit kinds stay 4 bits, 5- and 6-bit kinds become bytes, plain numbers stay what they are; F32 that says nothing which BF16
does not say becomes that. Only plain numbers are ever rounded, for what is in groups has been rounded already.

Knows: which bits of a block are codes, scales and minima. Refuses to know: layouts of kernels, how numbers are rounded
(``models.rounding``).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from branchline.base.errors import ModelError
from branchline.models.checkpoint import Tensor
from branchline.models.mapped import let_go
from branchline.models.quants import (
    KINDS,
    Blocks,
    Floats,
    dequantize,
    fifth_bits,
    half,
    nibbles,
    six_bit_scales,
    upper_bits_k,
    upper_pairs_k,
)
from branchline.models.rounding import LARGEST, ROUNDINGS, Rounding
from branchline.ops.packed import GROUP, Groups, Numbers, PackedWeight

SLAB_VALUES = 1 << 20
"""Numbers unpacked at a time."""

Parts: TypeAlias = tuple[npt.NDArray[np.uint8], Floats, Floats | None]
"""Of ``[blocks, block_bytes]``: codes, scales and minima, flat per block."""


@dataclass(frozen=True, slots=True)
class GroupedKind:
    encoding: Literal["q4", "q8"]
    unpack: Callable[[Blocks], Parts]
    half: bool
    minima: bool
    splits: int = 1


def repack(tensor: Tensor, quantize: str | None = None) -> PackedWeight:
    """A matrix for native kernels.

    Args:
        quantize: one of :data:`ROUNDINGS`: round plain numbers to groups, if their rows are whole groups.

    Raises:
        ModelError: the tensor is no matrix; while slabs are taken: numbers to be rounded are not finite, or too large.
    """
    if len(tensor.shape) != 2:
        raise ModelError(f"tensor {tensor.name!r} of shape {tensor.shape} is no matrix")
    out, width = tensor.shape
    kind = GROUPED.get(tensor.kind)
    if quantize and can_round(tensor):
        to = ROUNDINGS[quantize]
        return PackedWeight(
            shape=(out, width), encoding=to.encoding, slabs=_rounded(tensor, to), half=True, minima=to.minima
        )  # fmt: skip
    if kind is None:
        narrow = tensor.kind == "F32" and _is_bf16(tensor)
        encoding = "bf16" if narrow else PLAIN[tensor.kind]
        return PackedWeight(shape=(out, width), encoding=encoding, slabs=_numbers(tensor, upper_halves=narrow))
    return PackedWeight(
        shape=(out, width), encoding=kind.encoding, slabs=_groups(tensor, kind),
        half=kind.half, minima=kind.minima, splits=kind.splits,
    )  # fmt: skip


def to_floats(tensor: Tensor, quantize: str | None = None) -> Floats:
    """A tensor for who computes with floats: the numbers that :func:`repack` means."""
    return repack(tensor, quantize).to_float() if quantize and can_round(tensor) else dequantize(tensor)


def can_round(tensor: Tensor) -> bool:
    """Plain numbers in whole groups."""
    return tensor.kind in PLAIN and len(tensor.shape) == 2 and tensor.shape[1] % GROUP == 0


def _numbers(tensor: Tensor, *, upper_halves: bool) -> Iterator[Numbers]:
    number = "<f4" if tensor.kind == "F32" and not upper_halves else "<u2"
    for first, part in _slabs(tensor):
        numbers = part.view(number)[1::2] if upper_halves else part.view(number)
        rows = np.ascontiguousarray(numbers).reshape(-1, tensor.shape[1])
        yield Numbers(first, rows.astype(rows.dtype.newbyteorder("="), copy=False))


def _is_bf16(tensor: Tensor) -> bool:
    """Whether the lower halves of all F32 numbers are zero: such a checkpoint was BF16 once. Others end this at once."""
    return not any(part.view("<u2")[::2].any() for _, part in _slabs(tensor))


def _rounded(tensor: Tensor, to: Rounding) -> Iterator[Groups]:
    kind = KINDS[tensor.kind]
    for first, part in _slabs(tensor):
        groups = np.empty((part.size // kind.block_bytes // GROUP, GROUP), np.float32)
        kind.decode(part.reshape(-1, kind.block_bytes), groups.reshape(-1, kind.block_values))
        if not max(groups.max(), -groups.min()) <= LARGEST:  # or not a number
            raise ModelError(f"tensor {tensor.name!r} cannot be rounded: a number in it is not finite, or above {LARGEST:g}")
        codes, scales, minima = to.round(groups)
        rows = groups.size // tensor.shape[1]
        yield Groups(
            first, codes.reshape(rows, -1), scales.reshape(rows, -1), None if minima is None else minima.reshape(rows, -1)
        )


def _groups(tensor: Tensor, kind: GroupedKind) -> Iterator[Groups]:
    for first, part in _slabs(tensor):
        codes, scales, minima = kind.unpack(part.reshape(-1, KINDS[tensor.kind].block_bytes))
        rows = codes.size // tensor.shape[1]
        yield Groups(
            first,
            np.ascontiguousarray(codes).reshape(rows, -1),
            np.ascontiguousarray(scales, np.float32).reshape(rows, -1),
            None if minima is None else np.ascontiguousarray(minima, np.float32).reshape(rows, -1),
        )


def _slabs(tensor: Tensor) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """First row and bytes of a few whole rows. Of a mapped file no more than these bytes stay in memory."""
    out, width = tensor.shape
    row_bytes = KINDS[tensor.kind].byte_count((width,))
    rows = max(1, SLAB_VALUES // width)
    for first in range(0, out, rows):
        end = min(first + rows, out) * row_bytes
        yield first, tensor.data[first * row_bytes : end]
        let_go(tensor.data[:end])  # from the beginning on: touching a slab maps some of what is before it as well


# ---------------------------------------------------------------- blocks, see `models.quants` for their layouts


def _q4_0(blocks: Blocks) -> Parts:
    scale = half(blocks, 0)
    return nibbles(blocks[:, 2:], 16), scale, scale * np.float32(-8)


def _q4_1(blocks: Blocks) -> Parts:
    return nibbles(blocks[:, 4:], 16), half(blocks, 0), half(blocks, 2)


def _q4_k(blocks: Blocks) -> Parts:
    return (nibbles(blocks[:, 16:], 32), *_scales_k(blocks))


def _q5_0(blocks: Blocks) -> Parts:
    codes = nibbles(blocks[:, 6:], 16) | fifth_bits(blocks[:, 2:6])
    codes -= np.uint8(16)
    return codes, half(blocks, 0), None


def _q5_1(blocks: Blocks) -> Parts:
    return nibbles(blocks[:, 8:], 16) | fifth_bits(blocks[:, 4:8]), half(blocks, 0), half(blocks, 2)


def _q5_k(blocks: Blocks) -> Parts:
    return (nibbles(blocks[:, 48:], 32) | upper_bits_k(blocks[:, 16:48]), *_scales_k(blocks))


def _q6_k(blocks: Blocks) -> Parts:
    codes = nibbles(blocks[:, :128], 64) | upper_pairs_k(blocks[:, 128:192])
    codes -= np.uint8(32)
    return codes, half(blocks, 208) * blocks[:, 192:208].view(np.int8), None


def _q8_0(blocks: Blocks) -> Parts:
    return blocks[:, 2:], half(blocks, 0), None


def _scales_k(blocks: Blocks) -> tuple[Floats, Floats]:
    scales, minima = six_bit_scales(blocks[:, 4:16])
    return half(blocks, 0) * scales, -(half(blocks, 2) * minima)


PLAIN: Mapping[str, Literal["f32", "f16", "bf16"]] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
GROUPED: Mapping[str, GroupedKind] = {
    "Q4_0": GroupedKind("q4", _q4_0, half=True, minima=True),
    "Q4_1": GroupedKind("q4", _q4_1, half=True, minima=True),
    "Q4_K": GroupedKind("q4", _q4_k, half=False, minima=True),
    "Q5_0": GroupedKind("q8", _q5_0, half=True, minima=False),
    "Q5_1": GroupedKind("q8", _q5_1, half=True, minima=True),
    "Q5_K": GroupedKind("q8", _q5_k, half=False, minima=True),
    "Q6_K": GroupedKind("q8", _q6_k, half=False, minima=False, splits=2),
    "Q8_0": GroupedKind("q8", _q8_0, half=True, minima=False),
}
