"""The journal on disk: what is written can be read, whatever happens to the files."""

import errno
import logging
import os
import random
import stat

import pytest

from branchline.base.config import EngineConfig
from branchline.base.errors import ConfigError
from branchline.observe.journal import MAGIC, Header, Journal, JournalReader, list_runs, open_sink
from tests.support.recorded import FACTS

HEADER = Header(tokens="hashed", config=EngineConfig(pages=64, context_length=4096), facts=FACTS)


def write(directory, frames, **options):
    journal = Journal(directory, HEADER, **options)
    for frame in frames:
        if journal.is_part_full:
            journal.next_part()
        journal.append(frame, 1)
    journal.close()
    return journal


def read(directory, run=None):
    reader = JournalReader(directory, run)
    return list(reader.frames()), reader


def some_frames(count, seed=0):
    rng = random.Random(seed)
    return [rng.randbytes(rng.randint(1, 60)) for _ in range(count)]


def only_file(directory):
    (path,) = directory.iterdir()
    return path


def test_what_is_written_can_be_read(tmp_path):
    frames = [*some_frames(50), b"", bytes(100_000)]
    journal = write(tmp_path / "j", frames)
    found, reader = read(tmp_path / "j")
    assert found == frames
    assert (reader.lost_bytes, reader.is_whole, reader.part_count) == (0, True, 1)
    assert (reader.header.run, reader.header.part, reader.header.config) == (1, 1, HEADER.config)
    assert reader.size_bytes == journal.bytes_written == only_file(tmp_path / "j").stat().st_size
    assert journal.bytes_written < 10_000, "frames are packed"


def test_nobody_else_may_look_into_it(tmp_path):
    write(tmp_path / "deep" / "j", some_frames(1))
    assert stat.S_IMODE((tmp_path / "deep" / "j").stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file(tmp_path / "deep" / "j").stat().st_mode) == 0o600


def test_a_directory_that_is_open_to_others_is_refused(tmp_path):
    (tmp_path / "j").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        Journal(tmp_path / "j", HEADER)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        Journal(tmp_path / "file" / "j", HEADER)


def test_every_life_of_an_engine_is_a_run(tmp_path):
    first, second = some_frames(3, 1), some_frames(3, 2)
    write(tmp_path / "j", first)
    write(tmp_path / "j", second)
    assert list(list_runs(tmp_path / "j")) == [1, 2]
    assert read(tmp_path / "j")[0] == second
    assert read(tmp_path / "j", run=1)[0] == first
    with pytest.raises(ConfigError, match=r"run 3.*there are 1, 2"):
        JournalReader(tmp_path / "j", 3)


def test_two_engines_in_one_directory_do_not_meet(tmp_path):
    one, other = Journal(tmp_path / "j", HEADER), Journal(tmp_path / "j", HEADER)
    one.append(b"one", 1)
    other.append(b"other", 1)
    one.close()
    other.close()
    assert read(tmp_path / "j", 1)[0] == [b"one"]
    assert read(tmp_path / "j", 2)[0] == [b"other"]


# ---------------------------------------------------------------- crashes


def test_a_torn_end_is_skipped_at_every_byte(tmp_path):
    frames = some_frames(6)
    write(tmp_path / "j", frames)
    path = only_file(tmp_path / "j")
    data = path.read_bytes()
    ends = [len(data)]
    for _ in range(3):
        path.write_bytes(data[: ends[0] - 1])
        reader = read(tmp_path / "j")[1]
        ends.insert(0, ends[0] - 1 - reader.lost_bytes)
    for length in range(ends[0], len(data)):
        path.write_bytes(data[:length])
        found, reader = read(tmp_path / "j")
        whole = sum(end <= length for end in ends)
        assert found == frames[: 2 + whole]
        assert reader.lost_bytes == length - ends[whole - 1]


def test_a_header_that_was_never_finished_is_no_journal(tmp_path):
    write(tmp_path / "j", [])
    path = only_file(tmp_path / "j")
    data = path.read_bytes()
    for length in (0, 5, len(MAGIC), len(MAGIC) + 3, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ConfigError, match="not even its header"):
            JournalReader(tmp_path / "j")


def test_every_flipped_bit_ends_the_reading_there(tmp_path):
    frames = some_frames(4)
    write(tmp_path / "j", frames)
    path = only_file(tmp_path / "j")
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    start = len(data) - 1 - read(tmp_path / "j")[1].lost_bytes  # of the last frame
    for at in range(start, len(data)):
        for bit in range(8):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            found, reader = read(tmp_path / "j")
            assert found == frames[:3]
            assert reader.lost_bytes == len(data) - start


def test_garbage_is_no_journal(tmp_path):
    (tmp_path / "j").mkdir(mode=0o700)
    (tmp_path / "j" / "0001-000001.journal").write_bytes(os.urandom(500))
    with pytest.raises(ConfigError):
        JournalReader(tmp_path / "j")
    with pytest.raises(ConfigError, match="there is no journal in"):
        JournalReader(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        JournalReader(tmp_path / "nowhere")


def test_the_header_of_another_version_is_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr("branchline.observe.journal.msgspec.msgpack.encode", lambda header: b"\x81\xa3run\xa1x")
    Journal(tmp_path / "j", HEADER).close()
    with pytest.raises(ConfigError, match="another version"):
        JournalReader(tmp_path / "j")


# ---------------------------------------------------------------- parts


def test_a_large_journal_goes_on_in_parts(tmp_path):
    frames = some_frames(200)
    write(tmp_path / "j", frames, part_bytes=1000)
    found, reader = read(tmp_path / "j")
    assert found == frames
    assert reader.part_count > 5
    parts = list_runs(tmp_path / "j")[1]
    assert [part.number for part in parts] == list(range(1, len(parts) + 1))


def test_damage_in_one_part_loses_the_parts_after_it(tmp_path):
    write(tmp_path / "j", some_frames(200), part_bytes=1000)
    paths = [part.path for part in list_runs(tmp_path / "j")[1]]
    before = read(tmp_path / "j")[0]
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    found, reader = read(tmp_path / "j")
    assert found == before[: len(found)]
    assert reader.lost_bytes > sum(path.stat().st_size for path in paths[3:])
    paths[2].unlink()
    found, reader = read(tmp_path / "j")
    assert found == before[: len(found)]
    assert reader.lost_bytes == sum(path.stat().st_size for path in paths[3:])


def test_a_limited_directory_loses_its_oldest_parts(tmp_path):
    limit = 400_000
    write(tmp_path / "j", some_frames(10, 1), max_bytes=limit)
    frames = [random.Random(i).randbytes(5000) for i in range(200)]
    write(tmp_path / "j", frames, max_bytes=limit)
    assert sum(path.stat().st_size for path in (tmp_path / "j").iterdir()) < limit * 1.3
    assert list(list_runs(tmp_path / "j")) == [2]
    found, reader = read(tmp_path / "j")
    assert found == frames[-len(found) :]
    assert len(found) > 50
    assert not reader.is_whole


# ---------------------------------------------------------------- a full disk


class FullDisk:
    """Takes so many bytes, then no more; ``partly``: says how many it took, as write(2) does, before it raises."""

    def __init__(self, path, room, *, partly):
        self._sink = open_sink(path)
        self._room = room
        self._partly = partly

    def write(self, data):
        if len(data) > self._room:
            taken = self._sink.write(data[: self._room])
            self._room = 0
            if self._partly and taken:
                return taken
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._room -= len(data)
        return self._sink.write(data)

    def close(self):
        self._sink.close()


@pytest.mark.parametrize("partly", [False, True])
def test_a_full_disk_ends_the_journal_in_one_line(tmp_path, caplog, partly):
    frames = [os.urandom(100) for _ in range(30)]
    with caplog.at_level(logging.ERROR):
        journal = write(tmp_path / "j", frames, open_sink=lambda path: FullDisk(path, 2000, partly=partly))
    assert not journal.is_open
    assert [record.message for record in caplog.records] == [
        f"the journal in {tmp_path / 'j'} ends here, serving goes on: No space left on device"
    ]
    found, reader = read(tmp_path / "j")
    assert found == frames[: len(found)]
    assert len(found) + journal.lost_records == 30
    assert len(found) > 5
    assert reader.lost_bytes < 150


def test_no_room_for_the_next_part_ends_the_journal_too(tmp_path, caplog):
    rooms = [10_000, 5]
    frames = [os.urandom(100) for _ in range(300)]
    journal = write(
        tmp_path / "j", frames, part_bytes=5000, open_sink=lambda path: FullDisk(path, rooms.pop(0), partly=False)
    )  # fmt: skip
    assert not journal.is_open
    found, _ = read(tmp_path / "j")
    assert found == frames[: len(found)]
    assert len(found) + journal.lost_records == 300


def test_a_disk_that_is_full_at_the_start_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="No space left"):
        Journal(tmp_path / "j", HEADER, open_sink=lambda path: FullDisk(path, 10, partly=False))
