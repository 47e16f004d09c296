"""What a planning pass leaves behind for whoever asks later: references and numbers that were at hand anyway.

Knows: the last pass, the last admissions and stops, and which prefixes were lost lately. Refuses to know: words,
estimates, who holds what (`sched.explain` finds out when it is asked).

Nothing here is read by a decision, so that a scheduler without notes makes the same plans.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from branchline.base.clock import NS_PER_S
from branchline.base.ids import RequestId, SeqId
from branchline.core.explain import Mark, Miss, MissReason, WaitingCause, extend_mark
from branchline.core.ports import Dropped, Match, PrefixCache
from branchline.core.request import Namespace
from branchline.sched.lifecycle import Seq

LOST_PAGES = 32768
"""Evicted pages whose end is remembered, for the attribution of later misses (some 200 bytes each)."""
EVICTIONS = 256
"""Evictions remembered in full."""
RECENT_ADMISSIONS = 256
RECENT_PASSES = 256
RECENT_STEPS = 64


class Shortage(msgspec.Struct, frozen=True, gc=False):
    """Why pages could not be reserved, in numbers."""

    needed: int
    """For known tokens, beyond what is cached."""
    promised: int
    """Kept for tokens to come."""
    available: int


class Entry(msgspec.Struct, frozen=True, gc=False):
    """What one admission took from the cache, and what it did not find there."""

    prompt_tokens: int
    page_tokens: int
    tail_tokens: int
    missed: tuple[Miss, ...]


NOTHING = Entry(0, 0, 0, ())


class Loss(msgspec.Struct, frozen=True, gc=False):
    namespace: Namespace
    at_ns: int
    request_id: RequestId
    """Who needed the pages; empty for a flush."""


class Notes(Protocol):
    """What the parts of the scheduler say in passing. None of it is answered."""

    def begin(self, now_ns: int) -> None:
        """A planning pass begins."""

    def spent(self, decode_tokens: int, prefill_tokens: int) -> None:
        """The budget that went to those who run already."""

    def follows(self, seq: Seq, leader: Seq) -> None: ...

    def short(self, needed: int, promised: int, available: int) -> None:
        """Pages could not be reserved; ``stop`` tells for whom."""

    def stop(self, cause: WaitingCause, seq: Seq | None, waiting: int) -> None:
        """The pass ends here although ``waiting`` sequences wait, ``seq`` first among those not admitted."""

    def admitted(self, seq: Seq, match: Match) -> None: ...

    def dropped(self, request_id: RequestId, dropped: Sequence[Dropped]) -> None:
        """Cached prefixes had to make room for a request; for a flush, if the id is empty."""

    def stepped(self, duration_ns: int, computed_tokens: int) -> None:
        """A step was committed; ``computed_tokens`` counts from the start of the engine."""

    def entry(self, seq: SeqId) -> Entry | None:
        """What was noted about a sequence admitted in this pass."""

    def by_cause(self, waiting: int) -> dict[str, int]:
        """``waiting`` sequences by what stopped the last pass. Cheap, and not finer than that."""

    def missed_tokens(self) -> dict[str, int]:
        """Since the start, by reason."""


class NoNotes:
    """Remembers nothing."""

    def begin(self, now_ns: int) -> None:
        pass

    def spent(self, decode_tokens: int, prefill_tokens: int) -> None:
        pass

    def follows(self, seq: Seq, leader: Seq) -> None:
        pass

    def short(self, needed: int, promised: int, available: int) -> None:
        pass

    def stop(self, cause: WaitingCause, seq: Seq | None, waiting: int) -> None:
        pass

    def admitted(self, seq: Seq, match: Match) -> None:
        pass

    def dropped(self, request_id: RequestId, dropped: Sequence[Dropped]) -> None:
        pass

    def stepped(self, duration_ns: int, computed_tokens: int) -> None:
        pass

    def entry(self, seq: SeqId) -> Entry | None:
        return None

    def by_cause(self, waiting: int) -> dict[str, int]:
        return {}

    def missed_tokens(self) -> dict[str, int]:
        return {}


class Notebook:
    """The notes of one scheduler. Everything in it is bounded."""

    def __init__(self, cache: PrefixCache, *, shares: bool) -> None:
        """``shares``: whether prefixes are shared at all."""
        self._cache = cache
        self._shares = shares
        self.now_ns = 0
        """When the last pass began."""
        self.decode_tokens = 0
        self.prefill_tokens = 0
        self.leaders: dict[SeqId, Seq] = {}
        """Whom a waiting sequence follows."""
        self.shortage = Shortage(0, 0, 0)
        self.cause: WaitingCause | None = None
        """What ended the last pass; ``None`` if everybody was tried."""
        self.stopped: Seq | None = None
        self._left_waiting = 0
        self._entries: dict[SeqId, Entry] = {}
        self.admissions: deque[Entry] = deque(maxlen=RECENT_ADMISSIONS)
        """First admissions only."""
        self.stops: deque[WaitingCause] = deque(maxlen=RECENT_PASSES)
        self.evictions: deque[tuple[Dropped, Loss]] = deque(maxlen=EVICTIONS)
        self.steps: deque[tuple[int, int]] = deque(maxlen=RECENT_STEPS)
        """Duration, and tokens computed by then since the start."""
        self._missed: dict[MissReason, int] = {}
        self._lost: dict[Mark, Loss] = {}

    # ------------------------------------------------------------ in a pass

    def begin(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self.leaders = {}
        self.cause = self.stopped = None
        self._left_waiting = 0
        self._entries = {}

    def spent(self, decode_tokens: int, prefill_tokens: int) -> None:
        self.decode_tokens, self.prefill_tokens = decode_tokens, prefill_tokens

    def follows(self, seq: Seq, leader: Seq) -> None:
        self.leaders[seq.seq] = leader

    def short(self, needed: int, promised: int, available: int) -> None:
        self.shortage = Shortage(needed, promised, available)

    def stop(self, cause: WaitingCause, seq: Seq | None, waiting: int) -> None:
        self.cause, self.stopped, self._left_waiting = cause, seq, waiting
        self.stops.append(cause)

    def admitted(self, seq: Seq, match: Match) -> None:
        pages, tail = match.page_tokens, match.tail.token_count if match.tail else 0
        if seq.retractions:
            self._entries[seq.seq] = Entry(seq.prompt_count, pages, tail, ())
            return
        missed = self._attribute(seq, match, pages + tail)
        entry = Entry(len(seq.spec.prompt), pages, tail, missed)
        self._entries[seq.seq] = entry
        self.admissions.append(entry)
        for miss in missed:
            self._missed[miss.reason] = self._missed.get(miss.reason, 0) + miss.token_count

    def dropped(self, request_id: RequestId, dropped: Sequence[Dropped]) -> None:
        lost, loss = self._lost, None
        for drop in dropped:
            if loss is None or loss.namespace is not drop.namespace:
                loss = Loss(drop.namespace, self.now_ns, request_id)
            self.evictions.append((drop, loss))
            for mark in drop.marks:
                lost.pop(mark, None)  # to the young end
                lost[mark] = loss
        while len(lost) > LOST_PAGES:
            del lost[next(iter(lost))]

    def stepped(self, duration_ns: int, computed_tokens: int) -> None:
        self.steps.append((duration_ns, computed_tokens))

    # ------------------------------------------------------------ questions

    @property
    def step_ns(self) -> int:
        """Mean of the recent steps; 0 before the first."""
        return sum(duration for duration, _ in self.steps) // len(self.steps) if self.steps else 0

    @property
    def tokens_per_s(self) -> float:
        """Positions computed in a second of work, of late."""
        if len(self.steps) < 2:
            return 0.0
        busy_ns = sum(duration for duration, _ in self.steps) - self.steps[0][0]
        return (self.steps[-1][1] - self.steps[0][1]) * NS_PER_S / busy_ns if busy_ns else 0.0

    def entry(self, seq: SeqId) -> Entry | None:
        return self._entries.get(seq)

    def by_cause(self, waiting: int) -> dict[str, int]:
        if not waiting:
            return {}
        follow = min(len(self.leaders), waiting)
        stopped = 0 if self.cause is None else max(0, min(waiting, self._left_waiting) - follow)
        counts = {WaitingCause.FOLLOWS: follow}
        if self.cause is WaitingCause.KV_SHORT:
            counts |= {WaitingCause.KV_SHORT: min(stopped, 1), WaitingCause.BEHIND: max(0, stopped - 1)}
        elif self.cause is not None:
            counts[self.cause] = stopped
        counts[WaitingCause.NOT_TRIED] = waiting - follow - stopped
        return {cause.value: count for cause, count in counts.items() if count}

    def missed_tokens(self) -> dict[str, int]:
        return {reason.value: count for reason, count in self._missed.items()}

    # ------------------------------------------------------------ misses

    def _attribute(self, seq: Seq, match: Match, cached: int) -> tuple[Miss, ...]:
        """Why the prompt beyond the ``cached`` tokens must be computed. O(1), but for what was evicted: O(its pages)."""
        total = len(seq.spec.prompt)
        rest = total - cached
        if rest <= 1:
            return ()  # the last token is always computed: somebody has to predict the next one
        if not self._shares:
            return (Miss(MissReason.CACHE_OFF, 0, total),)
        if not seq.match_limit:
            return (Miss(MissReason.LOGPROBS_WANTED, 0, total),)
        if total // match.page_size == len(match.pages):
            return (Miss(MissReason.SHORTER_THAN_PAGE, cached, rest),)
        return self._attribute_page(seq, match, cached, rest)

    def _attribute_page(self, seq: Seq, match: Match, cached: int, rest: int) -> tuple[Miss, ...]:
        """By the first whole page that is missing."""
        spec, start = seq.spec, len(match.pages) * match.page_size
        trace = self._cache.trace(spec.namespace, spec.prompt, match)
        mark = extend_mark(trace.mark, spec.prompt[start : start + match.page_size])
        loss = self._lost.get(mark)
        if loss is not None and loss.namespace == spec.namespace:
            return self._evicted(seq, match, mark, loss)
        if loss is not None or trace.is_elsewhere:
            return (Miss(MissReason.OTHER_NAMESPACE, cached, rest),)
        if match.tail is not None or trace.continues:
            return (Miss(MissReason.DIVERGED, cached, rest),)
        return (Miss(MissReason.NEVER_SEEN, cached, rest),)

    def _evicted(self, seq: Seq, match: Match, mark: Mark, first: Loss) -> tuple[Miss, ...]:
        """How far the lost prefix went, beginning with the page of ``mark``, and what came after it."""
        prompt, size = seq.spec.prompt, match.page_size
        total, cached = len(prompt), match.token_count
        end = match.page_tokens + size
        while end + size <= total:
            mark = extend_mark(mark, prompt[end : end + size])
            loss = self._lost.get(mark)
            if loss is not first and (loss is None or loss.namespace != first.namespace):
                break
            end += size
        evicted = Miss(MissReason.EVICTED, cached, end - cached, first.at_ns, first.request_id)
        if end == total:
            return (evicted,)
        reason = MissReason.SHORTER_THAN_PAGE if total - end < size else MissReason.NEVER_SEEN
        return (evicted, Miss(reason, end, total - end))
