"""Several engines behind a router, in one virtual time.

Each engine has a clock of its own, and they meet at arrivals: before a request is routed, every engine runs up to that
moment. A step is never cut in two, so an engine may be ahead by the rest of a step; what it finished after the moment of the
arrival is told to the router only when that time has come. Knows: who is where. Refuses to know: how a replica is chosen
(``router``).
"""

import heapq
import itertools
from collections.abc import Sequence

from branchline.base.config import EngineConfig
from branchline.base.errors import ConfigError
from branchline.core.result import Output
from branchline.router.policy import ROUTING, RoutingPolicy
from branchline.sim.engine import FOREVER_NS, SimulatedEngine
from branchline.sim.report import Diary
from branchline.sim.run import SimulationResult, conclude, settle
from branchline.sim.worker import Durations
from branchline.sim.workload import Arrival, Workload


def simulate_fleet(
    config: EngineConfig, workload: Workload, latency: Durations, *, replicas: int, routing: str
) -> SimulationResult:
    """Every request of ``workload`` through one of ``replicas`` equal engines.

    Raises:
        ConfigError: there is no such routing, or no replica.
    """
    if routing not in ROUTING:
        raise ConfigError(f"there is no routing {routing!r}; choose one of {', '.join(ROUTING)}")
    if replicas < 1:
        raise ConfigError(f"a fleet needs at least one replica, not {replicas}")
    config = settle(config, workload)
    fleet = [_Replica(number, config, latency) for number in range(replicas)]
    _serve(fleet, workload, ROUTING[routing]())
    return conclude(config, workload, [replica.diary for replica in fleet])


def _serve(fleet: Sequence["_Replica"], workload: Workload, policy: RoutingPolicy) -> None:
    for at_ns, arrivals in itertools.groupby(workload.arrivals, key=lambda arrival: arrival.at_ns):
        for replica in fleet:
            replica.engine.run_until(at_ns)
        for arrival in arrivals:
            loads = {replica.number: replica.load_at(at_ns) for replica in fleet}
            fleet[policy.choose(arrival.prompt, loads)].take(arrival)
    for replica in fleet:
        replica.engine.run_until(FOREVER_NS)
        replica.engine.prove()


class _Replica:
    def __init__(self, number: int, config: EngineConfig, latency: Durations) -> None:
        self.number = number
        self.diary = Diary(number)
        self.engine = SimulatedEngine(
            config, latency, hear=self._hear, after_turn=self.diary.photograph, observers=(self.diary,)
        )
        self._in_flight = 0
        self._ends_ns: list[int] = []
        """When requests ended that the router still counts."""

    def load_at(self, now_ns: int) -> int:
        """Requests in flight, as the router sees it."""
        while self._ends_ns and self._ends_ns[0] <= now_ns:
            heapq.heappop(self._ends_ns)
            self._in_flight -= 1
        return self._in_flight

    def take(self, arrival: Arrival) -> None:
        self._in_flight += 1
        self.diary.expect(arrival)
        self.engine.put(arrival.messages())

    def _hear(self, now_ns: int, outputs: Sequence[Output]) -> None:
        self.diary.hear(now_ns, outputs)
        for output in outputs:
            if output.finish is not None:
                heapq.heappush(self._ends_ns, now_ns)
