"""Whether a waiting sequence may run now. Admission reserves real pages for every known token, so that nothing it
admits can fail for want of memory before its first new token.

Knows: pages, the promise of new tokens, leaders. Refuses to know: the order of candidates and the token budget.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import replace

from branchline.base.ids import StepId, TokenId
from branchline.core.plan import PageCopy
from branchline.core.ports import Match
from branchline.sched.budget import CLIP_NEW_TOKENS, NewTokenRatio
from branchline.sched.kv import KvBooks
from branchline.sched.lifecycle import Seq
from branchline.sched.notes import Notes
from branchline.sched.roster import Roster

FOLLOW_PAGES = 2
"""A candidate waits for a leader only if that saves at least so many pages."""
FOLLOW_STEPS = 64
"""And not for longer than so many steps in all: a leader may be slow."""
RECOVERED_SHARE = 0.25
"""After a retraction nobody is admitted until a sequence has finished or this share of the pages is available."""


class Verdict(enum.Enum):
    ADMITTED = enum.auto()
    FOLLOWS = enum.auto()
    """Somebody who runs is computing the same prefix; it will be in the cache in a moment."""
    NO_PAGES = enum.auto()


class Admission:
    def __init__(self, roster: Roster, kv: KvBooks, ratio: NewTokenRatio, notes: Notes, *, followers: bool) -> None:
        """``followers``: whether waiting for a leader can help, that is: whether prefixes are shared at all."""
        self._roster = roster
        self._followers = followers
        self._kv = kv
        self._ratio = ratio
        self._notes = notes
        self._recovering = False

    def note_retraction(self) -> None:
        self._recovering = True

    def note_finish(self) -> None:
        self._recovering = False

    @property
    def is_open(self) -> bool:
        """False while memory recovers from a retraction: a victim must not come back at once (hysteresis)."""
        if self._recovering and self._roster.running:
            return self._kv.available_pages >= RECOVERED_SHARE * self._kv.ledger.page_count
        return True

    def consider(self, seq: Seq, step: StepId, now_ns: int, copies: list[PageCopy]) -> Verdict:
        """Admit ``seq`` into the plan ``step`` if it fits; append to ``copies`` what the plan must copy first."""
        match = self._kv.match(seq)
        leader = self._leader(seq, match.token_count, step)
        if leader is not None:
            seq.follow(step)
            self._notes.follows(seq, leader)
            return Verdict.FOLLOWS
        match = replace(match, path=self._kv.cache.cut(match))
        if self._admit(seq, match, step, now_ns, copies):
            return Verdict.ADMITTED
        # Alone and still too large: the lock on the page to be copied keeps that page, and those that lead to it.
        if not self._roster.running and self._admit(seq, replace(match, tail=None), step, now_ns, copies):
            return Verdict.ADMITTED
        return Verdict.NO_PAGES

    def is_led(self, seq: Seq, step: StepId) -> bool:
        """Whether somebody who runs computes a prefix that ``seq`` would wait for."""
        return self._leader(seq, self._kv.match(seq).token_count, step) is not None

    def short_pages(self, seq: Seq, now_ns: int) -> int:
        """Pages that lack before ``seq`` can be admitted, those of steps in flight not counted as lacking."""
        match = self._kv.match(seq)
        path = self._kv.cache.cut(match)
        self._kv.cache.lock(path, now_ns)
        needed = self._kv.pages_for(len(seq.tokens)) - len(match.pages) + self.promised_pages((seq,))
        coming = self._kv.available_pages + self._kv.ledger.retired_pages
        self._kv.cache.unlock(path, 0)
        return max(0, needed - coming)

    def _admit(self, seq: Seq, match: Match, step: StepId, now_ns: int, copies: list[PageCopy]) -> bool:
        cache = self._kv.cache
        cache.lock(match.path, now_ns)  # what is locked is not evictable any more: count only after this
        if match.tail is not None:
            cache.lock(match.tail.path, now_ns)  # until the copy is planned
        private = self._reserve(seq, match)
        if match.tail is not None:
            cache.unlock(match.tail.path, step if private is not None else 0)
        if private is None:
            cache.unlock(match.path, 0)
            return False
        if match.tail is not None:
            copies.append(PageCopy(match.tail.page, private[0], match.tail.token_count))
        cache.use(match.path, seq.spec.priority)
        self._roster.admit(seq, match.path, match.pages, private, match.token_count, now_ns)
        self._notes.admitted(seq, match)
        return True

    def _reserve(self, seq: Seq, match: Match) -> tuple[int, ...] | None:
        needed = self._kv.pages_for(len(seq.tokens)) - len(match.pages)
        promised = self.promised_pages((seq,)) if self._roster.running else 0
        if needed + promised > (available := self._kv.available_pages):
            self._notes.short(needed, promised, available)
            return None
        return self._kv.take(seq, needed)

    def promised_pages(self, candidates: Sequence[Seq] = ()) -> int:
        """Pages kept for new tokens of everyone who runs and of the candidates, at the current ratio."""
        everyone = (*self._roster.running.values(), *candidates)
        tokens = sum(min(seq.remaining_tokens, CLIP_NEW_TOKENS) for seq in everyone)
        return self._kv.pages_for(int(tokens * self._ratio.value)) + 1

    def _leader(self, seq: Seq, cached_tokens: int, step: StepId) -> Seq | None:
        """A running prompt that will soon have cached more of this sequence than the cache has now.

        No deadlock: a leader holds its pages already and computes in every step until its prompt is done.
        """
        if not self._followers or seq.followed_steps(step) >= FOLLOW_STEPS:
            return None
        saved = FOLLOW_PAGES * self._kv.page_size
        limit = seq.match_limit
        return next((
            leader
            for leader in self._leaders()
            if leader.spec.namespace == seq.spec.namespace
            and (common := min(common_prefix(seq.tokens, leader.tokens), limit, leader.prefill_end)) >= cached_tokens + saved
            and leader.computed < common // self._kv.page_size * self._kv.page_size
        ), None)  # fmt: skip

    def _leaders(self) -> Iterable[Seq]:
        return (seq for seq in self._roster.running.values() if seq.computed < seq.prefill_end)


def common_prefix(a: list[TokenId], b: list[TokenId]) -> int:
    """Length of the longest common prefix, by doubling and bisection over slices (which compare at native speed)."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
