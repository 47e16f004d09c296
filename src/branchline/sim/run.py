"""Run a workload through an engine in virtual time.

    result = simulate(EngineConfig(pages=2048), read_trace(Path("trace.jsonl")), LatencyFile.load(path).latency)

The scheduler, the cache and the loop are those of production; what differs is who computes and who moves the clock. The same
arguments give the same result, to the byte. Knows: one engine, one workload. Refuses to know: files, fleets (``sim.fleet``).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from branchline.base.config import EngineConfig
from branchline.base.errors import require
from branchline.core.ports import Observer
from branchline.core.stats import EngineStats
from branchline.sim.engine import SimulatedEngine
from branchline.sim.report import Diary, RequestRecord, Steps, Summary, summarize
from branchline.sim.worker import Durations
from branchline.sim.workload import Workload


@dataclass(frozen=True, slots=True)
class ReplicaResult:
    """What one engine did."""

    steps: Steps
    stats: EngineStats
    """At the end."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    config: EngineConfig
    """As it was run: nothing is left open."""
    workload: Workload
    requests: tuple[RequestRecord, ...]
    """In the order of arrival."""
    replicas: tuple[ReplicaResult, ...]
    summary: Summary


def simulate(
    config: EngineConfig, workload: Workload, latency: Durations, observers: Sequence[Observer] = ()
) -> SimulationResult:
    """Every request of ``workload`` through one engine, to its end."""
    config = settle(config, workload)
    diary = Diary()
    engine = SimulatedEngine(config, latency, hear=diary.hear, after_turn=diary.photograph, observers=(diary, *observers))
    for arrival in workload.arrivals:
        diary.expect(arrival)
        engine.put(arrival.messages())
    engine.run_until()
    engine.prove()
    return conclude(config, workload, [diary])


def settle(config: EngineConfig, workload: Workload) -> EngineConfig:
    """Fill in what ``config`` leaves open: without a model and a machine, as much as the workload can ever use."""
    return dataclasses.replace(
        config,
        pages=config.pages or workload.most_pages(config.page_size),
        context_length=config.context_length or workload.longest_tokens,
    )


def conclude(config: EngineConfig, workload: Workload, diaries: Sequence[Diary]) -> SimulationResult:
    """Diaries of replicas to a result."""
    replicas = tuple(ReplicaResult(diary.steps, diary.stats) for diary in diaries)
    order = {arrival.request_id: place for place, arrival in enumerate(workload.arrivals)}
    records = sorted((r for diary in diaries for r in diary.records), key=lambda record: order[record.request_id])
    require(len(records) == len(workload), "every request ends exactly once")
    summary = summarize(records, [(replica.steps, replica.stats) for replica in replicas])
    return SimulationResult(config, workload, tuple(records), replicas, summary)
