"""The KV pool against a dictionary of positions."""

import numpy as np
import pytest

from branchline.base.errors import ConfigError, InvariantBroken
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
