"""Orders that ask the prefix cache: what is cached costs nothing, and stays cached only if it is used soon."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby, takewhile
from typing import TypeAlias

from branchline.base.ids import PageId, SeqId
from branchline.sched.lifecycle import Seq
from branchline.sched.policies.port import OrderPolicy, PassFacts


class LongestPrefix(OrderPolicy):
    """Longest cached prefix first (SGLang's ``lpm``); ties in arrival order.

    Starvation bound: none. A cold request can wait for ever behind hot ones.
    """

    def order(self, line: Iterable[Seq], facts: PassFacts) -> Iterable[Seq]:
        return sorted(line, key=lambda seq: (seq.retractions == 0, -facts.cached_tokens(seq)))


class DfsWeight(OrderPolicy):
    """Depth first through the tree of cached prefixes, the branch with more waiting requests first (SGLang's
    ``dfs-weight``): those who share a prefix run together, while it is in the cache. Ties in arrival order.

    Starvation bound: none. A request in a thin branch can wait for ever while a thick one is refilled.
    """

    def order(self, line: Iterable[Seq], facts: PassFacts) -> Iterable[Seq]:
        arrivals: list[Leaf] = []
        for seq in line:
            if seq.retractions:
                yield seq
            else:
                arrivals.append((facts.cached_pages(seq), seq.seq, seq))
        yield from _depth_first(sorted(arrivals, key=lambda leaf: leaf[:2]))


Leaf: TypeAlias = tuple[tuple[PageId, ...], SeqId, Seq]
"""Cached pages, arrival, and who it is."""


def _depth_first(leaves: list[Leaf]) -> Iterator[Seq]:
    """Branches of a sorted trie by weight; whoever ends where branches part comes after all that goes on from there."""
    stack = [(0, leaves)]
    while stack:
        depth, members = stack.pop()
        depth = _common_pages(members, depth)
        ending = [leaf for leaf in members if len(leaf[0]) == depth]  # they are the first of them
        beyond = members[len(ending) :]
        if not beyond:
            yield from (seq for _, _, seq in ending)
            continue
        if ending:
            stack.append((depth, ending))
        branches = [list(branch) for _, branch in groupby(beyond, key=lambda leaf: leaf[0][depth])]
        # The stack hands out the last first: the heaviest branch, and of equal ones the one that arrived first.
        branches.sort(key=lambda branch: (len(branch), -min(arrival for _, arrival, _ in branch)))
        stack += [(depth, branch) for branch in branches]


def _common_pages(members: list[Leaf], depth: int) -> int:
    """How many leading pages all of the sorted ``members`` have in common; the first ``depth`` are known to be."""
    if not members:
        return depth
    first, last = members[0][0], members[-1][0]
    while depth < len(first) and first[depth] == last[depth]:
        depth += 1
    return depth


class Hrrn(OrderPolicy):
    """Highest response ratio next, in tokens: (work of the engine since arrival) / (uncached tokens). A hot request is
    first at once, a cold one when it has waited long in proportion to its size. Nobody is overtaken without end: once
    the engine has spent ``overtake_tokens`` on those who came later, a request is *due*, and due ones go first, in
    arrival order. Retracted work comes before all.

    Starvation bound: later arrivals are admitted before a request only while those of them that were admitted before
    have cost less than ``overtake_tokens``. So they cost it at most ``overtake_tokens`` plus the prompt of the one that
    crosses the line plus what those of them that run by then still generate, whatever the load. To this comes what is
    admitted while it follows a leader (``admission.FOLLOW_STEPS`` steps at most).

    Proof: work for later arrivals, seen from the elder of two who wait, contains that seen from the younger. So the
    due ones are always a prefix of the line; each is tried before everyone who came later; and what is tried and does
    not fit stops the pass (``compose``).
    """

    def __init__(self, overtake_tokens: int) -> None:
        self._overtake_tokens = overtake_tokens
        self._work_tokens = 0
        """Of the engine, since the start."""
        self._work_at_arrival: dict[SeqId, int] = {}
        """Of everyone from the oldest waiting arrival on, whatever became of them; in arrival order."""
        self._work_of: dict[SeqId, int] = {}
        """What the engine has spent on each of these."""
        self._recent_work = 0
        """Sum of that."""

    def order(self, line: Iterable[Seq], facts: PassFacts) -> Iterator[Seq]:
        waiting = list(line)
        ranked = sorted(waiting, key=lambda seq: (seq.retractions == 0, -self._ratio(seq, facts)))
        elders = deque(waiting)
        tried: set[SeqId] = set()
        for favourite in ranked:
            # Asked anew for each candidate: an admission in this very pass may have made somebody due.
            while elders and (elders[0].seq in tried or self.is_due(elders[0])):
                elder = elders.popleft()
                if elder.seq not in tried:
                    tried.add(elder.seq)
                    yield elder
            if favourite.seq not in tried:
                tried.add(favourite.seq)
                yield favourite

    def is_due(self, seq: Seq) -> bool:
        return seq.retractions > 0 or self.overtaken_tokens(seq) >= self._overtake_tokens

    def overtaken_tokens(self, seq: Seq) -> int:
        """Work for those who arrived after ``seq``. Cheap near the head of the line, where it is asked."""
        elders = takewhile(lambda other: other <= seq.seq, self._work_of)
        return self._recent_work - sum(self._work_of[other] for other in elders)

    def note_arrived(self, seq: Seq, line: Iterable[Seq]) -> None:
        self._work_at_arrival[seq.seq] = self._work_tokens
        self._work_of[seq.seq] = 0
        oldest = next(waiting.seq for waiting in line if not waiting.retractions)
        for elder in list(takewhile(lambda other: other < oldest, self._work_of)):
            del self._work_at_arrival[elder]
            self._recent_work -= self._work_of.pop(elder)

    def note_admitted(self, seq: Seq, uncached_tokens: int) -> None:
        self._note_work(seq, uncached_tokens)

    def note_generated(self, seq: Seq) -> None:
        self._note_work(seq, 1)

    def _note_work(self, seq: Seq, tokens: int) -> None:
        self._work_tokens += tokens
        if seq.seq in self._work_of:
            self._work_of[seq.seq] += tokens
            self._recent_work += tokens

    def _ratio(self, seq: Seq, facts: PassFacts) -> float:
        age = self._work_tokens - self._work_at_arrival.get(seq.seq, 0)
        return age / max(1, len(seq.tokens) - facts.cached_tokens(seq))
