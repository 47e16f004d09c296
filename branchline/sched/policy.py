"""Who is tried first. A policy orders the waiting line; it neither admits nor reserves.

Requeued work keeps its place before arrivals under every policy: it has streamed tokens already.
Knows: waiting sequences and how much of each is cached. Refuses to know: memory, budgets, time.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from branchline.sched.lifecycle import Seq

CachedTokens = Callable[[Seq], int]
"""Longest cached prefix of a waiting sequence, in tokens. May be a little stale, never costs much."""


class OrderPolicy(Protocol):
    def order(self, waiting: Iterable[Seq], cached_tokens: CachedTokens) -> list[Seq]:
        """The same sequences, first to be tried first. ``waiting`` comes in queue order."""


class Fcfs:
    """First come, first served.

    Starvation bound: a request is passed only by those that arrived before it.
    """

    def order(self, waiting: Iterable[Seq], cached_tokens: CachedTokens) -> list[Seq]:
        return list(waiting)


class LongestPrefix:
    """Longest cached prefix first (SGLang's ``lpm``); ties in arrival order.

    Starvation bound: none. A cold request can wait for ever behind hot ones.
    """

    def order(self, waiting: Iterable[Seq], cached_tokens: CachedTokens) -> list[Seq]:
        return sorted(waiting, key=lambda seq: (seq.retractions == 0, -cached_tokens(seq)))


POLICIES: dict[str, Callable[[], OrderPolicy]] = {"fcfs": Fcfs, "lpm": LongestPrefix}
"""The one door for policies: a name and a way to make it."""
