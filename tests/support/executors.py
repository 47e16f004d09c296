"""Every executor that this installation and this processor can run, by name, for suites that must hold for all of them."""

import numpy as np

from branchline.memory.kernel_kv import KernelKvPool
from branchline.memory.kv import KvPool
from branchline.models.registry import build_graph
from branchline.models.repack import repack, to_floats
from branchline.ops.batch import Batch
from branchline.ops.native import NativeExecutor, usable_isas
from branchline.ops.reference import ReferenceExecutor

NATIVE = tuple(f"native-{isa}" for isa in usable_isas())
EXECUTORS = ("reference", *NATIVE)
BEST = ("reference", *NATIVE[:1])
"""The reference and the executor that an engine would choose."""


def make_pool(name, *, kv_dtype="f32", **shape):
    """A pool as the executor wants it."""
    return KvPool(**shape) if name == "reference" else KernelKvPool(**shape, kv_dtype=kv_dtype)


def make_executor(name, graph, checkpoint, pool, threads=2, quantize=None):
    def matrix(weight):
        return repack(checkpoint.tensor(weight), quantize)

    def floats(weight):
        return to_floats(checkpoint.tensor(weight), quantize)

    if name == "reference":
        return ReferenceExecutor(graph, floats, pool)
    isa = name.removeprefix("native-")
    return NativeExecutor(graph, matrix, floats, pool, threads=threads, isa=isa)


def executor_with_pool(name, checkpoint, *, page_size, page_count, threads=2, kv_dtype="bf16", quantize=None):
    """As an engine makes it; a native one with its default format of keys and values."""
    graph = build_graph(checkpoint.config, checkpoint.names)
    pool = make_pool(name, **graph.kv_shape, page_size=page_size, page_count=page_count, kv_dtype=kv_dtype)
    return make_executor(name, graph, checkpoint, pool, threads, quantize)


def make_batch(rows):
    """A step of rows (new tokens, start, pages); page 0 stands behind the last page of a row."""
    longest = max(len(pages) for _, _, pages in rows)
    return Batch(
        tokens=np.concatenate([np.array(tokens) for tokens, _, _ in rows]),
        positions=np.concatenate([np.arange(start, start + len(tokens)) for tokens, start, _ in rows]),
        row_offsets=np.cumsum([0, *(len(tokens) for tokens, _, _ in rows)]),
        page_tables=np.array([[*pages, *[0] * (longest - len(pages))] for _, _, pages in rows]),
    )
