"""Paged attention of the native executor: rows that share pages walk together, number formats of the pages, odd shapes."""

import dataclasses

import numpy as np
import pytest

from branchline.base.errors import ConfigError, InvariantBroken
from branchline.core.plan import PageCopy
from branchline.memory.kernel_kv import KernelKvPool, bytes_per_page
from branchline.models.random import RandomCheckpoint, tiny_config
from branchline.models.registry import build_graph
from tests.support.executors import NATIVE, executor_with_pool, make_batch, make_executor, make_pool

needs_kernels = pytest.mark.skipif(not NATIVE, reason="the native kernels were not built")
KV_DTYPES = ("f32", "bf16", "int8")
VOCAB = 64


class Rows:
    """An executor of a tiny model whose rows branch off one another as in a radix tree."""

    def __init__(self, name, page_size, kv_dtype, **changes):
        config = dataclasses.replace(tiny_config("llama"), **changes)
        checkpoint = RandomCheckpoint(config)
        graph = build_graph(config, checkpoint.names)
        self.page_size = page_size
        pool = make_pool(name, **graph.kv_shape, page_size=page_size, page_count=1 + 6000 // page_size, kv_dtype=kv_dtype)
        self.pool = pool
        self.executor = make_executor(name, graph, checkpoint, pool)
        self._free = iter(np.random.default_rng(1).permutation(np.arange(1, pool.page_count)).tolist())
        self._rng = np.random.default_rng(2)

    def branch(self, pages, start, count):
        """Compute ``count`` new tokens behind ``start`` positions of ``pages``; the pages with those of the new tokens."""
        mine = [*pages[: -(-start // self.page_size)]]
        if start % self.page_size:
            mine[-1] = next(self._free)
            self.executor.copy_pages([PageCopy(pages[start // self.page_size], mine[-1], start % self.page_size)])
        mine += [next(self._free) for _ in range(-(-(start + count) // self.page_size) - len(mine))]
        self.executor.forward(make_batch([(self.tokens(count), start, mine)]))
        return mine

    def tokens(self, count):
        return self._rng.integers(0, VOCAB, count).tolist()


def family(rows):
    """Decode rows of several branches and depths, an unrelated one, and a prompt behind the common prefix."""
    root = rows.branch([], 0, 330)
    lengths = {}
    for count in (1, 30, 64, 65):
        lengths[330 + count] = [rows.branch(root, 330, count)]
    fork = rows.branch(root, 200, 100)
    twins = [rows.branch(fork, 300, 7) for _ in range(2)]
    alone = rows.branch([], 0, 130)
    decoding = [(length, pages) for length, found in lengths.items() for pages in found]
    decoding += [(307, pages) for pages in twins] + [(130, alone), (40, rows.branch(root, 33, 7))]
    made = []
    for length, pages in decoding:
        room = [] if length % rows.page_size else [next(rows._free)]
        made.append((rows.tokens(1), length, [*pages, *room]))
    prompt = rows.tokens(21)
    pages = [*root[: 320 // rows.page_size], *(next(rows._free) for _ in range(-(-21 // rows.page_size) + 1))]
    return [*made, (prompt, 320 // rows.page_size * rows.page_size, pages)]


@needs_kernels
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize(
    ("page_size", "kv_dtype"), [(16, "bf16"), (32, "int8"), (4, "f32"), (24, "bf16"), (128, "f32"), (3, "int8")]
)
def test_rows_that_share_pages_compute_what_each_computes_alone(name, page_size, kv_dtype):
    rows = Rows(name, page_size, kv_dtype, context_length=1024)
    batch = family(rows)
    alone = [rows.executor.forward(make_batch([row])) for row in batch]
    together = rows.executor.forward(make_batch(batch))
    assert np.isfinite(together).all()
    assert (together == np.concatenate(alone)).all()
    shuffled = np.random.default_rng(3).permutation(len(batch))
    again = rows.executor.forward(make_batch([batch[i] for i in shuffled]))
    assert (again == np.concatenate([alone[i] for i in shuffled])).all()


@needs_kernels
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("page_size", [16, 5])
def test_what_others_left_in_pages_is_never_seen(name, kv_dtype, page_size):
    """Odd lengths: numbers lie two by two, and the neighbour of the last position is somebody else's."""
    found = []
    for left in (0, 0xFF):  # floats of such bits are NaN
        rows = Rows(name, page_size, kv_dtype, context_length=1024)
        rows.pool.data.fill(left)
        rows.pool.scales.fill(np.nan if left else 0)
        prompt = rows.branch([], 0, 77)
        copied = rows.branch(prompt, 41, 9)
        batch = [(rows.tokens(1), 77, [*prompt, next(rows._free)]), (rows.tokens(3), 50, [*copied, next(rows._free)])]
        found.append(rows.executor.forward(make_batch([*batch, (rows.tokens(1), 0, [next(rows._free)])])))
    assert np.isfinite(found[0]).all()
    assert (found[0] == found[1]).all()


@needs_kernels
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_bits_do_not_depend_on_the_instruction_set_or_the_page_size(kv_dtype):
    found = []
    for name in NATIVE:
        for page_size in (16, 4, 64):
            rows = Rows(name, page_size, kv_dtype, context_length=1024)
            rows._rng = np.random.default_rng(5)
            pages = rows.branch([], 0, 150)
            found.append(
                rows.executor.forward(make_batch([(rows.tokens(9), 150, [*pages, *(next(rows._free) for _ in range(3))])]))
            )
    assert all((one == found[0]).all() for one in found)


@needs_kernels
@pytest.mark.parametrize("head_dim", [8, 12, 64, 100, 256])
def test_any_head_size_is_close_to_the_reference(head_dim):
    found = []
    for name in ("reference", NATIVE[0]):
        rows = Rows(name, 16, "f32", head_dim=head_dim, context_length=1024)
        pages = rows.branch([], 0, 70)
        found.append(rows.executor.forward(make_batch([(rows.tokens(3), 70, pages), (rows.tokens(1), 64, pages)])))
    assert np.allclose(found[0], found[1], atol=0.05 * np.abs(found[0]).max())


@needs_kernels
def test_rounded_pages_are_close_to_exact_ones(default_checkpoint):
    """Mean KL divergence over 150 positions of nonsense, against float32 pages of the same executor.

    Rounding inputs to bytes amplifies any difference; on real text all three are equally far from float32.
    """
    tokens = np.random.default_rng(0).integers(100, 30_000, 150).tolist()
    found = {}
    for kv_dtype in KV_DTYPES:
        executor = executor_with_pool(NATIVE[0], default_checkpoint, page_size=16, page_count=16, kv_dtype=kv_dtype)
        logits = executor.logits(executor.forward(make_batch([(tokens, 0, range(10))]))).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        found[kv_dtype] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    exact = found["f32"]
    divergence = {name: (np.exp(exact) * (exact - found[name])).sum(axis=1).mean() for name in KV_DTYPES[1:]}
    assert 0 < divergence["bf16"] < 1e-2
    assert 0 < divergence["int8"] < 2e-2


def test_bytes_per_page_is_what_the_pool_takes():
    for kv_dtype in KV_DTYPES:
        shape = {"layers": 2, "kv_heads": 3, "head_dim": 12, "page_size": 5, "kv_dtype": kv_dtype}
        assert KernelKvPool(**shape, page_count=7).nbytes == 7 * bytes_per_page(**shape)


def test_copies_out_of_range_are_our_own_bug():
    pool = KernelKvPool(layers=1, kv_heads=1, head_dim=8, page_size=4, page_count=4, kv_dtype="bf16")
    for copy in ((0, 4, 1), (-1, 0, 1), (0, 1, 0), (0, 1, 5)):
        with pytest.raises(InvariantBroken):
            pool.copy(*copy)


def test_too_much_memory_is_a_matter_of_configuration():
    with pytest.raises(ConfigError, match="no memory"):
        KernelKvPool(layers=1, kv_heads=1, head_dim=64, page_size=16, page_count=1 << 50, kv_dtype="bf16")
