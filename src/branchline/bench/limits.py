"""What the machine could do at best: reading memory, multiplying float32 matrices, multiplying as kernels do.

All say the best of several tries, for a limit is what is possible, not what is usual. Knows: how to measure.
Refuses to know: models, executors.

Memory: ``memchr`` of the C library looks for a byte that is not there, in one thread for each CPU, each in its own part of a
buffer larger than the processor's caches. It only reads, in vectors, without the interpreter lock. Matrices: numpy's BLAS.
Kernels: loops that are given, of nothing but the multiply-adds that the executor's kernels are made of, in each thread.
"""

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from branchline.base.errors import require

BUFFER_BYTES = 1 << 29
MATRIX_WIDTH = 2048
TRIES = 7
BYTE_ROUNDS, PAGE_ROUNDS = 1 << 21, 1 << 14

Multiply: TypeAlias = Callable[[int], int]
"""Does so many rounds of multiply-adds, without the interpreter lock; returns how many multiply-adds those are."""


@dataclass(frozen=True, slots=True)
class Multipliers:
    bytes: Multiply
    """Of bytes: weights in groups."""
    pages: Multiply
    """Of numbers of KV pages."""


@dataclass(frozen=True, slots=True)
class Limits:
    read_bytes_s: float
    """Reading memory with all threads."""
    float32_flop_s: float
    """Multiply-add counts as two."""
    byte_op_s: float | None
    """The same of bytes; ``None``: nobody multiplies any."""
    page_op_s: float | None
    """The same of numbers of KV pages; ``None``: that is float32 as well."""
    threads: int


def measure_limits(
    threads: int, kernels: Multipliers | None = None, *,
    buffer_bytes: int = BUFFER_BYTES, matrix_width: int = MATRIX_WIDTH,
    byte_rounds: int = BYTE_ROUNDS, page_rounds: int = PAGE_ROUNDS,
) -> Limits:  # fmt: skip
    return Limits(
        read_speed(threads, buffer_bytes),
        multiply_speed(threads, matrix_width),
        kernel_speed(threads, kernels.bytes, byte_rounds) if kernels else None,
        kernel_speed(threads, kernels.pages, page_rounds) if kernels else None,
        threads,
    )


def read_speed(threads: int, buffer_bytes: int = BUFFER_BYTES) -> float:
    """Bytes per second."""
    find = ctypes.CDLL(None).memchr
    find.restype, find.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    part = buffer_bytes // threads
    buffer = bytearray(b"\x01") * (part * threads)  # written, for pages never touched are all the same page of zeros
    first = ctypes.addressof(ctypes.c_char.from_buffer(buffer))

    with ThreadPoolExecutor(threads) as pool:

        def read() -> None:
            places = list(pool.map(lambda index: find(first + index * part, 0, part), range(threads)))
            require(not any(places), "there is a zero byte in a buffer of ones")

        return len(buffer) / best_time_s(read)


def multiply_speed(threads: int, width: int = MATRIX_WIDTH) -> float:
    """Floating point operations per second of a product of two square matrices."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, width, width), dtype=np.float32)
    out = np.empty((width, width), np.float32)
    with threadpool_limits(threads, user_api="blas"):
        return 2 * width**3 / best_time_s(lambda: np.matmul(a, b, out=out))


def kernel_speed(threads: int, multiply: Multiply, rounds: int) -> float:
    """Operations per second of all threads; a multiply-add counts as two."""
    with ThreadPoolExecutor(threads) as pool:
        counts: list[int] = []

        def multiply_at_once() -> None:
            counts[:] = pool.map(multiply, [rounds] * threads)

        best_s = best_time_s(multiply_at_once)
        return 2 * sum(counts) / best_s


def best_time_s(work: Callable[[], object], tries: int = TRIES) -> float:
    work()  # the first time pays for threads and pages
    times = []
    for _ in range(tries):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return min(times)
