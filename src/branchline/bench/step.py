"""Times steps of an executor in this process, through the door of the worker (``core.ports.Worker``).

    page 0: the pattern | prefix pages, in the tables of all rows | own pages of row 0 | own pages of row 1 | ...

Decode: rows of one token each, step after step. Prefill: one prompt in chunks. What lies in the pages that are read is one
computed page, copied: real numbers in real memory, without the time to compute them all.

Of this package only this module knows parts of the engine. Refuses to know: scheduling, HTTP, what the machine could do
(``bench.limits``).
"""

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from branchline.base.clock import NS_PER_S, MonotonicClock
from branchline.base.errors import ConfigError, StepFailed
from branchline.base.ids import PageId
from branchline.base.machine import Machine
from branchline.bench.cases import WARM_UPS, Case, Design, ModelSize, Work, work_of
from branchline.bench.limits import Limits, Multipliers
from branchline.core.plan import PageCopy, PlanRow, SlotOpen, StepPlan
from branchline.core.ports import Worker
from branchline.core.request import SamplingParams
from branchline.memory import kernel_kv
from branchline.memory.kernel_kv import KernelKvPool
from branchline.memory.kv import FloatArray, KvPool, bytes_per_page
from branchline.models.checkpoint import Checkpoint
from branchline.models.config import ModelConfig
from branchline.models.registry import build_graph
from branchline.models.repack import repack, to_floats
from branchline.models.shapes import weight_shapes
from branchline.ops.batch import Executor
from branchline.ops.graph import Graph, Linear, Logits, PagedAttention
from branchline.ops.native import NativeExecutor, kernels, usable_isas
from branchline.ops.packed import PackedWeight
from branchline.ops.reference import JoinedLinear, ReferenceExecutor
from branchline.worker.runner import LocalWorker

KV_SHARE = 0.5
"""Share of the available memory that KV pages may take."""
FLOAT32_BYTES = 4
KV_DTYPE = "bf16"
"""Of the native executor: what an engine takes."""
REST = "rest"
"""Of a step: what no operator takes. Arrays, page tables; sampling in the reference executor."""

OpTimes: TypeAlias = Mapping[str, float]
"""Nanoseconds by kind of operator."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An executor behind its worker."""

    name: str
    worker: Worker
    size: ModelSize
    vocab_size: int
    take_op_times: Callable[[], OpTimes] = dict
    """What operators took since it was last asked; nothing unless they are timed."""


@dataclass(frozen=True, slots=True)
class Timing:
    case: Case
    median_ns: float
    """Of one decode step, or of a whole prompt."""
    work: Work
    """Of the same."""
    op_ns: OpTimes
    """By kind of operator, mean of the runs, with the ``REST``; empty unless operators are timed."""

    @property
    def tokens_s(self) -> float:
        return self.case.rows * self.case.tokens * NS_PER_S / self.median_ns

    @property
    def read_bytes_s(self) -> float:
        return self.work.read_bytes * NS_PER_S / self.median_ns

    @property
    def flop_s(self) -> float:
        return self.work.flop * NS_PER_S / self.median_ns

    def read_share(self, limits: Limits) -> float:
        return self.read_bytes_s / limits.read_bytes_s

    def compute_share(self, limits: Limits) -> float:
        """Of the time, what the multiply-adds would take at the limits of their kinds."""
        work = self.work
        float32_s = (work.flop - work.byte_op - work.page_op) / limits.float32_flop_s
        byte_s = work.byte_op / (limits.byte_op_s or limits.float32_flop_s)
        page_s = work.page_op / (limits.page_op_s or limits.float32_flop_s)
        return (float32_s + byte_s + page_s) * NS_PER_S / self.median_ns


# ---------------------------------------------------------------- executors


class ProfiledReference(ReferenceExecutor):
    """The reference executor, with a stop watch at each operator."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._op_ns: Counter[str] = Counter()

    def take_op_times(self) -> OpTimes:
        taken, self._op_ns = self._op_ns, Counter()
        return taken

    def logits(self, hidden: FloatArray) -> FloatArray:
        started_ns = time.perf_counter_ns()
        out = super().logits(hidden)
        self._op_ns[Logits.__name__] += time.perf_counter_ns() - started_ns
        return out

    def _run(self, op: Any, values: Any, step: Any) -> None:
        started_ns = time.perf_counter_ns()
        super()._run(op, values, step)
        kind = Linear if isinstance(op, JoinedLinear) else type(op)
        self._op_ns[kind.__name__] += time.perf_counter_ns() - started_ns


def make_reference(
    checkpoint: Checkpoint, pages: Design, threads: int, is_profiled: bool, isa: str = "auto", quantize: str | None = None
) -> Subject:
    if isa != "auto":
        raise ConfigError(f"the reference executor has no kernels for {isa}: leave out isa, or choose the native executor")
    graph = build_graph(checkpoint.config, checkpoint.names)
    shape = {**graph.kv_shape, "page_size": pages.page_size}
    _require_room(pages.page_count, bytes_per_page(**shape))
    pool = KvPool(**shape, page_count=pages.page_count)
    kind = ProfiledReference if is_profiled else ReferenceExecutor
    executor = kind(graph, lambda name: to_floats(checkpoint.tensor(name), quantize), pool)
    take = executor.take_op_times if isinstance(executor, ProfiledReference) else dict
    size = model_size(checkpoint.config, graph, weight_bytes=FLOAT32_BYTES, kv_bytes=FLOAT32_BYTES)
    return _subject(_named("reference (numpy, float32)", quantize), executor, checkpoint, threads, size, take)


def make_native(
    checkpoint: Checkpoint, pages: Design, threads: int, is_profiled: bool, isa: str = "auto", quantize: str | None = None
) -> Subject:
    graph = build_graph(checkpoint.config, checkpoint.names)
    shape = {**graph.kv_shape, "page_size": pages.page_size}
    _require_room(pages.page_count, kernel_kv.bytes_per_page(**shape, kv_dtype=KV_DTYPE))
    pool = KernelKvPool(**shape, page_count=pages.page_count, kv_dtype=KV_DTYPE)
    numbers: Counter[bool] = Counter()

    def matrix(name: str) -> PackedWeight:
        weight = repack(checkpoint.tensor(name), quantize)
        numbers[weight.encoding in ("q4", "q8")] += weight.shape[0] * weight.shape[1]
        return weight

    executor = NativeExecutor(graph, matrix, lambda name: to_floats(checkpoint.tensor(name)), pool, threads=threads, isa=isa)
    take = executor.take_op_times if is_profiled else dict
    take()
    size = model_size(
        checkpoint.config, graph, weight_bytes=executor.weight_bytes / numbers.total(),
        kv_bytes=np.dtype(kernel_kv.NUMBERS[KV_DTYPE]).itemsize, byte_share=numbers[True] / numbers.total(),
    )  # fmt: skip
    return _subject(
        _named(f"native ({executor.isa}, {KV_DTYPE} pages)", quantize), executor, checkpoint, threads, size, take
    )


def multipliers(executor: str, isa: str) -> Multipliers | None:
    """For ``bench.limits``: what kernels are made of. ``None`` if this executor has no kernels."""
    module = kernels()
    if executor != "native" or isinstance(module, str):
        return None
    return Multipliers(partial(module.multiply_bytes, isa), partial(module.multiply_pages, isa))


def _named(executor: str, quantize: str | None) -> str:
    return f"{executor}, {quantize} weights" if quantize else executor


def _subject(
    name: str, executor: Executor, checkpoint: Checkpoint, threads: int, size: ModelSize, take: Callable[[], OpTimes]
) -> Subject:
    worker = LocalWorker(executor, token_limit=checkpoint.tokenizer.usable_ids, threads=threads, clock=MonotonicClock())
    return Subject(name, worker, size, executor.vocab_size, take)


class MakeSubject(Protocol):
    def __call__(
        self, checkpoint: Checkpoint, pages: Design, threads: int, is_profiled: bool, isa: str = "auto",
        quantize: str | None = None,
    ) -> Subject: ...  # fmt: skip


EXECUTORS: Mapping[str, MakeSubject] = {
    "native": make_native,
    "reference": make_reference,
}
"""By name: given a checkpoint, the pages to make room for, threads, whether to time operators, the instruction set and
how to round weights.

Raises:
    ModelError: the model cannot be run.
    ConfigError: there is not enough memory, or no such kernels.
"""


def best_executor() -> str:
    """Of :data:`EXECUTORS`, the one that an engine takes here."""
    return "native" if usable_isas() else "reference"


def model_size(
    config: ModelConfig, graph: Graph, *, weight_bytes: float, kv_bytes: float, byte_share: float = 0.0
) -> ModelSize:
    """``weight_bytes`` and ``kv_bytes``: what the executor takes for one number. ``byte_share`` as in ``ModelSize``."""
    numbers = {name: shape[0] * shape[1] for name, shape in weight_shapes(config).items() if len(shape) == 2}
    matrices = sum(numbers[op.weight] for op in graph.ops if isinstance(op, Linear))
    head = sum(numbers[op.weight] for op in graph.ops if isinstance(op, Logits))
    attention = [op for op in graph.ops if isinstance(op, PagedAttention)]
    return ModelSize(
        matrix_weights=matrices,
        head_weights=head,
        weight_bytes=(matrices + head) * weight_bytes,
        byte_share=byte_share,
        kv_position_bytes=int(2 * graph.kv_heads * graph.head_dim * kv_bytes),
        query_width=attention[0].heads * graph.head_dim,
        windows=tuple(op.window for op in attention),
    )


def _require_room(page_count: int, page_bytes: int) -> None:
    available = int(Machine.look().available_bytes * KV_SHARE)
    if page_count * page_bytes > available:
        wanted = page_count * page_bytes / 2**30
        raise ConfigError(
            f"the KV pages of the largest case need {wanted:.1f} GiB, more than half of the available memory: "
            "choose fewer rows or shorter prompts"
        )


# ---------------------------------------------------------------- measuring


def measure(subject: Subject, design: Design, progress: Callable[[Case], None] = lambda case: None) -> list[Timing]:
    """One timing of each case, in their order.

    Raises:
        StepFailed: the worker could not compute a step.
    """
    bench = _Bench(subject, design)
    timings = []
    for case in design.cases:
        progress(case)
        runs = list(bench.decode(case) if case.kind == "decode" else bench.prefill(case))[WARM_UPS:]
        chunks = design.chunks(case)
        timings.append(
            Timing(
                case, statistics.median(run.duration_ns for run in runs), work_of(subject.size, case, chunks), _mean(runs)
            )
        )
    return timings


@dataclass(frozen=True, slots=True)
class _Run:
    duration_ns: int
    op_ns: OpTimes


def _mean(runs: Sequence[_Run]) -> OpTimes:
    total: Counter[str] = Counter()
    for run in runs:
        total.update(run.op_ns)
    if not total:
        return {}
    total[REST] = sum(run.duration_ns for run in runs) - total.total()
    return {kind: ns / len(runs) for kind, ns in total.items()}


class _Bench:
    """Runs cases one after the other on the same pages."""

    def __init__(self, subject: Subject, design: Design) -> None:
        self._subject = subject
        self._design = design
        self._steps = itertools.count(1)
        self._written: set[PageId] = set()
        pattern = PlanRow(0, 0, 0, 0, design.page_size, False, (0,))
        self._execute((pattern,), opens=(self._open(0, 0, design.page_size),))
        self._written.add(0)

    def decode(self, case: Case) -> Iterator[_Run]:
        """One step a run; the rows grow by the token they sample."""
        seq, tables = self._enter(case, case.base + 1)
        for start in range(case.base, case.base + WARM_UPS + self._design.repeats):
            yield self._time([tuple(PlanRow(slot, seq, 0, start, 1, True, pages) for slot, pages in enumerate(tables))])

    def prefill(self, case: Case) -> Iterator[_Run]:
        """One prompt a run, always the same."""
        end = case.base + case.tokens
        for _ in range(WARM_UPS + self._design.repeats):
            seq, tables = self._enter(case, end)
            yield self._time(
                [
                    tuple(
                        PlanRow(slot, seq, 0, start, count, start + count == end, pages) for slot, pages in enumerate(tables)
                    )
                    for start, count in self._design.chunks(case)
                ]
            )

    def _enter(self, case: Case, known_count: int) -> tuple[int, list[tuple[PageId, ...]]]:
        """New sequences in all slots, by a step that is not timed. It computes the position before the first new one."""
        seq = next(self._steps)
        tables = self._tables(case)
        opens = tuple(self._open(slot, seq, known_count) for slot in range(case.rows))
        rows = tuple(PlanRow(slot, seq, 0, max(0, case.base - 1), 1, False, pages) for slot, pages in enumerate(tables))
        pages = sorted(set(itertools.chain(*tables)) - self._written)
        self._written.update(pages)
        self._execute(rows, opens, tuple(PageCopy(0, page, self._design.page_size) for page in pages))
        return seq, tables

    def _tables(self, case: Case) -> list[tuple[PageId, ...]]:
        first_own, width = 1 + case.prefix // self._design.page_size, self._design.own_pages(case)
        shared = range(1, first_own)
        return [
            (*shared, *range(first_own + slot * width, first_own + (slot + 1) * width)) for slot in range(case.rows)
        ]  # fmt: skip

    def _open(self, slot: int, seq: int, token_count: int) -> SlotOpen:
        tokens = tuple((slot * 7919 + position * 104729) % self._subject.vocab_size for position in range(token_count))
        return SlotOpen(slot, seq, 0, tokens, token_count, SamplingParams(temperature=0), 0, ())

    def _time(self, steps: Sequence[tuple[PlanRow, ...]]) -> _Run:
        self._subject.take_op_times()
        duration_ns = sum(self._execute(rows) for rows in steps)
        return _Run(duration_ns, self._subject.take_op_times())

    def _execute(
        self, rows: tuple[PlanRow, ...], opens: tuple[SlotOpen, ...] = (), copies: tuple[PageCopy, ...] = ()
    ) -> int:
        worker = self._subject.worker
        result = worker.collect(worker.launch(StepPlan(next(self._steps), rows, opens, copies)))
        for row in result.rows:
            if row.error is not None:
                raise StepFailed(f"a row failed: {row.error}")
        return result.duration_ns
