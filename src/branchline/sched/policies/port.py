"""What the scheduler tells a policy and what it asks. A policy orders the line; it neither admits nor reserves.

Every order keeps retracted work before arrivals of the same rank: it has streamed tokens already.

"Work" is counted in tokens: uncached prompt tokens when a sequence is admitted, one for each token it generates. That is
the clock of the policies; there is no other.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from branchline.base.ids import PageId
from branchline.sched.lifecycle import Seq


@dataclass(frozen=True, slots=True)
class PassFacts:
    """What may be asked while one plan is made."""

    cached_tokens: Callable[[Seq], int]
    """Longest cached prefix of a waiting sequence, in tokens. May be a little stale, never costs much."""
    cached_pages: Callable[[Seq], tuple[PageId, ...]]
    """The whole pages of that prefix: sequences with equal first pages share a path of the tree."""


class OrderPolicy(Protocol):
    """Inherit from it: the verbs do nothing and everyone has the same precedence unless a policy says otherwise."""

    preemption_gap: int | None = None
    """Running work gives way to a waiting sequence whose precedence is higher by more than this; ``None``: never."""

    def order(self, line: Iterable[Seq], facts: PassFacts) -> Iterable[Seq]:
        """All of ``line``, first to be tried first. ``line`` comes in queue order: retracted work, then arrivals.

        Changes nothing, so that anybody may ask. May be lazy: whoever admits tells of each admission before it asks
        for the next sequence.
        """

    def precedence(self, seq: Seq) -> int:
        """Running work of lower precedence is given up first when memory runs short."""
        return 0

    def note_arrived(self, seq: Seq, line: Iterable[Seq]) -> None:
        """``seq`` has joined the end of ``line``."""
        return

    def note_admitted(self, seq: Seq, uncached_tokens: int) -> None:
        """``seq`` leaves the line; so many of its known tokens must be computed."""
        return

    def note_generated(self, seq: Seq) -> None:
        """``seq`` has generated one token."""
        return
