"""Measures a worker with a designed set of steps, so that a latency model can be fitted without any traffic.

The steps go through the worker's own door (``core.ports.Worker``), with page tables and slots as the scheduler would fill
them. Knows: what to try. Refuses to know: what the worker is (``cli.calibrate`` makes one) and how a model is fitted
(``sim.latency``).
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from branchline.base.clock import Clock
from branchline.base.ids import PageId
from branchline.core.plan import PageCopy, PlanRow, SlotOpen, StepPlan
from branchline.core.ports import Worker
from branchline.core.request import SamplingParams
from branchline.sim.latency import Load, Sample

TOKEN_KINDS = 256
"""Different tokens in the prompts; any vocabulary has so many."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A step to be measured: ``decode_rows`` rows of one token and ``chunk_rows`` rows of ``chunk`` tokens."""

    decode_rows: int
    chunk_rows: int
    chunk: int
    context: int
    """Positions computed before, of every row; at least 1."""

    @property
    def counts(self) -> tuple[int, ...]:
        """New tokens of each row."""
        return (1,) * self.decode_rows + (self.chunk,) * self.chunk_rows


@dataclass(frozen=True, slots=True)
class Room:
    """What the engine at hand allows."""

    rows: int
    step_tokens: int
    context_length: int
    pages: int
    page_size: int

    def pages_per_row(self, probe: Probe) -> int:
        return -(-(probe.context + max(probe.counts)) // self.page_size)

    def fits(self, probe: Probe) -> bool:
        counts = probe.counts
        return (
            len(counts) <= self.rows
            and sum(counts) <= self.step_tokens
            and probe.context + max(counts) < self.context_length
            and len(counts) * self.pages_per_row(probe) < self.pages
        )


def design(room: Room) -> list[Probe]:
    """Decode steps, prefill steps and mixtures: enough to tell the coefficients apart, about a minute on a slow CPU."""
    decode = [Probe(rows, 0, 0, context) for rows in (1, 4, 16, 32) for context in (1, 250, 1000, 2000)]
    single = [Probe(0, 1, chunk, context) for chunk in (16, 64, 128, 256, 512) for context in (1, 500, 1500)]
    several = [Probe(0, rows, chunk, context) for rows, chunk in ((4, 16), (4, 64), (16, 16)) for context in (1, 1000)]
    mixed = [Probe(rows, 1, chunk, context) for rows, chunk in ((4, 64), (15, 128), (8, 256)) for context in (1, 500)]
    probes = [probe for probe in (*decode, *single, *several, *mixed) if room.fits(probe)]
    # Neighbours are alike: dealt out like cards, every fold of the cross-check gets some of each kind.
    return [probe for start in range(5) for probe in probes[start::5]]


def measure(
    worker: Worker,
    room: Room,
    clock: Clock,
    *,
    budget_ns: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Sample]:
    """The median duration of each designed step. Every step is measured at least once, then again while time is left.

    Raises:
        StepFailed: the worker cannot compute a step.
    """
    probes, bench = design(room), _Bench(worker, room)
    durations: dict[Probe, list[int]] = {probe: [] for probe in probes}
    loads = {probe: bench.run(probe)[0] for probe in probes[:1]}  # warm up: the first step pays for the others
    started_ns = clock.now_ns()
    for number, probe in enumerate(itertools.cycle(probes)):
        if number >= len(probes) and clock.now_ns() - started_ns > budget_ns:
            break
        loads[probe], duration_ns = bench.run(probe)
        durations[probe].append(duration_ns)
        progress(number + 1, len(probes))
    return [Sample(loads[probe], round(statistics.median(durations[probe]))) for probe in probes]


class _Bench:
    """Runs probes one after the other, with page tables that overlap nowhere within a probe."""

    def __init__(self, worker: Worker, room: Room) -> None:
        self._worker = worker
        self._room = room
        self._steps = itertools.count(1)
        self._touched: set[PageId] = {0}

    def run(self, probe: Probe) -> tuple[Load, int]:
        """Open the slots in a step of their own, then measure the probe."""
        width = self._room.pages_per_row(probe)
        tables = [tuple(range(1 + slot * width, 1 + (slot + 1) * width)) for slot in range(len(probe.counts))]
        step = next(self._steps)
        opens = tuple(_open(slot, step, probe.context + count) for slot, count in enumerate(probe.counts))
        before = [PlanRow(slot, step, 0, probe.context - 1, 1, False, pages) for slot, pages in enumerate(tables)]
        copies = tuple(self._touch(itertools.chain(*tables)))
        self._execute(StepPlan(step, tuple(before), opens, copies))
        rows = [
            PlanRow(slot, step, 0, probe.context, count, True, pages)
            for slot, (count, pages) in enumerate(zip(probe.counts, tables, strict=True))
        ]
        plan = StepPlan(next(self._steps), tuple(rows))
        return Load.of(plan), self._execute(plan)

    def _touch(self, pages: Iterator[PageId]) -> Iterator[PageCopy]:
        """Write every page once: memory that was never written is read from one shared page of zeros, which is too fast."""
        for page in pages:
            if page not in self._touched:
                self._touched.add(page)
                yield PageCopy(0, page, self._room.page_size)

    def _execute(self, plan: StepPlan) -> int:
        return self._worker.collect(self._worker.launch(plan)).duration_ns


def _open(slot: int, seq: int, token_count: int) -> SlotOpen:
    tokens: Sequence[int] = [(slot + position) % TOKEN_KINDS for position in range(token_count)]
    return SlotOpen(slot, seq, 0, tuple(tokens), token_count, SamplingParams(), slot, ())
