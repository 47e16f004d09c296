"""How much of each waiting sequence is cached, for policies: remembered, and looked up anew only so often that ordering a
long line stays cheap.

Knows: which figures are old. Refuses to know: what they are used for. Admission does not trust them: it matches again.
"""

from collections.abc import Iterable
from typing import NamedTuple

from branchline.base.ids import PageId, SeqId
from branchline.sched.kv import KvBooks
from branchline.sched.lifecycle import Seq
from branchline.sched.policies.port import PassFacts

FIRST_LOOKS = 64
"""Sequences that are looked up for the first time in one pass."""
SECOND_LOOKS = 16
"""Sequences that are looked up again in one pass because the cache has changed, those with the oldest figure first."""


class Known(NamedTuple):
    version: int
    """Of the cache when it was looked up; an unchanged cache need not be asked again."""
    tokens: int
    pages: tuple[PageId, ...]


NOT_LOOKED_UP = Known(-1, 0, ())
"""Counts as cold until its turn comes, which is in one of the next ``len(line) / FIRST_LOOKS`` passes."""


class MatchMemo:
    def __init__(self, kv: KvBooks) -> None:
        self._kv = kv
        self._known: dict[SeqId, Known] = {}
        """Oldest figure first."""
        self._line: Iterable[Seq] = ()
        self._is_fresh = True

    def start_pass(self, line: Iterable[Seq]) -> PassFacts:
        """Facts about ``line``. Nothing is looked up before somebody asks."""
        self._line = line
        self._is_fresh = False
        return PassFacts(lambda seq: self._look(seq).tokens, lambda seq: self._look(seq).pages)

    def _look(self, seq: Seq) -> Known:
        if not self._is_fresh:
            self._refresh()
            self._is_fresh = True
        return self._known.get(seq.seq, NOT_LOOKED_UP)

    def _refresh(self) -> None:
        version = self._kv.cache.version
        waiting = {seq.seq: seq for seq in self._line}
        known = {number: figure for number, figure in self._known.items() if number in waiting}
        new = [seq for number, seq in waiting.items() if number not in known]
        old = [waiting[number] for number, figure in known.items() if figure.version != version]
        for seq in (*new[:FIRST_LOOKS], *old[:SECOND_LOOKS]):
            match = self._kv.match(seq)
            known.pop(seq.seq, None)  # to the young end
            known[seq.seq] = Known(version, match.token_count, match.pages)
        self._known = known
