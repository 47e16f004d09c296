"""The GGUF container, versions 2 and 3, little endian: metadata and a table of tensors, memory-mapped.

    magic "GGUF" | version u32 | tensor count u64 | entry count u64
    entries: key, type u32, value          texts are length u64 and UTF-8 bytes, lists are type u32, count u64, items
    tensors: name, rank u32, extents u64 (innermost first), kind u32, offset u64 from the data section
    padding to ``general.alignment`` | data

Every count and length is compared with what is left of the file before anything is allocated for it.

Knows: the layout, as described in ggml's ``docs/gguf.md``. Refuses to know: what any key or tensor means.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from branchline.base.errors import ModelError
from branchline.models.checkpoint import Tensor
from branchline.models.facts import Facts, clip
from branchline.models.mapped import map_file
from branchline.models.quants import KINDS

MAX_LIST_ITEMS = 1 << 24
"""Items of all lists of a file together; a large vocabulary with its merges has less than a million."""
MAX_NESTING = 4
MAX_NAME_BYTES = 256

_KIND_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS: Mapping[int, np.dtype[Any]] = {
    0: np.dtype("u1"), 1: np.dtype("i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"), 5: np.dtype("<i4"),
    6: np.dtype("<f4"), 7: np.dtype("?"), 10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8"),
}  # fmt: skip
_TEXT, _LIST = 8, 9


@dataclass(frozen=True, slots=True)
class GgufFile:
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    header: bytes
    """Everything before the data section."""


def read_gguf(path: str) -> GgufFile:
    """Parse the header and map the data.

    Raises:
        ModelError: the file is not a sound GGUF file; the message does not name the file.
        OSError: it cannot be opened.
    """
    data = map_file(path, least_bytes=24, kind="GGUF")
    cursor = _Cursor(data)
    tensor_count, entry_count = _preamble(cursor)
    metadata = dict(_entries(cursor, entry_count))
    table = list(_table(cursor, tensor_count))
    return GgufFile(metadata, _map(data, table, _data_start(cursor, metadata)), data[: cursor.at])


# ---------------------------------------------------------------- header


class _Cursor:
    """A position in the file that never passes its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0
        self._end = len(data)
        self._list_items_left = MAX_LIST_ITEMS

    def u32(self) -> int:
        return int(_U32.unpack_from(self.data, self._advance(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self.data, self._advance(8))[0])

    def count(self, what: str, item_bytes: int) -> int:
        """A u64 that counts things of at least ``item_bytes`` each, all of which must still follow."""
        count = self.u64()
        if count * item_bytes > self._end - self.at:
            self._short(f"it announces {count} {what}")
        return count

    def text(self) -> str:
        length = self.count("bytes of text", 1)
        start = self._advance(length)
        return self.data[start : start + length].decode("utf-8", "replace")

    def scalar(self, dtype: np.dtype[Any]) -> Any:
        return np.frombuffer(self.data, dtype, 1, self._advance(dtype.itemsize)).item()

    def items(self, nesting: int) -> list[Any]:
        kind = self.u32()
        dtype = _SCALARS.get(kind)
        count = self.count("list items", dtype.itemsize if dtype else 8)
        self._list_items_left -= count
        if self._list_items_left < 0:
            raise ModelError(f"its lists have more than {MAX_LIST_ITEMS} items")
        if dtype is not None:
            return np.frombuffer(self.data, dtype, count, self._advance(count * dtype.itemsize)).tolist() if count else []
        if kind == _TEXT:
            return self._texts(count)
        if kind == _LIST and nesting < MAX_NESTING:
            return [self.items(nesting + 1) for _ in range(count)]
        raise ModelError(f"a list has items of unknown type {kind}" if kind != _LIST else "its lists are nested too deeply")

    def _texts(self, count: int) -> list[str]:
        """The hot loop of opening a file: vocabularies have 10^5 entries."""
        data, at, end, length_at = self.data, self.at, self._end, _U64.unpack_from
        texts = []
        for _ in range(count):
            start = at + 8
            if start > end or (at := start + length_at(data, at)[0]) > end:
                self._short("a text goes past its end")
            texts.append(data[start:at].decode("utf-8", "replace"))
        self.at = at
        return texts

    def _advance(self, count: int) -> int:
        start = self.at
        if count > self._end - start:
            self._short("its header goes past its end")
        self.at = start + count
        return start

    def _short(self, why: str) -> NoReturn:
        raise ModelError(f"the file is truncated or damaged: {why}")


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    """Numbers of tensors and of metadata entries."""
    if cursor.data[:4] != b"GGUF":
        raise ModelError("this is not a GGUF file: it does not begin with 'GGUF'")
    cursor.at = 4
    version = cursor.u32()
    if version & 0xFFFF == 0:
        raise ModelError("big-endian GGUF files are not supported")
    if version not in (2, 3):
        raise ModelError(f"version {version} of GGUF is not supported (2 and 3 are)")
    return cursor.count("tensors", 24), cursor.count("metadata entries", 13)


def _entries(cursor: _Cursor, count: int) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for _ in range(count):
        key = cursor.text()
        if key in seen:
            raise ModelError(f"metadata key {clip(key)} appears twice")
        seen.add(key)
        kind = cursor.u32()
        if kind == _TEXT:
            yield key, cursor.text()
        elif kind == _LIST:
            yield key, cursor.items(nesting=1)
        elif kind in _SCALARS:
            yield key, cursor.scalar(_SCALARS[kind])
        else:
            raise ModelError(f"metadata key {clip(key)} has a value of unknown type {kind}")


# ---------------------------------------------------------------- tensors


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    """Bytes from the start of the data section."""
    size: int
    """Bytes."""


def _table(cursor: _Cursor, count: int) -> Iterator[_Entry]:
    for _ in range(count):
        name = cursor.text()
        if not 0 < len(name) <= MAX_NAME_BYTES:
            raise ModelError(f"a tensor has a name of {len(name)} characters")
        rank = cursor.u32()
        if not 1 <= rank <= 4:
            raise ModelError(f"tensor {clip(name)} has {rank} dimensions")
        shape = tuple(reversed([cursor.u64() for _ in range(rank)]))
        if not all(1 <= extent < 1 << 40 for extent in shape):
            raise ModelError(f"tensor {clip(name)} has the impossible shape {clip(shape)}")
        kind_id = cursor.u32()
        kind = _KIND_NAMES.get(kind_id, f"number {kind_id}")
        if kind not in KINDS:
            raise ModelError(f"tensor {clip(name)} is encoded as {kind}, which is not supported ({', '.join(KINDS)} are)")
        yield _Entry(name, shape, kind, cursor.u64(), KINDS[kind].byte_count(shape))


def _data_start(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    alignment = Facts(metadata).integer("general.alignment", 32)
    if not 1 <= alignment <= 1 << 16 or alignment & (alignment - 1):
        raise ModelError(f"general.alignment is {alignment}, which is not a power of two up to 65536")
    return -(-cursor.at // alignment) * alignment


def _map(data: mmap.mmap, table: list[_Entry], start: int) -> dict[str, Tensor]:
    """Check that every tensor lies inside the file and on no other one."""
    tensors: dict[str, Tensor] = {}
    end = start
    everything = np.frombuffer(data, np.uint8)
    for entry in sorted(table, key=lambda entry: entry.offset):
        begin = start + entry.offset
        if begin < end:
            raise ModelError(f"tensor {clip(entry.name)} overlaps another one")
        end = begin + entry.size
        if end > len(data):
            raise ModelError(
                f"the file is truncated or damaged: tensor {clip(entry.name)} ends at byte {end} of {len(data)}"
            )
        if entry.name in tensors:
            raise ModelError(f"tensor {clip(entry.name)} appears twice")
        tensors[entry.name] = Tensor(entry.name, entry.shape, entry.kind, everything[begin:end])
    return tensors
