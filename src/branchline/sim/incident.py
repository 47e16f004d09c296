"""The traffic of a journal under other settings: what would have happened?

The same requests arrive at the same times and generate as much as they did then; steps take as long as a latency model says
that is fitted to the steps of the journal. So there are three columns, not two: what happened, what the model makes of it
under the settings of then (the difference is the model's error), and under other settings.

What cannot be known is filled in:

    a client left                  it leaves at the same moment, however far its answer is by then
    a request was never finished   (refused, timed out, ended by the operator) it generates as much as the median request did
    words of the operator          pauses and flushes are not repeated

Knows: how a replay becomes a workload. Refuses to know: how settings change it (`sim.run`), how it is shown (`cli.replay`).
"""

import dataclasses
import datetime
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from branchline.base.config import EngineConfig
from branchline.base.errors import ConfigError
from branchline.base.finish import FinishReason
from branchline.base.ids import RequestId, TokenId
from branchline.sim.latency import Fit, LatencyFile, LatencyModel, fit
from branchline.sim.replay import Replay
from branchline.sim.report import RequestRecord
from branchline.sim.run import SimulationResult, simulate
from branchline.sim.veil import BEGINNING, STOP, HashedNames, pack, unpack
from branchline.sim.worker import simulated_token
from branchline.sim.workload import Arrival, Workload

_OWN_ENDS = {FinishReason.STOP, FinishReason.LENGTH}


@dataclass(frozen=True, slots=True)
class Change:
    """A request that fares differently."""

    before: RequestRecord
    after: RequestRecord

    @property
    def ttft_ns(self) -> int:
        """By how much its first token comes later; 0 if there is none in either case."""
        before, after = self.before.ttft_ns, self.after.ttft_ns
        return 0 if before is None or after is None else after - before


@dataclass(frozen=True, slots=True)
class Comparison:
    """A journal beside two simulations of its traffic."""

    replay: Replay
    latency: LatencyModel
    as_then: SimulationResult
    """Under the settings of then."""
    otherwise: SimulationResult

    @property
    def step_error(self) -> float:
        """How far the latency model is off for one step of the journal, as a mean share of its duration."""
        samples = self.replay.story.samples
        return statistics.fmean(abs(self.latency.predict_ns(s.load) / s.duration_ns - 1) for s in samples)

    @property
    def makespan_error(self) -> float:
        """How far the simulation is off for all of it together; positive if it takes longer."""
        live = self.replay.summary
        return self.as_then.summary.makespan_s / live.makespan_s - 1 if live and live.makespan_s else 0.0

    @property
    def changes(self) -> list[Change]:
        """Simulated requests, those first whose first token is delayed most."""
        pairs = zip(self.as_then.requests, self.otherwise.requests, strict=True)
        return sorted((Change(*pair) for pair in pairs), key=lambda change: -change.ttft_ns)


def compare(replay: Replay, settings: Mapping[str, Any]) -> Comparison:
    """``settings``: fields of EngineConfig that shall differ.

    Raises:
        ConfigError: settings out of range, no requests, or too few steps to fit a latency model.
    """
    config = replay.header.config
    workload = as_workload(replay, replay.header.facts.name)
    latency, other = _fit(replay).model, _with(config, settings)
    return Comparison(replay, latency, simulate(config, workload, latency), simulate(other, workload, latency))


def _fit(replay: Replay) -> Fit:
    """The fit looks at each step by itself, and where their durations scatter it is drawn to the short ones. So it is
    scaled: the steps of the journal shall take as long together as they did."""
    samples = replay.story.samples
    fitted = fit(samples)
    predicted, measured = (sum(fitted.model.predict_ns(s.load) for s in samples), sum(s.duration_ns for s in samples))
    return fitted._replace(model=fitted.model.faster(predicted / max(1, measured)))


def _with(config: EngineConfig, settings: Mapping[str, Any]) -> EngineConfig:
    known = {field.name for field in dataclasses.fields(config)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ConfigError(f"there is no setting {unknown[0]!r}")
    return dataclasses.replace(config, **settings)


def read_journal(path: Path, scale: float | None = None) -> Workload:
    """The traffic of the latest run in a journal directory, for ``simulate`` and ``advise``.

    Raises:
        ConfigError: it cannot be read or replayed, holds no requests, or ``scale`` is not 1.
    """
    if scale not in (None, 1):
        raise ConfigError("the lengths in a journal cannot be scaled: they come with what prompts have in common")
    return as_workload(Replay.of(path), path.name)


def latency_file(replay: Replay) -> LatencyFile:
    """The speed of the engine that kept the journal, fitted to its steps. Raises ConfigError: there are too few."""
    header, fitted = replay.header, _fit(replay)
    day = datetime.datetime.fromtimestamp(header.began_unix_s, tz=datetime.UTC).date().isoformat()
    return LatencyFile(
        model=header.facts.name,
        executor=header.facts.executor,
        machine=f"{header.config.threads} threads",
        measured=f"{day}, run {header.run} of a journal",
        samples=len(replay.story.samples),
        page_size=header.config.page_size,
        pages=header.config.pages or 0,
        context_length=header.config.context_length or 0,
        latency=fitted.model,
        error=fitted.error,
    )


def as_workload(replay: Replay, name: str) -> Workload:
    """Arrivals from 0 on, with the lengths of then. Raises ConfigError: there are none."""
    story = replay.story
    records = {record.request_id: record for record in story.records}
    lengths = [r.output_tokens for r in records.values() if r.reason in _OWN_ENDS]
    typical = round(statistics.median(lengths)) if lengths else 1
    start_ns = min((arrival.at_ns for arrival in story.arrivals.values()), default=0)
    rename = _Renamer(replay)
    arrivals = [
        msgspec.structs.replace(
            arrival,
            at_ns=arrival.at_ns - start_ns,
            prompt=rename.prompt(arrival),
            output_tokens=_output_tokens(arrival, records.get(request_id), request_id in story.left_ns, typical),
            leaves_ns=story.left_ns[request_id] - start_ns if request_id in story.left_ns else None,
        )
        for request_id, arrival in story.arrivals.items()
    ]
    return Workload(name, tuple(arrivals))


def _output_tokens(arrival: Arrival, record: RequestRecord | None, left: bool, typical: int) -> int:
    """How much it generates; ``arrival.output_tokens`` is the most it was ready to take."""
    if left:
        return arrival.output_tokens
    if record is not None and (record.reason in _OWN_ENDS or record.reason is FinishReason.CANCELLED):
        return max(1, record.output_tokens)
    return max(record.output_tokens if record else 0, min(arrival.output_tokens, typical))


class _Renamer:
    """Simulated workers make up their tokens. Where a prompt goes on with what was generated for an earlier one, as it does
    in the next turn of a conversation, it must go on with what is made up for that one."""

    def __init__(self, replay: Replay) -> None:
        self._is_text = replay.header.tokens == "text"
        self._names = HashedNames(key=bytes(16))
        self._made_up: dict[TokenId, TokenId] = {}
        self._prompts: dict[RequestId, tuple[TokenId, ...]] = {}
        for request_id, arrival in replay.story.arrivals.items():
            outputs = replay.story.outputs.get(request_id, [])
            names = self._prefix_names((*arrival.prompt, *outputs))
            length = len(arrival.prompt)
            self._prompts[request_id] = names[:length]
            for position, name in enumerate(names[length:], start=length):
                if name != STOP:
                    self._made_up.setdefault(name, simulated_token(arrival.seed, position))

    def prompt(self, arrival: Arrival) -> tuple[TokenId, ...]:
        made_up = self._made_up
        return tuple(made_up.get(name, name) for name in self._prompts[arrival.request_id])

    def _prefix_names(self, tokens: tuple[TokenId, ...]) -> tuple[TokenId, ...]:
        """Names that tell the whole beginning, which those of a journal with text do not."""
        return unpack(self._names.after(BEGINNING, pack(tokens))) if self._is_text else tokens
