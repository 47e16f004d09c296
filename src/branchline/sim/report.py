"""What happened in a simulation: a record for each request, a line for each step, and the figures that sum them up.

Knows: times and counts. Refuses to know: how they are shown (``cli.simulate``, ``sim.plots``).
"""

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from branchline.base.clock import NS_PER_S
from branchline.base.finish import FinishReason
from branchline.base.ids import RequestId
from branchline.core.events import Admitted, Committed, Event, Planned, Retracted, StepLost
from branchline.core.plan import StepPlan
from branchline.core.result import Output
from branchline.core.stats import EngineStats
from branchline.sim.workload import Arrival

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
NS_PER_MS = 1_000_000


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    request_id: RequestId
    group: str
    tenant: str
    replica: int
    arrival_ns: int
    admitted_ns: int | None
    """First admission; ``None`` if there was none."""
    first_token_ns: int | None
    end_ns: int
    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    """Prompt tokens that came from the cache at first admission."""
    retractions: int

    @property
    def ttft_ns(self) -> int | None:
        """Time to first token."""
        return None if self.first_token_ns is None else self.first_token_ns - self.arrival_ns

    @property
    def tpot_ns(self) -> int | None:
        """Time per output token after the first; ``None`` if there was only one."""
        if self.first_token_ns is None or self.output_tokens < 2:
            return None
        return (self.end_ns - self.first_token_ns) // (self.output_tokens - 1)

    @property
    def total_ns(self) -> int:
        return self.end_ns - self.arrival_ns


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds. Percentiles are values that occurred (nearest rank). All zero if nothing was counted."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, durations_ns: Iterable[int | None]) -> "Spread":
        values = sorted(value for value in durations_ns if value is not None)
        if not values:
            return cls()
        p50, p90, p95, p99 = (_ms(values[-(-len(values) * percent // 100) - 1]) for percent in (50, 90, 95, 99))
        mean = _ms(sum(values) / len(values))
        return cls(count=len(values), mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, max=_ms(values[-1]))


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in figures. Shares are between 0 and 1."""

    requests: int
    finished: dict[str, int]
    """By finish reason."""
    prompt_tokens: int
    """Of admitted requests."""
    cached_tokens: int
    hit_rate: float
    output_tokens: int
    makespan_s: float
    """From the first arrival to the last end."""
    steps: int
    busy: float
    """Share of the makespan in which the worker computed."""
    output_tokens_per_s: float
    ttft_ms: Spread
    tpot_ms: Spread
    total_ms: Spread
    """From arrival to end."""
    retractions: int
    evicted_pages: int
    most_waiting: int
    mean_running: float
    """While the worker computed."""
    most_pages: int
    """Pages in use by running requests at once."""
    pages: int


class Steps(NamedTuple):
    """One entry per committed step: columns of equal length."""

    end_ns: Ints
    duration_ns: Ints
    prefill_tokens: Ints
    decode_tokens: Ints
    rows: Ints
    running: Ints
    """After the step, as are the following."""
    waiting: Ints
    pages_busy: Ints
    """Pages that running requests hold or that were just let go."""
    pages_cached: Ints
    """Pages that hold content nobody uses now."""


class Diary:
    """Notes what an engine does. An observer of its events, a listener to its news and its photographs."""

    def __init__(self, replica: int = 0) -> None:
        self._replica = replica
        self._arrivals: dict[RequestId, Arrival] = {}
        self._admitted: dict[RequestId, Admitted] = {}
        self._first_token_ns: dict[RequestId, int] = {}
        self._retractions: Counter[RequestId] = Counter()
        self._records: list[RequestRecord] = []
        self._planned: deque[StepPlan] = deque()
        self._columns = tuple(array("q") for _ in Steps._fields)
        self._stats = EngineStats()

    # ------------------------------------------------------------ hearing

    def expect(self, arrival: Arrival) -> None:
        self._arrivals[arrival.request_id] = arrival

    def hear(self, now_ns: int, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if output.tokens and output.request_id not in self._first_token_ns:
                self._first_token_ns[output.request_id] = now_ns
            if output.finish is not None:
                usage = output.finish.usage
                self._close(output.request_id, output.finish.reason, usage.completion_tokens, now_ns)

    def notice(self, event: Event) -> None:
        match event:
            case Admitted(request_id=request_id):
                self._admitted.setdefault(request_id, event)
            case Retracted(request_id=request_id):
                self._retractions[request_id] += 1
            case Planned(plan=plan):
                self._planned.append(plan)
            case Committed():
                self._note_step(event)
            case StepLost():
                self._planned.popleft()
            case _:
                pass

    def photograph(self, stats: EngineStats) -> None:
        """Gauges after a turn belong to the step that the turn committed."""
        self._stats = stats
        gauges = (stats.running, stats.waiting, _busy_pages(stats), stats.pages_evictable)
        for column, value in zip(self._columns[-len(gauges) :], gauges, strict=True):
            if len(column) < len(self._columns[0]):
                column.append(value)

    # ------------------------------------------------------------ telling

    @property
    def records(self) -> tuple[RequestRecord, ...]:
        """In the order of arrival."""
        order = {request_id: place for place, request_id in enumerate(self._arrivals)}
        return tuple(sorted(self._records, key=lambda record: order[record.request_id]))

    @property
    def steps(self) -> Steps:
        return Steps(*(np.array(column, np.int64) for column in self._columns))

    @property
    def stats(self) -> EngineStats:
        return self._stats

    # ------------------------------------------------------------ inner

    def _note_step(self, event: Committed) -> None:
        plan = self._planned.popleft()
        decode = sum(1 for row in plan.rows if row.count == 1 and row.sample)
        numbers = (event.at_ns, event.duration_ns, plan.token_count - decode, decode, len(plan.rows))
        for column, value in zip(self._columns, numbers, strict=False):
            column.append(value)

    def _close(self, request_id: RequestId, reason: FinishReason, output_tokens: int, now_ns: int) -> None:
        arrival, admitted = self._arrivals[request_id], self._admitted.pop(request_id, None)
        self._records.append(RequestRecord(
            request_id=request_id, group=arrival.group, tenant=arrival.tenant, replica=self._replica,
            arrival_ns=arrival.at_ns, admitted_ns=admitted.at_ns if admitted else None,
            first_token_ns=self._first_token_ns.pop(request_id, None), end_ns=now_ns, reason=reason,
            prompt_tokens=len(arrival.prompt), output_tokens=output_tokens,
            cached_tokens=admitted.cached_tokens if admitted else 0, retractions=self._retractions.pop(request_id, 0),
        ))  # fmt: skip


def _busy_pages(stats: EngineStats) -> int:
    return stats.pages_total - stats.pages_free - stats.pages_evictable


# ---------------------------------------------------------------- summing up


def summarize(records: Sequence[RequestRecord], replicas: Sequence[tuple[Steps, EngineStats]]) -> Summary:
    """The figures of a run on one or several replicas."""
    admitted = [record for record in records if record.admitted_ns is not None]
    served = [record for record in records if record.reason.is_success]
    prompt, cached = sum(r.prompt_tokens for r in admitted), sum(r.cached_tokens for r in admitted)
    output = sum(record.output_tokens for record in records)
    makespan_ns = max(r.end_ns for r in records) - min(r.arrival_ns for r in records)
    busy_ns = sum(int(steps.duration_ns.sum()) for steps, _ in replicas)
    return Summary(
        requests=len(records),
        finished=dict(sorted(Counter(record.reason.value for record in records).items())),
        prompt_tokens=prompt,
        cached_tokens=cached,
        hit_rate=_share(cached, prompt),
        output_tokens=output,
        makespan_s=round(makespan_ns / NS_PER_S, 3),
        steps=sum(len(steps.end_ns) for steps, _ in replicas),
        busy=_share(busy_ns, makespan_ns * len(replicas)),
        output_tokens_per_s=round(output * NS_PER_S / max(1, makespan_ns), 2),
        ttft_ms=Spread.of(record.ttft_ns for record in served),
        tpot_ms=Spread.of(record.tpot_ns for record in served),
        total_ms=Spread.of(record.total_ns for record in served),
        retractions=sum(record.retractions for record in records),
        evicted_pages=sum(stats.evicted_pages for _, stats in replicas),
        most_waiting=max((int(steps.waiting.max(initial=0)) for steps, _ in replicas), default=0),
        mean_running=round(sum(int((s.rows * s.duration_ns).sum()) for s, _ in replicas) / max(1, busy_ns), 2),
        most_pages=max((int(steps.pages_busy.max(initial=0)) for steps, _ in replicas), default=0),
        pages=sum(stats.pages_total for _, stats in replicas),
    )


def by_group(records: Sequence[RequestRecord]) -> dict[str, Spread]:
    """TTFT of each group of requests; nothing if there is only one."""
    names = sorted({record.group for record in records})
    if len(names) < 2:
        return {}
    return {
        name: Spread.of(r.ttft_ns for r in records if r.group == name and r.reason.is_success)
        for name in names
    }  # fmt: skip


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """A run over time, in buckets of equal width; columns of equal length. Replicas are added up."""

    bucket_s: float
    waiting: list[int]
    """The most in the bucket."""
    running: list[float]
    """Rows, as a mean over the time of the bucket."""
    busy: list[float]
    """Share of the time in which workers computed."""
    prefill_tokens: list[int]
    decode_tokens: list[int]
    pages_busy: list[int]
    """The most in the bucket."""
    pages_cached: list[int]
    prompt_tokens: list[int]
    """Of requests admitted in the bucket."""
    cached_tokens: list[int]
    """What the cache served of them."""


def make_timeline(records: Sequence[RequestRecord], replicas: Sequence[Steps], buckets: int = 400) -> Timeline:
    """A step belongs to the buckets in which it ran, in proportion; its gauges to the bucket in which it ended."""
    end_ns = max((record.end_ns for record in records), default=0) + 1
    edges = np.linspace(0, end_ns, buckets + 1)
    width_ns = end_ns / buckets
    parts = [_spread_steps(steps, edges) for steps in replicas]
    prefill, decode, row_time, busy_time = np.sum(parts, axis=0)
    admitted = [record for record in records if record.admitted_ns is not None]
    place = np.array([int((record.admitted_ns or 0) / width_ns) for record in admitted], np.int64)
    prompt, cached = (
        np.bincount(place, np.array([getattr(r, name) for r in admitted], np.float64), buckets).astype(np.float64)
        for name in ("prompt_tokens", "cached_tokens")
    )
    return Timeline(
        bucket_s=round(width_ns / NS_PER_S, 6),
        waiting=_most(replicas, edges, "waiting"),
        running=_listed(row_time / width_ns, 2),
        busy=_listed(busy_time / width_ns / len(replicas), 4),
        prefill_tokens=_counts(prefill),
        decode_tokens=_counts(decode),
        pages_busy=_most(replicas, edges, "pages_busy"),
        pages_cached=_most(replicas, edges, "pages_cached"),
        prompt_tokens=_counts(prompt),
        cached_tokens=_counts(cached),
    )


def _spread_steps(steps: Steps, edges: Floats) -> Floats:
    """``[4, buckets]``: prefill tokens, decode tokens, rows times time, time; differences of interpolated running totals."""
    ends, lengths = steps.end_ns.astype(np.float64), steps.duration_ns.astype(np.float64)
    times = np.stack([ends - lengths, ends], axis=1).ravel()
    times = np.maximum.accumulate(times)
    totals = []
    for amount in (steps.prefill_tokens, steps.decode_tokens, steps.rows * lengths, lengths):
        after = np.cumsum(amount, dtype=np.float64)
        total = np.stack([after - amount, after], axis=1).ravel()
        totals.append(np.diff(np.interp(edges, times, total)) if len(times) else np.zeros(len(edges) - 1))
    return np.stack(totals)


def _most(replicas: Sequence[Steps], edges: Floats, column: str) -> list[int]:
    """The largest value of a gauge in each bucket; where no step ended, the value before."""
    total = np.zeros(len(edges) - 1, np.int64)
    for steps in replicas:
        own, values = np.full(len(edges) - 1, -1, np.int64), getattr(steps, column)
        np.maximum.at(own, np.clip(np.searchsorted(edges, steps.end_ns, "right") - 1, 0, len(own) - 1), values)
        last = np.maximum.accumulate(np.where(own >= 0, np.arange(len(own)), -1))
        total += np.where(last >= 0, own[np.maximum(last, 0)], 0)
    return [int(value) for value in total]


def _listed(values: Floats, digits: int) -> list[float]:
    return [round(float(value), digits) for value in values]


def _counts(values: Floats) -> list[int]:
    return [round(float(value)) for value in values]


def _share(part: int, whole: int) -> float:
    return round(part / whole, 5) if whole else 0.0


def _ms(ns: float) -> float:
    return round(ns / NS_PER_MS, 3)
