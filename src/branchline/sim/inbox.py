"""The two ends of the loop in virtual time: messages that arrive at given times, and news noted with theirs.

Knows: when a message is due. Refuses to know: where messages come from and what becomes of the news.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence

from branchline.base.errors import require
from branchline.core.result import Output
from branchline.sim.clock import VirtualClock
from branchline.wire.messages import Controlled, ToEngine, Told


class TimedInbox:
    """Implements ``engine.ports.Inbox``. To wait is to advance the clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._queue: list[tuple[int, int, ToEngine]] = []
        self._numbers = itertools.count()

    def put(self, at_ns: int, message: ToEngine) -> None:
        """A message that arrives at ``at_ns``; those of one moment arrive in the order in which they were put."""
        heapq.heappush(self._queue, (at_ns, next(self._numbers), message))

    @property
    def is_empty(self) -> bool:
        """Nothing will ever arrive, unless somebody puts it."""
        return not self._queue

    def drain(self) -> list[ToEngine]:
        now_ns, messages = self._clock.now_ns(), list[ToEngine]()
        while self._queue and self._queue[0][0] <= now_ns:
            messages.append(heapq.heappop(self._queue)[2])
        return messages

    def wait(self, timeout_ns: int | None) -> None:
        """Advance the clock to the next arrival, or by ``timeout_ns`` if that is sooner."""
        ends = [self._queue[0][0]] if self._queue else []
        if timeout_ns is not None:
            ends.append(self._clock.now_ns() + timeout_ns)
        require(bool(ends), "waiting for a message that will never come")
        self._clock.advance_to(min(ends))


class TimedOutbox:
    """Implements ``engine.ports.Outbox``: hands every piece of news on, with the time."""

    def __init__(self, clock: VirtualClock, hear: Callable[[int, Sequence[Output]], None]) -> None:
        self._clock = clock
        self._hear = hear
        self.replies: list[Controlled | Told] = []

    def publish(self, outputs: Sequence[Output]) -> None:
        self._hear(self._clock.now_ns(), outputs)

    def reply(self, answer: Controlled | Told) -> None:
        self.replies.append(answer)
