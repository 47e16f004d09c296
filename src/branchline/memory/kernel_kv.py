"""Where native kernels keep keys and values: a pool of pages in the layout and number format that they read.

    data[layer, page, kv_head, 0 = keys | 1 = values, numbers of a page]
    scales[layer, page, kv_head, 0 | 1, position]: of int8, whose numbers are codes

What a page holds of a layer is one piece of memory, which processors read faster than many small ones. A head is padded to
whole vectors of sixteen numbers, a page to an even number of positions. Kernels read and write; what is done here is
bookkeeping of bytes.

Knows: bytes. Refuses to know: who owns a page (``cache`` and ``sched`` do), how a number is rounded and where in its page it
lies (``native/kernels.h`` does).
"""

import ctypes
import math
import mmap
from collections.abc import Mapping
from threading import Thread

import numpy as np
import numpy.typing as npt

from branchline.base.errors import require
from branchline.base.ids import PageId
from branchline.memory.kv import FloatArray, no_memory, require_copy

NUMBERS: Mapping[str, npt.DTypeLike] = {"f32": np.float32, "bf16": np.uint16, "int8": np.int8}
"""What holds a number of each format: bf16 as its bits."""
LANES = 16
ALIGNMENT = 64
"""Bytes: a vector that lies across two cache lines takes two loads."""
AHEAD = 4096
"""Positions behind those in use that have memory already."""
POPULATE_WRITE = 23
"""Advice of Linux 5.14: give memory to a range as if it had been written to. Elsewhere it is refused; nothing is lost."""


def bytes_per_page(*, layers: int, kv_heads: int, head_dim: int, page_size: int, kv_dtype: str) -> int:
    """Bytes that one page takes in a :class:`KernelKvPool`, over all layers."""
    scale = np.dtype(np.float32).itemsize if kv_dtype == "int8" else 0
    numbers = _whole(head_dim, LANES) * _whole(page_size, 2)
    return layers * 2 * kv_heads * (numbers * np.dtype(NUMBERS[kv_dtype]).itemsize + page_size * scale)


class KernelKvPool:
    """Keys and values of ``page_count`` pages of ``page_size`` positions, as ``kv_dtype`` (a name of NUMBERS).

    The address space is asked for at once. Memory comes as pages are used, a little ahead of them and beside the steps: a
    system that clears memory in the middle of a step makes everyone wait.

    Raises:
        ConfigError: the memory cannot be had.
    """

    def __init__(self, *, layers: int, kv_heads: int, head_dim: int, page_size: int, page_count: int, kv_dtype: str) -> None:
        require(min(layers, kv_heads, head_dim, page_size, page_count) >= 1, "a KV pool needs a positive shape")
        heads = (layers, page_count, kv_heads, 2)
        try:
            self._data = _aligned_zeros((*heads, _whole(head_dim, LANES) * _whole(page_size, 2)), NUMBERS[kv_dtype])
            self._scales: FloatArray = np.zeros((*heads, page_size) if kv_dtype == "int8" else (0,), np.float32)
        except (MemoryError, ValueError) as error:
            page = bytes_per_page(
                layers=layers, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, kv_dtype=kv_dtype
            )
            raise no_memory(page_count, page) from error
        self.shape = (layers, kv_heads, head_dim)
        """Layers, key heads, numbers of a head."""
        self.page_size = page_size
        self.page_count = page_count
        self.kv_dtype = kv_dtype
        self._ahead = -(-AHEAD // page_size)
        self._ready = min(self._ahead, page_count)
        self._populate(0, self._ready)

    @property
    def nbytes(self) -> int:
        return self._data.nbytes + self._scales.nbytes

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """All pages as bytes, for kernels that read and write them in place."""
        return self._data.reshape(-1).view(np.uint8)

    @property
    def scales(self) -> FloatArray:
        """All scales, flat; empty unless the numbers are int8."""
        return self._scales.reshape(-1)

    def expect(self, page: PageId) -> None:
        """Pages up to this one are about to be used; low numbers are used first. Called by one thread."""
        if self._ready < self.page_count and page + self._ahead // 2 >= self._ready:
            first, self._ready = self._ready, min(page + self._ahead, self.page_count)
            Thread(target=self._populate, args=(first, self._ready), name="branchline-memory", daemon=True).start()

    def _populate(self, first: int, last: int) -> None:
        """Without the interpreter's lock."""
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for layer in self._data:
            pages = layer[first:last]
            begin = -(-pages.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
            advise(begin, max(0, pages.ctypes.data + pages.nbytes - begin), POPULATE_WRITE)

    def copy(self, source: PageId, target: PageId, token_count: int) -> None:
        """Copy the first ``token_count`` positions of a page, in all layers; what lies behind them may change as well."""
        require_copy(source, target, token_count, page_count=self.page_count, page_size=self.page_size)
        self._data[:, target] = self._data[:, source]
        if self._scales.size:
            self._scales[:, target] = self._scales[:, source]


def _whole(count: int, of: int) -> int:
    return -(-count // of) * of


def _aligned_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """Zeros from an address that is a multiple of ALIGNMENT."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
