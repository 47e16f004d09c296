"""Which settings suit a workload? Tries some in virtual time and says what it found, in figures and in words.

    search      one setting after the other, each over a few values, the best kept; what makes no difference stays as it is
    headroom    how much faster the same requests may arrive before the engine no longer keeps up
    bottleneck  at that point, twice of each resource in turn: which one helps most?

Knows: how to judge a result and how to look around. Refuses to know: traces, machines, how advice is shown.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from branchline.base.config import EngineConfig
from branchline.sim.latency import LatencyModel
from branchline.sim.report import NS_PER_MS, RequestRecord, Summary
from branchline.sim.run import SimulationResult, settle, simulate
from branchline.sim.workload import Workload

ROWS = (8, 16, 32, 64, 128)
STEP_TOKENS = (64, 128, 256, 512, 1024, 2048)
POLICIES = ("hrrn", "fcfs", "lpm")
PAGE_SHARES = (1 / 2, 1 / 4, 1 / 8)
"""Of the pages there are: would fewer do?"""
WORTH_IT = 0.02
"""A change of settings must make things better by this share; fewer pages may make them worse by it."""
KEEPS_UP = 0.95
"""Share of the requests that must be served within the goal."""
SLOWDOWN = 4
"""Without a goal: how many times as long as alone a mean request may take."""
ALONE_RATE = 1e-3
"""Arrivals so much slower that no request meets another."""
DOUBLINGS = 4
BISECTIONS = 3

Progress = Callable[[int], None]
"""Hears of each run that is done: its number."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a request may take; ``None``: not a goal."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def is_open(self) -> bool:
        return self.ttft_ms is None and self.tpot_ms is None

    def is_met(self, record: RequestRecord) -> bool:
        return (
            record.reason.is_success
            and _within(record.ttft_ns, self.ttft_ms)
            and _within(record.tpot_ns, self.tpot_ms)
        )  # fmt: skip


class Relief(msgspec.Struct, frozen=True, kw_only=True):
    """What twice of something would bring at the edge of the headroom."""

    name: str
    total_ms: float
    """Mean time from arrival to end, with twice of it."""
    gain: float
    """Share of that time which it saves."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    settings: dict[str, Any]
    """Recommended: ``pages``, ``max_step_tokens``, ``max_running``, ``policy``."""
    summary: Summary
    """With these."""
    share_within_goal: float
    before: Summary
    """With the settings there were."""
    before_share: float
    keeps_up: bool
    headroom: float
    """How many times as fast the requests may arrive while the engine keeps up; below 1 if it does not now, 16 at most."""
    bottleneck: str
    reliefs: list[Relief]
    """Most useful first."""
    runs: int


@dataclass(frozen=True, slots=True)
class _Verdict:
    config: EngineConfig
    result: SimulationResult
    share: float
    """Of requests within the goal."""

    @property
    def cost(self) -> float:
        """To be made small: requests beyond the goal count most, then the mean time from arrival to end."""
        missed = 1 - self.share
        return (1 + 10 * missed) * self.result.summary.total_ms.mean


class Adviser:
    """Runs simulations and counts them. The same question gets the same answer."""

    def __init__(
        self, workload: Workload, latency: LatencyModel, goal: Goal, progress: Progress = lambda runs: None
    ) -> None:
        self._workload = workload
        self._latency = latency
        self._goal = goal
        self._progress = progress
        self._known: dict[tuple[EngineConfig, float, float], _Verdict] = {}

    def advise(self, config: EngineConfig) -> Advice:
        """Start from ``config``, never with more pages than it has."""
        config = settle(config, self._workload)
        before = self._try(config)
        best = self._search(before)
        edge = self._headroom(best.config)
        reliefs = self._reliefs(best.config, max(edge, 1.0))
        return Advice(
            settings={name: getattr(best.config, name) for name in ("pages", "max_step_tokens", "max_running", "policy")},
            summary=best.result.summary,
            share_within_goal=round(best.share, 4),
            before=before.result.summary,
            before_share=round(before.share, 4),
            keeps_up=self._keeps_up(best.config, 1.0),
            headroom=round(edge, 2),
            bottleneck=_bottleneck(reliefs),
            reliefs=reliefs,
            runs=len(self._known),
        )

    # ------------------------------------------------------------ search

    def _search(self, start: _Verdict) -> _Verdict:
        best = start
        for name, values in (("max_running", ROWS), ("max_step_tokens", STEP_TOKENS), ("policy", POLICIES)):
            for value in values:
                best = self._better(best, _changed(best.config, **{name: value}))
        return self._fewer_pages(best)

    def _better(self, best: _Verdict, config: EngineConfig) -> _Verdict:
        rival = self._try(config)
        return rival if rival.cost < best.cost * (1 - WORTH_IT) else best

    def _fewer_pages(self, best: _Verdict) -> _Verdict:
        """The smallest share of the pages with which nothing is lost; room for all who ran at once stays."""
        pages = best.config.pages or 0
        least = min(pages, max(best.result.summary.most_pages, self._workload.longest_tokens // best.config.page_size + 1))
        chosen = best
        for share in PAGE_SHARES:
            rival = self._try(_changed(best.config, pages=max(least, math.ceil(pages * share))))
            if rival.cost > best.cost * (1 + WORTH_IT):
                break
            chosen = rival
        return chosen

    # ------------------------------------------------------------ headroom

    def _headroom(self, config: EngineConfig) -> float:
        """Doubles or halves the rate of arrivals until the answer changes, then bisects."""
        keeps_up = self._keeps_up(config, 1.0)
        factor = 2.0 if keeps_up else 0.5
        low = high = 1.0
        for _ in range(DOUBLINGS):
            low, high = (low, factor * high) if keeps_up else (factor * low, high)
            if self._keeps_up(config, high if keeps_up else low) != keeps_up:
                break
            low, high = (high, high) if keeps_up else (low, low)
        if low == high:
            return low
        for _ in range(BISECTIONS):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._keeps_up(config, middle) else (low, middle)
        return low

    def _keeps_up(self, config: EngineConfig, rate: float) -> bool:
        """Within the goal; without one: a mean request takes not much longer than if it were alone."""
        verdict = self._try(config, rate=rate)
        if not self._goal.is_open:
            return verdict.share >= KEEPS_UP
        alone = self._try(config, rate=ALONE_RATE)
        return verdict.result.summary.total_ms.mean <= SLOWDOWN * alone.result.summary.total_ms.mean

    def _reliefs(self, config: EngineConfig, rate: float) -> list[Relief]:
        now = self._try(config, rate=rate).result.summary.total_ms.mean
        doubled: dict[str, tuple[EngineConfig, float]] = {
            "KV pages": (_changed(config, pages=2 * (config.pages or 0)), 1.0),
            "row cap": (_changed(config, max_running=2 * config.max_running), 1.0),
            "step budget": (_changed(config, max_step_tokens=2 * config.max_step_tokens), 1.0),
            "speed of the worker": (config, 2.0),
        }
        reliefs = []
        for name, (other, speed) in doubled.items():
            then = self._try(other, rate=rate, speed=speed).result.summary.total_ms.mean
            reliefs.append(Relief(name=name, total_ms=then, gain=round(1 - then / now, 4)))
        return sorted(reliefs, key=lambda relief: -relief.gain)

    # ------------------------------------------------------------ runs

    def _try(self, config: EngineConfig, *, rate: float = 1.0, speed: float = 1.0) -> _Verdict:
        key = (config, rate, speed)
        if key not in self._known:
            result = simulate(config, self._workload.at_rate(rate), self._latency.faster(speed))
            met = sum(self._goal.is_met(record) for record in result.requests)
            self._known[key] = _Verdict(config, result, met / len(result.requests))
            self._progress(len(self._known))
        return self._known[key]


def _bottleneck(reliefs: Sequence[Relief]) -> str:
    """A setting, if one helps to speak of; else the worker, which always would."""
    settings = [relief for relief in reliefs if relief.name != "speed of the worker"]
    return settings[0].name if settings[0].gain > 5 * WORTH_IT else "speed of the worker"


def _changed(config: EngineConfig, **changes: Any) -> EngineConfig:
    """With a step budget that is never below the row cap."""
    rows = changes.get("max_running", config.max_running)
    budget = changes.get("max_step_tokens", config.max_step_tokens)
    if "max_step_tokens" in changes:
        rows = min(rows, budget)
    return dataclasses.replace(config, **changes | {"max_running": rows, "max_step_tokens": max(rows, budget)})


def _within(value_ns: int | None, limit_ms: float | None) -> bool:
    return limit_ms is None or value_ns is None or value_ns <= limit_ms * NS_PER_MS
