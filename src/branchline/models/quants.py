"""Encodings of weights: how many numbers share a block of how many bytes, and how to turn blocks into float32.

The formats are ggml's (``ggml-quants.h``): blocks of 32 numbers with a scale (and a minimum), and "K" super-blocks of
256 with eight or sixteen small scales. Nibbles of a group are stored low half first.

Knows: bits. Refuses to know: files and names of tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from branchline.base.errors import ModelError
from branchline.models.checkpoint import Tensor

Blocks: TypeAlias = npt.NDArray[np.uint8]
"""``[blocks, block_bytes]``"""
Floats: TypeAlias = npt.NDArray[np.float32]

SLAB_VALUES = 1 << 18
"""Numbers decoded at a time: temporaries stay small enough for the processor's cache."""


@dataclass(frozen=True, slots=True)
class Kind:
    block_values: int
    block_bytes: int
    decode: Callable[[Blocks, Floats], None]
    """Write the numbers of ``[n, block_bytes]`` into ``[n, block_values]``."""

    def byte_count(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor. Raises ModelError if a row is not a whole number of blocks."""
        if not shape or shape[-1] % self.block_values:
            raise ModelError(f"a row of shape {shape} is not a whole number of blocks of {self.block_values} numbers")
        count = 1
        for extent in shape:
            count *= extent
        return count // self.block_values * self.block_bytes


def dequantize(tensor: Tensor) -> Floats:
    """The tensor as float32, in its shape. An aligned F32 tensor comes back as a read-only view of the file."""
    kind = KINDS[tensor.kind]
    if tensor.kind == "F32" and tensor.data.ctypes.data % 4 == 0:
        return tensor.data.view(np.float32).reshape(tensor.shape)
    blocks = tensor.data.reshape(-1, kind.block_bytes)
    out = np.empty((len(blocks), kind.block_values), np.float32)
    step = max(1, SLAB_VALUES // kind.block_values)
    for start in range(0, len(blocks), step):
        kind.decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(tensor.shape)


# ---------------------------------------------------------------- plain numbers


def _f32(blocks: Blocks, out: Floats) -> None:
    out[:] = np.ascontiguousarray(blocks).view("<f4")


def _f16(blocks: Blocks, out: Floats) -> None:
    out[:] = np.ascontiguousarray(blocks).view("<f2")


def _bf16(blocks: Blocks, out: Floats) -> None:
    """The upper half of a float32."""
    out.view(np.uint32)[:] = np.ascontiguousarray(blocks).view("<u2")
    out.view(np.uint32)[:] <<= 16


# ---------------------------------------------------------------- blocks of 32


def _q4_0(blocks: Blocks, out: Floats) -> None:
    """scale f16 | 16 bytes of nibbles; ``scale * (q - 8)``"""
    _subtract(nibbles(blocks[:, 2:], 16), 8, out)
    out *= half(blocks, 0)


def _q4_1(blocks: Blocks, out: Floats) -> None:
    """scale f16 | minimum f16 | 16 bytes of nibbles; ``scale * q + minimum``"""
    np.multiply(half(blocks, 0), nibbles(blocks[:, 4:], 16), out=out)
    out += half(blocks, 2)


def _q5_0(blocks: Blocks, out: Floats) -> None:
    """scale f16 | 32 fifth bits | 16 bytes of nibbles; ``scale * (q - 16)``"""
    _subtract(nibbles(blocks[:, 6:], 16) | fifth_bits(blocks[:, 2:6]), 16, out)
    out *= half(blocks, 0)


def _q5_1(blocks: Blocks, out: Floats) -> None:
    """scale f16 | minimum f16 | 32 fifth bits | 16 bytes of nibbles; ``scale * q + minimum``"""
    np.multiply(half(blocks, 0), nibbles(blocks[:, 8:], 16) | fifth_bits(blocks[:, 4:8]), out=out)
    out += half(blocks, 2)


def _q8_0(blocks: Blocks, out: Floats) -> None:
    """scale f16 | 32 signed bytes"""
    np.multiply(half(blocks, 0), blocks[:, 2:].view(np.int8), out=out)


# ---------------------------------------------------------------- super-blocks of 256


def _q4_k(blocks: Blocks, out: Floats) -> None:
    """scale f16 | scale of minima f16 | 8 scales and 8 minima of 6 bits | 128 bytes of nibbles"""
    _scale_k(nibbles(blocks[:, 16:], 32), blocks, out)


def _q5_k(blocks: Blocks, out: Floats) -> None:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles."""
    _scale_k(nibbles(blocks[:, 48:], 32) | upper_bits_k(blocks[:, 16:48]), blocks, out)


def _q6_k(blocks: Blocks, out: Floats) -> None:
    """128 bytes of low nibbles | 64 bytes of upper bit pairs | 16 signed scales | scale f16; ``scale * (q - 32)``"""
    _subtract(nibbles(blocks[:, :128], 64) | upper_pairs_k(blocks[:, 128:192]), 32, out)
    groups = out.reshape(-1, 16, 16)
    groups *= (half(blocks, 208) * blocks[:, 192:208].view(np.int8))[:, :, None]


def _scale_k(numbers: npt.NDArray[np.uint8], blocks: Blocks, out: Floats) -> None:
    """``scale * small_scale * q - minimum * small_minimum`` for eight groups of 32."""
    scales, minima = six_bit_scales(blocks[:, 4:16])
    groups = out.reshape(-1, 8, 32)
    np.multiply((half(blocks, 0) * scales)[:, :, None], numbers.reshape(-1, 8, 32), out=groups)
    groups -= (half(blocks, 2) * minima)[:, :, None]


# ---------------------------------------------------------------- bits


def half(blocks: Blocks, offset: int) -> Floats:
    """The f16 at ``offset`` of each block, as a column."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def nibbles(packed: npt.NDArray[np.uint8], group: int) -> npt.NDArray[np.uint8]:
    """Each ``group`` bytes hold ``2 * group`` numbers: low nibbles first, then high nibbles."""
    count = len(packed)
    pairs = packed.reshape(count, -1, group)
    out = np.empty((count, pairs.shape[1], 2, group), np.uint8)
    np.bitwise_and(pairs, 15, out=out[:, :, 0])
    np.right_shift(pairs, 4, out=out[:, :, 1])
    return out.reshape(count, -1)


def fifth_bits(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Bit i of four bytes, moved to where number i wants it."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def six_bit_scales(packed: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Eight scales and eight minima out of twelve bytes: four of each plain, the others with their upper bits lent."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=1)
    minima = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=1)
    return scales, minima


def upper_bits_k(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Fifth bits of Q5_K, moved to where the numbers want them: bit g of byte i belongs to number i of group g."""
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    return ((packed[:, None, :] >> shifts & np.uint8(1)) << np.uint8(4)).reshape(-1, 256)


def upper_pairs_k(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Upper bit pairs of Q6_K, moved to where the numbers want them."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return ((packed.reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)) << np.uint8(4)).reshape(-1, 256)


def _subtract(numbers: npt.NDArray[np.uint8], offset: int, out: Floats) -> None:
    numbers -= np.uint8(offset)
    out[:] = numbers.view(np.int8)


KINDS: Mapping[str, Kind] = {
    "F32": Kind(1, 4, _f32),
    "F16": Kind(1, 2, _f16),
    "BF16": Kind(1, 2, _bf16),
    "Q4_0": Kind(32, 18, _q4_0),
    "Q4_1": Kind(32, 20, _q4_1),
    "Q5_0": Kind(32, 22, _q5_0),
    "Q5_1": Kind(32, 24, _q5_1),
    "Q8_0": Kind(32, 34, _q8_0),
    "Q4_K": Kind(256, 144, _q4_k),
    "Q5_K": Kind(256, 176, _q5_k),
    "Q6_K": Kind(256, 210, _q6_k),
}
