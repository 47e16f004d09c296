"""A mapped file that is read through once does not stay in memory."""

import os
import sys

import numpy as np
import pytest

from branchline.models.checkpoint import Tensor, checkpoint_digest
from branchline.models.mapped import let_go, map_file
from branchline.models.repack import repack

MIB = 1 << 20
SIZE = 96 * MIB


def resident_file_bytes():
    """Of this process, in pages that belong to files."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[2]) * os.sysconf("SC_PAGESIZE")


pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells what is resident")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("mapped") / "weights"
    with open(path, "wb") as file:
        for index in range(SIZE // MIB):
            file.write(bytes([index % 64]) * MIB)
    return path


@pytest.fixture
def data(path):
    return np.frombuffer(map_file(str(path), least_bytes=1, kind="test"), np.uint8)


def test_what_was_let_go_is_out_of_memory_and_comes_back_when_read(data):
    before, total = resident_file_bytes(), int(data.sum(dtype=np.int64))
    assert resident_file_bytes() - before > SIZE * 0.9
    let_go(data[5:-5].reshape(-1, 2)[1:])
    assert resident_file_bytes() - before < SIZE * 0.1
    assert int(data.sum(dtype=np.int64)) == total


def test_arrays_that_are_no_files_keep_their_numbers():
    for array in (np.full(MIB, 7, np.uint8), np.frombuffer(bytearray(b"\7" * MIB), np.uint8)):
        let_go(array[100:])
        assert (array == 7).all()


@pytest.mark.parametrize(("kind", "quantize"), [("Q4_0", None), ("BF16", None), ("BF16", "int8"), ("F32", "int4")])
def test_packing_holds_a_few_slabs_of_the_file_at_a_time(kind, quantize, data):
    bytes_per_row = {"Q4_0": 576, "BF16": 2048, "F32": 4096}[kind]
    tensor = Tensor("w", (SIZE // bytes_per_row, 1024), kind, data[: SIZE // bytes_per_row * bytes_per_row])
    before = resident_file_bytes()
    most = max(resident_file_bytes() - before for _ in repack(tensor, quantize).slabs)
    assert most < 16 * MIB


def test_a_digest_holds_nothing_of_the_file(data):
    part = SIZE // 96
    tensors = [Tensor(f"w{i}", (part,), "F32", data[i * part : (i + 1) * part]) for i in range(96)]
    before = resident_file_bytes()
    checkpoint_digest(b"", tensors)
    assert resident_file_bytes() - before < MIB
