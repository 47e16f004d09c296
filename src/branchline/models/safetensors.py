"""The safetensors container: a JSON table of tensors and their bytes, memory-mapped.

    header length u64 | header: {name: {dtype, shape, data_offsets: [begin, end)}, "__metadata__": ...} | data

Knows: the layout, as described in the safetensors README. Refuses to know: what any tensor means.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from branchline.base.errors import ModelError
from branchline.models.checkpoint import Tensor
from branchline.models.facts import clip
from branchline.models.mapped import map_file
from branchline.models.quants import KINDS

MAX_HEADER_BYTES = 100_000_000
"""The limit of the format's own reader."""

_KINDS = ("F32", "F16", "BF16")


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    tensors: Mapping[str, Tensor]
    header: bytes


def read_safetensors(path: str) -> SafetensorsFile:
    """Parse the header and map the data.

    Raises:
        ModelError: the file is not a sound safetensors file; the message does not name the file.
        OSError: it cannot be opened.
    """
    data = map_file(path, least_bytes=10, kind="safetensors")
    size = len(data)
    length = struct.unpack_from("<Q", data)[0]
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise ModelError(f"the file is truncated or damaged: its header should be {length} bytes long")
    header = data[8 : 8 + length]
    return SafetensorsFile(_map(data, _table(header), 8 + length), header)


def _table(header: bytes) -> dict[str, _Entry]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        return {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items() if name != "__metadata__"}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ModelError("the file is truncated or damaged: its header is not a table of tensors") from None


def _map(data: mmap.mmap, table: Mapping[str, _Entry], start: int) -> dict[str, Tensor]:
    """Check that every tensor lies inside the file, has the bytes its shape needs, and touches no other one."""
    everything = np.frombuffer(data, np.uint8)
    tensors: dict[str, Tensor] = {}
    end = start
    for name, entry in sorted(table.items(), key=lambda item: item[1].data_offsets):
        shape = _shape(name, entry)
        begin, previous_end = start + entry.data_offsets[0], end
        end = start + entry.data_offsets[1]
        if begin < previous_end or end < begin:
            raise ModelError(f"tensor {clip(name)} overlaps the header or another tensor")
        if end > len(data):
            raise ModelError(
                f"the file is truncated or damaged: tensor {clip(name)} ends at byte {clip(end)} of {len(data)}"
            )
        if KINDS[entry.dtype].byte_count(shape) != end - begin:
            raise ModelError(f"tensor {clip(name)} of shape {clip(shape)} cannot have {clip(end - begin)} bytes")
        tensors[name] = Tensor(name, shape, entry.dtype, everything[begin:end])
    return tensors


def _shape(name: str, entry: _Entry) -> tuple[int, ...]:
    if entry.dtype not in _KINDS:
        raise ModelError(
            f"tensor {clip(name)} is of type {clip(entry.dtype)}, which is not supported ({', '.join(_KINDS)} are)"
        )
    if not 1 <= len(entry.shape) <= 4 or not all(1 <= extent < 1 << 40 for extent in entry.shape):
        raise ModelError(f"tensor {clip(name)} has the impossible shape {clip(entry.shape)}")
    return tuple(entry.shape)
