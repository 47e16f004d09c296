"""Virtual time: nanoseconds that pass only when a simulated thing waits.

Knows: the time. Refuses to know: who waits for what.
"""


class VirtualClock:
    """Implements ``base.clock.Clock``. It never runs backwards and never runs by itself."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance_to(self, at_ns: int) -> None:
        """Let the time become ``at_ns``; nothing happens if that is past already."""
        self._now_ns = max(self._now_ns, at_ns)
