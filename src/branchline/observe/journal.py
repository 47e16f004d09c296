"""The journal on disk: numbered files of checked frames that survive a crash, a full disk and the loss of their end.

    DIR/0003-000001.journal      run 3, part 1; a run is one life of an engine

        MAGIC  frame  frame  frame ...
               │ length u32 │ crc u32 │ a piece of one deflate stream per part │        first frame: the Header

A frame is written by one system call, so a process that is killed leaves at most a torn frame at the end; what was written
before survives it. (Nothing is forced to the disk: a power failure may cost what the kernel still held.)

Once it is open a journal never raises: when it cannot be written it ends, says so once, and counts what is lost from then
on.

Knows: files, frames, parts, loss. Refuses to know: what the frames mean (`sim.record`).
"""

import contextlib
import errno
import logging
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from branchline.base.config import EngineConfig
from branchline.base.errors import ConfigError
from branchline.base.version import __version__
from branchline.wire.messages import ModelFacts

log = logging.getLogger(__name__)

MAGIC = b"branchline-journal-1\n"
PART_BYTES = 64 << 20
"""A part that has grown so large is followed by the next one."""
PARTS_KEPT = 4
"""A limited directory is made of at least so many parts, so that the oldest can be dropped without losing nearly all."""
MAX_FRAME_BYTES = 64 << 20
_FRAME = struct.Struct("<II")
_NAME = re.compile(r"(\d{4,})-(\d{6,})\.journal")


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame of every part: what is needed to build the same engine again."""

    version: str = __version__
    run: int = 0
    part: int = 0
    began_unix_s: float = 0.0
    """When this part was begun, for people."""
    tokens: Literal["hashed", "text"]
    config: EngineConfig
    """As derived: nothing is left open."""
    facts: ModelFacts


class Sink(Protocol):
    """What a journal needs of a file. Raises OSError."""

    def write(self, data: bytes, /) -> int | None: ...

    def close(self) -> None: ...


def open_sink(path: Path) -> Sink:
    """A new file that only its owner may read, unbuffered."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    return os.fdopen(descriptor, "wb", buffering=0)


class Journal:
    """Writes a new run into a directory. One thread writes; any thread may read the counters."""

    def __init__(
        self,
        directory: Path,
        header: Header,
        *,
        part_bytes: int = PART_BYTES,
        max_bytes: int | None = None,
        open_sink: Callable[[Path], Sink] = open_sink,
    ) -> None:
        """``max_bytes``: the oldest parts of the directory are deleted when all together are larger.

        Raises:
            ConfigError: the directory cannot be made or written, or others than its owner may look into it.
        """
        self._directory = directory
        self._header = header
        self._max_bytes = max_bytes
        self._part_bytes = part_bytes if max_bytes is None else min(part_bytes, max_bytes // PARTS_KEPT)
        self._open_sink = open_sink
        self.bytes_written = 0
        self.lost_records = 0
        """Records that came after the journal had ended."""
        self._part_written = 0
        try:
            _make_private(directory)
            self._sink: Sink | None = self._begin_run()
        except OSError as error:
            raise ConfigError(f"the journal directory {directory} cannot be used: {error.strerror}") from None

    @property
    def is_open(self) -> bool:
        return self._sink is not None

    @property
    def is_part_full(self) -> bool:
        return self._part_written >= self._part_bytes

    def append(self, frame: bytes, record_count: int) -> None:
        """Write a frame that stands for ``record_count`` records; they are lost and counted if that is impossible."""
        if self._sink is None:
            self.lost_records += record_count
            return
        try:
            self._write_frame(self._sink, frame)
        except OSError as error:
            self.lost_records += record_count
            self.give_up(error.strerror or str(error))

    def next_part(self) -> None:
        """Go on in a new file, which begins with the header."""
        if self._sink is None:
            return
        try:
            self._sink.close()
            self._sink = self._begin_part(msgspec.structs.replace(self._header, part=self._header.part + 1))
        except OSError as error:
            self.give_up(error.strerror or str(error))
            return
        self._drop_oldest()

    def give_up(self, reason: str) -> None:
        """End for good, in one line of the log."""
        log.error("the journal in %s ends here, serving goes on: %s", self._directory, reason)
        self.close()

    def close(self) -> None:
        """Idempotent."""
        sink, self._sink = self._sink, None
        if sink is not None:
            with contextlib.suppress(OSError):
                sink.close()

    # ------------------------------------------------------------ inner

    def _begin_run(self) -> Sink:
        """Another engine may be starting in the same directory: whoever makes the file first has the number."""
        run = max(list_runs(self._directory), default=0) + 1
        while True:
            try:
                return self._begin_part(msgspec.structs.replace(self._header, run=run, part=1))
            except FileExistsError:
                run += 1

    def _begin_part(self, header: Header) -> Sink:
        # Wall-clock time is for people who look for an incident; nothing is ever computed from it.
        self._header = msgspec.structs.replace(header, began_unix_s=round(time.time(), 3))
        sink = self._open_sink(self._directory / f"{header.run:04d}-{header.part:06d}.journal")
        self._deflate = zlib.compressobj(1)
        self._part_written = 0
        try:
            self._write(sink, MAGIC)
            self._write_frame(sink, msgspec.msgpack.encode(self._header))
        except OSError:
            sink.close()
            raise
        return sink

    def _write_frame(self, sink: Sink, frame: bytes) -> None:
        piece = self._deflate.compress(frame) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        self._write(sink, _FRAME.pack(len(piece), zlib.crc32(piece)) + piece)

    def _write(self, sink: Sink, data: bytes) -> None:
        if sink.write(data) != len(data):  # the disk took only a part: the rest would not fit either
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._part_written += len(data)
        self.bytes_written += len(data)

    def _drop_oldest(self) -> None:
        if self._max_bytes is None:
            return
        with contextlib.suppress(OSError):  # somebody else tidies up here
            parts = [part for parts in list_runs(self._directory).values() for part in parts]
            total = sum(part.path.stat().st_size for part in parts)
            for part in parts[:-1]:
                if total <= self._max_bytes:
                    return
                total -= part.path.stat().st_size
                part.path.unlink()


@dataclass(frozen=True, slots=True)
class Part:
    run: int
    number: int
    path: Path


def list_runs(directory: Path) -> dict[int, list[Part]]:
    """Parts by run, both in ascending order. Raises OSError: the directory cannot be read."""
    found = [(_NAME.fullmatch(entry.name), entry) for entry in directory.iterdir()]
    parts = [Part(int(match[1]), int(match[2]), entry) for match, entry in found if match]
    runs: dict[int, list[Part]] = {}
    for part in sorted(parts, key=lambda part: (part.run, part.number)):
        runs.setdefault(part.run, []).append(part)
    return runs


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"the journal directory {directory} is open to others (mode {mode:o}): chmod 700 it, or name a new one"
        )


# ---------------------------------------------------------------- reading


class JournalReader:
    """Reads one run, in order. After :meth:`frames` has ended ``lost_bytes`` tells whether that was the end of the files."""

    def __init__(self, directory: Path, run: int | None = None) -> None:
        """``run``: the latest if not given.

        Raises:
            ConfigError: there is no such run, or no header can be read.
        """
        try:
            runs = list_runs(directory)
        except OSError as error:
            raise ConfigError(f"the journal directory {directory} cannot be read: {error.strerror}") from None
        if not runs or (run is not None and run not in runs):
            known = f"; there are {', '.join(map(str, runs))}" if runs else ""
            raise ConfigError(f"there is no journal{'' if run is None else f' of run {run}'} in {directory}{known}")
        self._parts = runs[run or max(runs)]
        self.lost_bytes = 0
        """Bytes that could not be read: a torn end, damage and all that follows it."""
        first = next(_read_part(self._parts[0].path), None)
        if first is None:
            raise ConfigError(f"{self._parts[0].path} is no journal, or not even its header was written")
        self.header = _decode_header(first[0], self._parts[0].path)

    @property
    def is_whole(self) -> bool:
        """False if the beginning of the run was deleted."""
        return self._parts[0].number == 1

    @property
    def part_count(self) -> int:
        return len(self._parts)

    @property
    def size_bytes(self) -> int:
        return sum(part.path.stat().st_size for part in self._parts)

    def frames(self) -> Iterator[bytes]:
        """What was appended, frame by frame, headers left out. Ends at the first damage: what follows hangs in the air."""
        self.lost_bytes, intact = 0, True
        for place, part in enumerate(self._parts):
            intact = intact and part.number == self._parts[0].number + place
            end, frames = 0, _read_part(part.path) if intact else iter(())
            for number, (frame, end) in enumerate(frames):  # noqa: B007 - `end` is used after the loop
                if number:
                    yield frame
            lost = part.path.stat().st_size - end
            self.lost_bytes += lost
            intact = not lost


def _read_part(path: Path) -> Iterator[tuple[bytes, int]]:
    """Frames, each with the offset of its end; stops at the first that is not whole."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    inflate, at = zlib.decompressobj(), len(MAGIC)
    if data[:at] != MAGIC:
        return
    while at + _FRAME.size <= len(data):
        length, crc = _FRAME.unpack_from(data, at)
        piece = data[at + _FRAME.size : at + _FRAME.size + length]
        if len(piece) < length or zlib.crc32(piece) != crc:
            return
        try:
            frame = inflate.decompress(piece, MAX_FRAME_BYTES)
        except zlib.error:
            return
        if inflate.unconsumed_tail:
            return
        at += _FRAME.size + length
        yield frame, at


def _decode_header(frame: bytes, path: Path) -> Header:
    try:
        return msgspec.msgpack.decode(frame, type=Header)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} was written by another version of branchline: {error}") from None
