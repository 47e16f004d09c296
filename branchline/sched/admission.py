"""Whether a waiting sequence may run now. Admission reserves real pages for every known token, so that nothing it
admits can fail for want of memory before its first new token.

Knows: pages, the promise of new tokens, leaders. Refuses to know: the order of candidates and the token budget.
"""

import enum
from collections.abc import Iterable

from branchline.base.ids import StepId, TokenId
from branchline.core.plan import PageCopy
from branchline.core.ports import Match
from branchline.sched.budget import CLIP_NEW_TOKENS, NewTokenRatio
from branchline.sched.kv import KvBooks
from branchline.sched.lifecycle import Seq
from branchline.sched.roster import Roster

FOLLOW_PAGES = 2
"""A candidate waits for a leader only if that saves at least so many pages."""
RECOVERED_SHARE = 0.25
"""After a retraction nobody is admitted until a sequence has finished or this share of the pages is available."""


class Verdict(enum.Enum):
    ADMITTED = enum.auto()
    FOLLOWS = enum.auto()
    """Somebody who runs is computing the same prefix; it will be in the cache in a moment."""
    NO_PAGES = enum.auto()


class Admission:
    def __init__(self, roster: Roster, kv: KvBooks, ratio: NewTokenRatio, *, followers: bool) -> None:
        """``followers``: whether waiting for a leader can help, that is: whether prefixes are shared at all."""
        self._roster = roster
        self._followers = followers
        self._kv = kv
        self._ratio = ratio
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
        if self._followers and self._follows(seq, match.token_count):
            return Verdict.FOLLOWS
        if self._admit(seq, match, step, now_ns, copies):
            return Verdict.ADMITTED
        # Alone and still too large: the lock on its own prefix may keep neighbouring pages it does not need.
        if not self._roster.running and self._admit(seq, self._kv.no_match(seq), step, now_ns, copies):
            return Verdict.ADMITTED
        return Verdict.NO_PAGES

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
        self._roster.admit(seq, match.path, match.pages, private, match.token_count, now_ns)
        return True

    def _reserve(self, seq: Seq, match: Match) -> tuple[int, ...] | None:
        needed = self._kv.pages_for(len(seq.tokens)) - len(match.pages)
        if self._roster.running and needed + self._promised_pages(seq) > self._kv.available_pages:
            return None
        return self._kv.take(seq.seq, needed)

    def _promised_pages(self, candidate: Seq) -> int:
        """Pages kept for new tokens of everyone who runs and of the candidate, at the current ratio."""
        everyone = (*self._roster.running.values(), candidate)
        tokens = sum(min(seq.remaining_tokens, CLIP_NEW_TOKENS) for seq in everyone)
        return self._kv.pages_for(int(tokens * self._ratio.value)) + 1

    def _follows(self, seq: Seq, cached_tokens: int) -> bool:
        """True if a running prompt will soon have cached more of this sequence than the cache has now.

        No deadlock: a leader holds its pages already and computes in every step until its prompt is done.
        """
        saved = FOLLOW_PAGES * self._kv.page_size
        limit = seq.match_limit
        return any(
            leader.spec.namespace == seq.spec.namespace
            and (common := min(common_prefix(seq.tokens, leader.tokens), limit, leader.prefill_end)) >= cached_tokens + saved
            and leader.computed < common // self._kv.page_size * self._kv.page_size
            for leader in self._leaders()
        )

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
