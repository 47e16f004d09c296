"""The KV pool against a dictionary of positions."""

import ctypes
import mmap
import threading

import numpy as np
import pytest

from branchline.base.errors import ConfigError, InvariantBroken
from branchline.memory.kernel_kv import AHEAD, KernelKvPool
from branchline.memory.kv import KvPool, bytes_per_page

SHAPE = {"layers": 2, "kv_heads": 3, "head_dim": 4}


def test_writes_and_copies_equal_a_dictionary():
    rng = np.random.default_rng(0)
    pool = KvPool(**SHAPE, page_size=5, page_count=7)
    twin = {}
    for _ in range(60):
        layer, places = int(rng.integers(2)), rng.choice(35, 6, replace=False)
        keys, values = rng.normal(size=(2, 6, 3, 4)).astype(np.float32)
        pool.write(layer, places, keys, values)
        twin |= {(layer, int(place)): (k, v) for place, k, v in zip(places, keys, values, strict=True)}
        source, target = (int(page) for page in rng.choice(7, 2, replace=False))
        count = int(rng.integers(1, 6))
        pool.copy(source, target, count)
        nothing = np.zeros((2, 3, 4), np.float32)
        for layer in range(2):
            for i in range(count):
                twin[layer, target * 5 + i] = twin.get((layer, source * 5 + i), nothing)
        tables = rng.integers(0, 7, (2, 3))
        for layer in range(2):
            keys, values = pool.gather(layer, tables)
            assert keys.shape == (3, 2, 15, 4)
            for row, table in enumerate(tables):
                for position in range(15):
                    k, v = twin.get((layer, int(table[position // 5]) * 5 + position % 5), nothing)
                    assert (keys[:, row, position] == k).all()
                    assert (values[:, row, position] == v).all()


def test_bytes_per_page_is_what_the_pool_takes():
    pool = KvPool(**SHAPE, page_size=5, page_count=7)
    assert pool.nbytes == 7 * bytes_per_page(**SHAPE, page_size=5)


@pytest.mark.parametrize("copy", [(0, 7, 1), (-1, 0, 1), (0, 1, 0), (0, 1, 6)])
def test_copies_out_of_range_are_our_own_bug(copy):
    with pytest.raises(InvariantBroken):
        KvPool(**SHAPE, page_size=5, page_count=7).copy(*copy)


def test_too_much_memory_is_a_matter_of_configuration():
    with pytest.raises(ConfigError, match="no memory"):
        KvPool(**SHAPE, page_size=16, page_count=1 << 50)


def resident(array):
    """Bytes of ``array`` that have memory, to whole pages of the system."""
    look = ctypes.CDLL(None).mincore
    look.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    begin = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(array.ctypes.data + array.nbytes - begin) // mmap.PAGESIZE)
    found = ctypes.create_string_buffer(pages)
    assert look(begin, pages * mmap.PAGESIZE, found) == 0
    return sum(byte[0] & 1 for byte in found) * mmap.PAGESIZE


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mincore"), reason="the system does not tell what has memory")
def test_memory_is_there_before_pages_are_used_and_not_long_before():
    pool = KernelKvPool(layers=2, kv_heads=4, head_dim=128, page_size=16, page_count=2048, kv_dtype="bf16")
    layer = pool.nbytes // 2
    if resident(pool.data) < AHEAD // 16 * layer // 2048:
        pytest.skip("this system gives memory only to what is written to")
    before = resident(pool.data)
    assert before < pool.nbytes / 2
    pool.data[:100] = 7
    pool.expect(10)
    pool.expect(AHEAD // 16 - 1)
    for thread in threading.enumerate():
        if thread.name == "branchline-memory":
            thread.join()
    assert before < resident(pool.data) < pool.nbytes
    assert (pool.data[:100] == 7).all()
    assert not pool.data[100:].any()
    for page in range(2048):
        pool.expect(page)
