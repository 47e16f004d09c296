"""One engine in virtual time: the production loop, scheduler and cache around a simulated worker.

Knows: how the parts are joined and how far time may run. Refuses to know: what arrives and what is made of the news.
"""

from collections.abc import Callable, Iterable, Sequence

from branchline.base.config import EngineConfig
from branchline.base.errors import require
from branchline.core.ports import Observer
from branchline.core.result import Output
from branchline.core.stats import EngineStats
from branchline.engine.books import make_books
from branchline.engine.loop import Loop
from branchline.sched.scheduler import Scheduler
from branchline.sim.clock import VirtualClock
from branchline.sim.inbox import TimedInbox, TimedOutbox
from branchline.sim.worker import Durations, SimulatedWorker
from branchline.sim.workload import TimedMessage

FOREVER_NS = 1 << 62


class _Scheduler(Scheduler):
    """The scheduler, but that it does not prove its books whenever it comes to rest: that costs time for each page there is,
    and a simulation comes to rest very often and may have millions. :meth:`prove` does it once."""

    def check(self) -> None:
        """Later."""

    def prove(self) -> None:
        super().check()


class SimulatedEngine:
    """Hear messages, run until some moment, look at the clock."""

    def __init__(
        self,
        config: EngineConfig,
        durations: Durations,
        *,
        hear: Callable[[int, Sequence[Output]], None],
        after_turn: Callable[[EngineStats], None],
        observers: Sequence[Observer] = (),
    ) -> None:
        """``config.pages`` must be known.

        Args:
            hear: gets the news of a turn and their time.
            after_turn: gets a photograph after every turn that did something.
        """
        self.clock = VirtualClock()
        self._inbox = TimedInbox(self.clock)
        self._after_turn = after_turn
        self._scheduler = _Scheduler(config, *make_books(config), observers)
        worker = SimulatedWorker(durations, self.clock)
        self._loop = Loop(self._scheduler, worker, self._inbox, TimedOutbox(self.clock, hear), self.clock, config.depth)

    def put(self, messages: Iterable[TimedMessage]) -> None:
        """Messages yet to come."""
        for at_ns, message in messages:
            self._inbox.put(at_ns, message)

    def run_until(self, at_ns: int = FOREVER_NS) -> None:
        """Serve until the clock shows ``at_ns`` or later, or until there is nothing left to do.

        A turn that has begun is finished: a step is never cut in two.
        """
        while self.clock.now_ns() < at_ns:
            if self._loop.turn():
                self._after_turn(self._loop.stats())
            elif self._inbox.is_empty and self._scheduler.is_empty and at_ns == FOREVER_NS:
                return
            else:
                self._idle(at_ns)

    def prove(self) -> None:
        """Raises InvariantBroken if the books do not add up."""
        self._scheduler.prove()

    def _idle(self, at_ns: int) -> None:
        before_ns = self.clock.now_ns()
        self._loop.idle(at_ns - before_ns)
        require(self.clock.now_ns() < FOREVER_NS, "requests wait for something that never happens")
