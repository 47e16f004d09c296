"""Maps a model file into memory, and lets go of what has been read. Refuses to know: formats."""

import mmap

import numpy as np
import numpy.typing as npt

from branchline.base.errors import ModelError


def map_file(path: str, *, least_bytes: int, kind: str) -> mmap.mmap:
    """The whole file, read-only.

    Raises:
        ModelError: it is shorter than ``least_bytes``, the least a ``kind`` file can be; the message does not name the file.
        OSError: it cannot be opened.
    """
    with open(path, "rb") as file:
        if file.seek(0, 2) < least_bytes:
            raise ModelError(f"this is not a {kind} file: it is too short")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def let_go(data: npt.NDArray[np.uint8]) -> None:
    """Give back the memory of a part of a mapped file, which is read again if it is touched again. The kernel would take it
    back in time; but until then it counts as ours, and a model being packed would look twice its size. No other array is
    touched: of those the memory is all there is.
    """
    owner: object = data
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if isinstance(owner, mmap.mmap):
        begin = data.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
        page, end = begin // mmap.PAGESIZE * mmap.PAGESIZE, begin + data.nbytes
        owner.madvise(mmap.MADV_DONTNEED, page, end - page)
