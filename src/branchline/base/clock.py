"""The one door for time. Nanoseconds since an arbitrary origin, never decreasing, always passed in.

Refuses to know: the calendar. Only ``api`` asks for wall-clock seconds, and only to print them.
"""

import time
from typing import Protocol

NS_PER_S = 1_000_000_000


class Clock(Protocol):
    def now_ns(self) -> int:
        """Monotonic nanoseconds."""


class MonotonicClock:
    def now_ns(self) -> int:
        return time.monotonic_ns()


class ManualClock:
    """A clock that moves only when told to: tests and the simulator."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance(self, ns: int) -> None:
        if ns < 0:
            raise ValueError("time does not run backwards")
        self._now_ns += ns
