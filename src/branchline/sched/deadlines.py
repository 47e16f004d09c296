"""Until when each request must be served: limits of the server and of the request itself.

Knows: when the next deadline passes, so that a plan costs nothing before. Refuses to know: what an end means.
"""

from collections.abc import Iterable

from branchline.base.clock import NS_PER_S
from branchline.base.finish import FinishReason
from branchline.sched.lifecycle import Seq


class Deadlines:
    def __init__(self, waiting_limit_s: float | None, running_limit_s: float | None) -> None:
        self._waiting_limit_s = waiting_limit_s
        self._running_limit_s = running_limit_s
        self._next_ns: int | None = None
        """No live request's deadline is earlier. It may belong to one that has gone: then a look is wasted, no more."""

    def watch(self, seq: Seq) -> None:
        """A request has arrived, or was admitted for the first time."""
        self._note(self._deadline_ns(seq))

    def passed(self, everyone: Iterable[Seq], now_ns: int) -> list[Seq]:
        """Those of ``everyone`` whose time is over. Free of cost while no deadline has passed."""
        if self._next_ns is None or now_ns < self._next_ns:
            return []
        self._next_ns = None
        late: list[Seq] = []
        for seq in everyone:
            deadline = self._deadline_ns(seq)
            if deadline is not None and deadline <= now_ns:
                late.append(seq)
            else:
                self._note(deadline)
        return late

    @property
    def next_ns(self) -> int | None:
        """When to look again; ``None``: nobody has a deadline."""
        return self._next_ns

    def verdict(self, seq: Seq, now_ns: int) -> tuple[FinishReason, str]:
        """How a late request ends, and a sentence for its sender."""
        has_run = seq.first_admitted_ns is not None
        reason = FinishReason.RUNNING_TIMEOUT if has_run else FinishReason.WAITING_TIMEOUT
        own_ns = self._own_ns(seq)
        if own_ns is not None and own_ns <= now_ns:
            return reason, f"The request was not finished within its own limit of {seq.spec.timeout_s:g} s."
        if has_run:
            return reason, f"The request ran longer than {self._running_limit_s} s."
        return reason, f"The request waited longer than {self._waiting_limit_s} s to be served."

    def _deadline_ns(self, seq: Seq) -> int | None:
        """A request waits until it is first admitted, and runs from then on, retractions included."""
        if seq.first_admitted_ns is None:
            since, limit_s = seq.arrival_ns, self._waiting_limit_s
        else:
            since, limit_s = seq.first_admitted_ns, self._running_limit_s
        limits = (None if limit_s is None else since + int(limit_s * NS_PER_S), self._own_ns(seq))
        return min((limit for limit in limits if limit is not None), default=None)

    def _own_ns(self, seq: Seq) -> int | None:
        limit_s = seq.spec.timeout_s
        return None if limit_s is None else seq.arrival_ns + int(limit_s * NS_PER_S)

    def _note(self, deadline_ns: int | None) -> None:
        if deadline_ns is not None and (self._next_ns is None or deadline_ns < self._next_ns):
            self._next_ns = deadline_ns
