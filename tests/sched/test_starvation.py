"""Starvation bounds in virtual time: hot traffic that shares a prefix, and a few cold requests in between.

Eight slots and 24 tokens a step; a hot request brings 8 tokens of its own after a common prefix of 48, a cold one 160. The
engine can serve one request a turn of this mixture.
"""

import random
from collections import defaultdict

import pytest

from branchline.core.events import Admitted, Submitted
from tests.support.harness import Harness

SHARED = list(range(48))
COLD, HOT = 160, 8
SLOTS, MOST_NEW = 8, 8
TURNS = 1200
CAP = 400
"""``overtake_tokens`` in here."""


class Scales:
    """Weighs independently of the policy what the engine did for whom: an observer, and a reader of outputs."""

    def __init__(self) -> None:
        self.line: dict[str, int] = {}
        """Arrival numbers of those who have not been admitted."""
        self.number: dict[str, int] = {}
        self.prompt: dict[str, int] = {}
        self.work: defaultdict[str, int] = defaultdict(int)
        self.most_overtaken = 0
        """The most work for later arrivals that anybody had seen when one more overtook it."""
        self._read = 0

    def notice(self, event) -> None:
        match event:
            case Submitted():
                self.number[event.request_id] = self.line[event.request_id] = len(self.number)
                self.prompt[event.request_id] = event.prompt_tokens
            case Admitted():
                self.admitted(event.request_id, event.cached_tokens)

    def admitted(self, name: str, cached: int) -> None:
        mine = self.line.pop(name)
        oldest = min(self.line.values(), default=mine)
        if oldest < mine:
            later = sum(work for other, work in self.work.items() if self.number[other] > oldest)
            self.most_overtaken = max(self.most_overtaken, later)
        self.work[name] += self.prompt[name] - cached

    def read(self, harness: Harness) -> None:
        for output in harness.outbox.outputs[self._read :]:
            self.work[output.request_id] += len(output.tokens)
        self._read = len(harness.outbox.outputs)


class Race:
    """One policy under one seeded load."""

    def __init__(self, policy: str, load: float = 0.95, turns: int = TURNS, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.scales = Scales()
        self.harness = Harness(
            [self.scales], policy=policy, overtake_tokens=CAP, pages=256, page_size=4, max_running=SLOTS, max_step_tokens=24,
            max_queued=10_000, check_every=100, vocabulary=997,
        )  # fmt: skip
        self.harness.submit("warm", SHARED, max_new=1)
        self.harness.run()
        self.arrived: dict[str, int] = {}
        self.waited: dict[str, int] = {}
        """Turns from arrival to the first token."""
        self.busy_turns = 0
        credit = 0.0
        for _ in range(turns):
            credit += load
            while credit >= 1:
                credit -= 1
                self.submit()
            self.turn()
        stats = self.harness.scheduler.stats()
        self.left_waiting = stats.waiting
        self.tokens_per_turn = stats.computed_tokens / stats.steps
        for name, turn in self.arrived.items():
            self.waited.setdefault(name, self.harness.turns - turn)

    def submit(self) -> None:
        kind = "cold" if self.rng.random() < 0.05 else "hot"
        name = f"{kind}{len(self.arrived)}"
        own = [self.rng.randrange(900) for _ in range(COLD if kind == "cold" else HOT)]
        self.harness.submit(name, own if kind == "cold" else SHARED + own, max_new=self.rng.randint(4, MOST_NEW))
        self.arrived[name] = self.harness.turns

    def turn(self) -> None:
        seen = len(self.harness.outbox.outputs)
        self.busy_turns += self.harness.turn()
        self.scales.read(self.harness)
        for output in self.harness.outbox.outputs[seen:]:
            if output.tokens and output.request_id in self.arrived:
                self.waited.setdefault(output.request_id, self.harness.turns - self.arrived[output.request_id])

    def p99(self, kind: str) -> int:
        waits = sorted(turns for name, turns in self.waited.items() if name.startswith(kind))
        return waits[int(0.99 * (len(waits) - 1))]

    @property
    def mean(self) -> float:
        return sum(self.waited.values()) / len(self.waited)


@pytest.fixture(scope="module")
def races():
    """At 95 % of what the engine can serve."""
    return {policy: Race(policy) for policy in ("fcfs", "lpm", "hrrn")}


def test_the_engine_is_busy_and_the_line_is_not_endless(races):
    for race in races.values():
        assert race.busy_turns > 0.95 * TURNS
        assert race.left_waiting < 0.1 * len(race.arrived)


def test_hrrn_lets_nobody_be_overtaken_by_more_than_its_cap(races):
    assert 0 < races["hrrn"].scales.most_overtaken < CAP


def test_lpm_has_no_such_bound(races):
    assert races["lpm"].scales.most_overtaken > 3 * CAP


def test_cold_requests_starve_under_lpm_and_not_under_hrrn(races):
    """What later arrivals may cost is the cap, one prompt, and what the running ones generate; at the pace of the engine."""
    fcfs, lpm, hrrn = (races[policy].p99("cold") for policy in ("fcfs", "lpm", "hrrn"))
    bound = fcfs + (CAP + COLD + SLOTS * MOST_NEW) / races["hrrn"].tokens_per_turn
    assert hrrn <= bound < lpm


def test_hrrn_makes_the_mean_wait_no_longer_than_fcfs(races):
    assert races["hrrn"].mean < races["fcfs"].mean


def test_the_bound_holds_beyond_the_capacity():
    """There the line grows for ever, and lpm admits hardly any cold request; hrrn comes near to fcfs."""
    fcfs, lpm, hrrn = (Race(policy, load=1.2, turns=600) for policy in ("fcfs", "lpm", "hrrn"))
    assert hrrn.scales.most_overtaken < CAP < lpm.scales.most_overtaken / 3
    assert lpm.p99("cold") > 2 * fcfs.p99("cold")
    assert hrrn.p99("cold") < 1.5 * fcfs.p99("cold")
