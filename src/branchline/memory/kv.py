"""Where keys and values live: a pool of pages in one float32 array.

    data[layer, 0 = keys | 1 = values, kv_head, page, position in page, head_dim]

A page of one head is contiguous, so gathering a page table copies whole pages. Knows: bytes. Refuses to know: who
owns a page, which token it holds, whether its content is still wanted (``cache`` and ``sched`` do).
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from branchline.base.errors import ConfigError, require
from branchline.base.ids import PageId

FloatArray: TypeAlias = npt.NDArray[np.float32]
IntArray: TypeAlias = npt.NDArray[np.intp]


def bytes_per_page(*, layers: int, kv_heads: int, head_dim: int, page_size: int) -> int:
    """Bytes that one page takes in a :class:`KvPool`, over all layers."""
    return layers * 2 * kv_heads * page_size * head_dim * np.dtype(np.float32).itemsize


def no_memory(page_count: int, page_bytes: int) -> ConfigError:
    """The error of a pool that cannot be had."""
    return ConfigError(f"no memory for {page_count} KV pages ({page_count * page_bytes / 2**30:.1f} GiB)")


def require_copy(source: PageId, target: PageId, token_count: int, *, page_count: int, page_size: int) -> None:
    """Raises InvariantBroken unless a pool of so many pages can copy so many positions."""
    require(0 <= source < page_count and 0 <= target < page_count, "page copy outside the pool")
    require(0 < token_count <= page_size, f"a page copy of {token_count} positions")


class KvPool:
    """Keys and values of ``page_count`` pages of ``page_size`` positions.

    The memory is asked for at once but touched only as pages are used.

    Raises:
        ConfigError: the memory cannot be had.
    """

    def __init__(self, *, layers: int, kv_heads: int, head_dim: int, page_size: int, page_count: int) -> None:
        shape = (layers, 2, kv_heads, page_count, page_size, head_dim)
        require(min(shape) >= 1, f"a KV pool needs a positive shape, not {shape}")
        try:
            self._data: FloatArray = np.zeros(shape, np.float32)
        except (MemoryError, ValueError) as error:
            page = bytes_per_page(layers=layers, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size)
            raise no_memory(page_count, page) from error
        self._by_position = self._data.reshape(layers, 2, kv_heads, page_count * page_size, head_dim)
        self.page_size = page_size
        self.page_count = page_count

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, key heads, numbers of a head."""
        layers, _, kv_heads, _, _, head_dim = self._data.shape
        return layers, kv_heads, head_dim

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    @property
    def data(self) -> FloatArray:
        """The whole pool as drawn above, for kernels that read and write it in place."""
        return self._data

    def write(self, layer: int, places: IntArray, keys: FloatArray, values: FloatArray) -> None:
        """Store keys and values ``[tokens, kv_heads, head_dim]`` at ``places`` (``page * page_size + offset``)."""
        self._by_position[layer, 0][:, places] = keys.swapaxes(0, 1)
        self._by_position[layer, 1][:, places] = values.swapaxes(0, 1)

    def gather(self, layer: int, pages: IntArray) -> tuple[FloatArray, FloatArray]:
        """Keys and values of page tables ``[rows, n]``: two copies ``[kv_heads, rows, n * page_size, head_dim]``."""
        rows, count = pages.shape
        _, kv_heads, head_dim = self.shape
        shape = (kv_heads, rows, count * self.page_size, head_dim)
        return (
            self._data[layer, 0].take(pages, axis=1).reshape(shape),
            self._data[layer, 1].take(pages, axis=1).reshape(shape),
        )

    def copy(self, source: PageId, target: PageId, token_count: int) -> None:
        """Copy the first ``token_count`` positions of a page, in all layers."""
        require_copy(source, target, token_count, page_count=self.page_count, page_size=self.page_size)
        self._data[:, :, :, target, :token_count] = self._data[:, :, :, source, :token_count]
