"""A worker that computes nothing: it takes the time that a latency model says, and answers with invented tokens.

Knows: virtual time, which token follows which position. Refuses to know: arrays, page contents, when a request ends.
"""

from dataclasses import dataclass
from typing import Protocol

from branchline.base.errors import InvariantBroken
from branchline.base.ids import Slot, StepId, TokenId
from branchline.base.rng import mix64
from branchline.core.plan import StepPlan
from branchline.core.ports import Ticket
from branchline.core.result import RowResult, StepResult
from branchline.sim.clock import VirtualClock

OUTPUT_TOKENS_FROM = 1 << 30
"""Invented tokens are ``[this, 2 * this)``, so that they never equal a token of a prompt by accident."""


class Durations(Protocol):
    def duration_ns(self, plan: StepPlan) -> int:
        """How long a worker needs for a plan."""


def simulated_token(seed: int, position: int) -> TokenId:
    """The token at ``position`` of a sequence with ``seed``: a pure function, so that a workload can send an output again
    as part of a later prompt and find it in the cache."""
    return OUTPUT_TOKENS_FROM | (mix64(seed * 0x9E3779B97F4A7C15 + position) >> 34)


@dataclass(frozen=True, slots=True)
class SimulatedTicket:
    step: StepId
    ends_ns: int
    result: StepResult


class SimulatedWorker:
    """Implements ``core.ports.Worker``. Steps run one after the other, as on one worker thread: a step launched while
    another runs starts when that one ends. To collect a step is to wait for its end."""

    def __init__(self, durations: Durations, clock: VirtualClock) -> None:
        self._durations = durations
        self._clock = clock
        self._busy_until_ns = 0
        self._seeds: dict[Slot, int] = {}

    def launch(self, plan: StepPlan) -> Ticket:
        duration_ns = self._durations.duration_ns(plan)
        self._busy_until_ns = max(self._clock.now_ns(), self._busy_until_ns) + duration_ns
        return SimulatedTicket(plan.step, self._busy_until_ns, self._run(plan, duration_ns))

    def collect(self, ticket: Ticket) -> StepResult:
        if not isinstance(ticket, SimulatedTicket):
            raise InvariantBroken("this ticket is another worker's")
        self._clock.advance_to(ticket.ends_ns)
        return ticket.result

    def close(self) -> None:
        """There is nothing to let go of."""

    def _run(self, plan: StepPlan, duration_ns: int) -> StepResult:
        """Rows are answered at launch, while their slots are still theirs."""
        for opening in plan.opens:
            self._seeds[opening.slot] = opening.seed
        seeds = self._seeds
        rows = tuple(
            RowResult(row.seq, row.epoch, simulated_token(seeds[row.slot], row.start + row.count) if row.sample else None)
            for row in plan.rows
        )
        return StepResult(plan.step, rows, duration_ns)
