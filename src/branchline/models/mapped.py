"""Maps a model file into memory. Refuses to know: formats."""

import mmap

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
