"""Answers about a scheduler, worked out when somebody asks: why each request waits, when it will start, who holds what.

Knows: how to read the scheduler's parts and its notes. Refuses to know: words (`core.words`), who may see an answer, and how
to change anything.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil

from branchline.base.config import EngineConfig
from branchline.base.ids import RequestId
from branchline.core.explain import (
    Behind,
    BudgetView,
    CacheTree,
    CacheView,
    Cause,
    EvictionRecord,
    Fairness,
    Follows,
    Holder,
    KvShort,
    KvView,
    NotTried,
    Paused,
    Priority,
    QueueView,
    Recovering,
    RequestLine,
    RequestList,
    RowCap,
    SchedulerView,
    SettingsView,
    TokenBudget,
    WaitingCause,
    WaitingView,
    show_mark,
)
from branchline.core.ports import Dropped
from branchline.core.words import remedy
from branchline.sched.admission import RECOVERED_SHARE, Admission
from branchline.sched.budget import CLIP_NEW_TOKENS, NewTokenRatio
from branchline.sched.endings import Counters
from branchline.sched.forecast import Room, Tenure, Wish, forecast
from branchline.sched.kv import KvBooks
from branchline.sched.lifecycle import Seq, State
from branchline.sched.notes import Loss, Notebook
from branchline.sched.roster import Roster

LISTED_REQUESTS = 256
COUNTED_CAUSES = 1024
"""Waiting requests, first in the line, whose causes are counted."""
LISTED_HOLDERS = 8
LISTED_EVICTIONS = 16
LISTED_NODES = 512


@dataclass(frozen=True, slots=True)
class Switches:
    is_paused: bool
    is_draining: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a running request has come: what events do not tell before its end."""

    completion_tokens: int
    chunks: int
    steps: int


class Explainer:
    """Reads, never writes."""

    def __init__(
        self,
        config: EngineConfig,
        roster: Roster,
        kv: KvBooks,
        ratio: NewTokenRatio,
        admission: Admission,
        counters: Counters,
        notes: Notebook,
        line: Callable[[], Sequence[Seq]],
        switches: Callable[[], Switches],
    ) -> None:
        """``line``: the waiting sequences in the order in which the policy would try them now."""
        self._config = config
        self._roster = roster
        self._kv = kv
        self._ratio = ratio
        self._admission = admission
        self._counters = counters
        self._notes = notes
        self._line = line
        self._switches = switches

    # ------------------------------------------------------------ one request

    def waiting(self, request_id: RequestId, now_ns: int) -> WaitingView | None:
        """Why it waits; ``None`` if it does not."""
        seq = self._roster.find(request_id)
        if seq is None or seq.state is not State.WAITING:
            return None
        order = self._line()
        return self._view(seq, order.index(seq), order, now_ns)

    def progress(self, request_id: RequestId) -> Progress | None:
        """``None`` if it is not live."""
        seq = self._roster.find(request_id)
        return None if seq is None else Progress(seq.output_count, seq.chunks, seq.steps)

    def tenant(self, request_id: RequestId) -> str | None:
        """Whose request it is; ``None`` if it is not live."""
        seq = self._roster.find(request_id)
        return None if seq is None else seq.spec.namespace.tenant

    # ------------------------------------------------------------ everything

    def requests(self, now_ns: int) -> RequestList:
        """The waiting line, then those that run."""
        order = self._line()
        lines = [
            RequestLine(
                seq.spec.request_id, "waiting", self._cause(seq, position, order).cause.value, now_ns - seq.arrival_ns,
                seq.prompt_count, seq.output_count,
            )
            for position, seq in enumerate(order[:LISTED_REQUESTS])
        ]  # fmt: skip
        lines += [
            RequestLine(seq.spec.request_id, "running", "", now_ns - seq.arrival_ns, seq.prompt_count, seq.output_count)
            for seq in islice(self._roster.running.values(), LISTED_REQUESTS - len(lines))
        ]
        return RequestList(now_ns, tuple(lines), len(self._roster) - len(lines))

    def scheduler(self, now_ns: int) -> SchedulerView:
        switches, notes = self._switches(), self._notes
        return SchedulerView(
            now_ns=now_ns,
            paused=switches.is_paused,
            draining=switches.is_draining,
            queue=self._queue(now_ns),
            budget=BudgetView(
                step_tokens=self._config.max_step_tokens,
                decode_tokens=notes.decode_tokens,
                prefill_tokens=notes.prefill_tokens,
                recent_step_ns=notes.step_ns,
                recent_tokens_per_s=notes.tokens_per_s,
            ),
            kv=self._kv_view(),
            cache=self._cache_view(),
            settings=self._settings(),
        )

    def tree(self, now_ns: int) -> CacheTree:
        cache = self._kv.cache
        return CacheTree(now_ns, cache.page_count, cache.outline(LISTED_NODES))

    # ------------------------------------------------------------ causes

    def _view(self, seq: Seq, position: int, order: Sequence[Seq], now_ns: int) -> WaitingView:
        cause = self._cause(seq, position, order)
        steps, step_ns = self._steps_until(position, order), self._notes.step_ns
        return WaitingView(
            request_id=seq.spec.request_id,
            position=position + 1,
            waited_ns=now_ns - seq.waiting_since_ns,
            prompt_tokens=seq.prompt_count,
            cached_tokens=self._kv.match(seq).token_count,
            retractions=seq.retractions,
            cause=cause,
            would_admit=remedy(cause),
            starts_in_ns=None if isinstance(cause, Paused) or not step_ns else steps * step_ns,
        )

    def _cause(self, seq: Seq, position: int, order: Sequence[Seq]) -> Cause:
        """As the last planning pass left it."""
        notes = self._notes
        if self._switches().is_paused:
            return Paused()
        if seq.waiting_since_ns > notes.now_ns:
            return NotTried()
        if notes.cause is WaitingCause.RECOVERING:
            return Recovering(self._kv.available_pages, ceil(RECOVERED_SHARE * self._kv.ledger.page_count))
        leader = notes.leaders.get(seq.seq)
        if leader is not None and leader.state is State.RUNNING:
            return Follows(leader.spec.request_id, max(0, leader.prefill_end - leader.computed))
        return NotTried() if notes.cause is None else self._stopped(notes.cause, seq, position, order)

    def _stopped(self, cause: WaitingCause, seq: Seq, position: int, order: Sequence[Seq]) -> Cause:
        """The last pass ended with this sequence, or before it."""
        if seq is self._notes.stopped:
            return self._resource(cause, position, order)
        return self._preferred(seq, order[:position]) or self._behind(cause, position, order)

    def _preferred(self, seq: Seq, ahead: Sequence[Seq]) -> Cause | None:
        """Those whom the policy likes better, if that is what the policy is about."""
        if self._config.policy == "priority":
            higher = [other for other in ahead if other.spec.priority > seq.spec.priority]
            if higher:
                theirs = higher[0].spec
                return Priority(theirs.request_id, seq.spec.priority, theirs.priority, len(higher))
        elif self._config.policy == "fair":
            later = [other for other in ahead if other.seq > seq.seq and other.spec.payer != seq.spec.payer]
            if later:
                return Fairness(later[0].spec.request_id, len(later))
        return None

    def _behind(self, cause: WaitingCause, position: int, order: Sequence[Seq]) -> Cause:
        stopped = self._notes.stopped
        if cause is WaitingCause.KV_SHORT and stopped is not None:
            return Behind(stopped.spec.request_id, cause)
        return self._resource(cause, position, order)

    def _resource(self, cause: WaitingCause, position: int, order: Sequence[Seq]) -> Cause:
        """What there is too little of."""
        notes, running = self._notes, self._roster.running.values()
        if cause is WaitingCause.ROW_CAP:
            return RowCap(self._config.max_running, min((seq.remaining_tokens for seq in running), default=None))
        if cause is WaitingCause.KV_SHORT:
            return self._shortage()
        ahead = sum(seq.prompt_count for seq in order[:position]) + sum(_prefill_left(seq) for seq in running)
        return TokenBudget(self._config.max_step_tokens, notes.decode_tokens, notes.prefill_tokens, ahead)

    def _shortage(self) -> KvShort:
        shortage, holders = self._notes.shortage, self._holders()
        short = max(0, shortage.needed + shortage.promised - shortage.available)
        soonest = sorted(holders, key=lambda holder: holder.remaining_tokens)
        freed, enough_after = 0, None
        for holder in soonest:
            freed += holder.own_pages + self._promise_pages(holder.remaining_tokens)
            if freed >= short:
                enough_after = holder.remaining_tokens
                break
        return KvShort(
            needed_pages=shortage.needed,
            promised_pages=shortage.promised,
            available_pages=shortage.available,
            short_pages=short,
            holder_count=len(holders),
            holders=tuple(holders[:LISTED_HOLDERS]),
            next_release_tokens=soonest[0].remaining_tokens if soonest else None,
            enough_after_tokens=enough_after,
        )

    # ------------------------------------------------------------ memory and time

    def _holders(self) -> list[Holder]:
        """Everybody who runs, those that hold most first."""
        running = list(self._roster.running.values())
        users = Counter(page for seq in running for page in seq.page_table)
        holders = []
        for seq in running:
            own = sum(users[page] == 1 for page in seq.page_table)
            shared = len(seq.page_table) - own
            holders.append(Holder(seq.spec.request_id, own, shared, max(0, seq.remaining_tokens)))
        return sorted(holders, key=lambda holder: -holder.own_pages)

    def _promise_pages(self, remaining_tokens: int) -> int:
        return self._kv.pages_for(int(min(remaining_tokens, CLIP_NEW_TOKENS) * self._ratio.value))

    def _steps_until(self, position: int, order: Sequence[Seq]) -> int:
        """Until the sequence at ``position`` is admitted, if nobody else comes."""
        running = list(self._roster.running.values())
        decoding = sum(not seq.is_prefilling for seq in running)
        room = Room(
            rows=self._config.max_running - len(running),
            pages=self._kv.available_pages - self._admission.promised_pages(),
            prefill_tokens=sum(map(_prefill_left, running)),
            prefill_per_step=max(1, self._config.max_step_tokens - decoding),
        )
        tenures = [
            Tenure(holder.remaining_tokens, holder.own_pages + self._promise_pages(holder.remaining_tokens))
            for holder in self._holders()
        ]
        return forecast(room, tenures, map(self._wish, order[: position + 1]))[-1]

    def _wish(self, seq: Seq) -> Wish:
        match = self._kv.match(seq)
        pages = self._kv.pages_for(len(seq.tokens)) - len(match.pages) + self._promise_pages(seq.remaining_tokens)
        return Wish(len(seq.tokens) - match.token_count, max(0, seq.remaining_tokens), pages)

    # ------------------------------------------------------------ views

    def _queue(self, now_ns: int) -> QueueView:
        order = self._line()
        first = enumerate(order[:COUNTED_CAUSES])
        causes = Counter(self._cause(seq, position, order).cause.value for position, seq in first)
        stopped = self._notes.stopped
        head = order.index(stopped) if stopped in order else 0
        return QueueView(
            waiting=len(order),
            running=len(self._roster.running),
            oldest_waited_ns=max((now_ns - seq.waiting_since_ns for seq in order), default=0),
            waiting_prompt_tokens=sum(seq.prompt_count for seq in order),
            by_cause=dict(causes),
            head=self._view(order[head], head, order, now_ns) if order else None,
            recent_stops=dict(Counter(cause.value for cause in self._notes.stops)),
        )

    def _kv_view(self) -> KvView:
        ledger, cache = self._kv.ledger, self._kv.cache
        everyone = [*self._roster.running.values(), *self._roster.waiting][: self._config.max_running]
        return KvView(
            pages=ledger.page_count,
            free=ledger.free_pages,
            evictable=cache.evictable_pages,
            private=ledger.private_pages,
            tree=ledger.tree_pages,
            retired=ledger.retired_pages,
            promised=self._admission.promised_pages() if self._roster.running else 0,
            new_token_ratio=self._ratio.value,
            peak_wanted=sum(self._kv.pages_for(seq.prompt_count + seq.spec.max_new_tokens) for seq in everyone),
            holders=tuple(self._holders()[:LISTED_HOLDERS]),
        )

    def _cache_view(self) -> CacheView:
        notes, counters = self._notes, self._counters
        recent = Counter[str]()
        for entry in notes.admissions:
            for miss in entry.missed:
                recent[miss.reason.value] += miss.token_count
        return CacheView(
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            missed_tokens=notes.missed_tokens(),
            recent_prompt_tokens=sum(entry.prompt_tokens for entry in notes.admissions),
            recent_cached_tokens=sum(entry.page_tokens + entry.tail_tokens for entry in notes.admissions),
            recent_missed_tokens=dict(recent),
            evicted_pages=self._kv.evicted_pages,
            retractions=counters.retractions,
            evictions=tuple(self._record(*lost) for lost in islice(reversed(notes.evictions), LISTED_EVICTIONS)),
        )

    def _record(self, dropped: Dropped, loss: Loss) -> EvictionRecord:
        size = self._kv.page_size
        return EvictionRecord(
            prefix=show_mark(dropped.marks[-1]),
            length_tokens=dropped.length_pages * size,
            pages=len(dropped.marks),
            cost_tokens=len(dropped.marks) * size,
            last_used_at_ns=dropped.touched_ns,
            evicted_at_ns=loss.at_ns,
            caused_by=loss.request_id,
        )

    def _settings(self) -> SettingsView:
        config = self._config
        return SettingsView(
            policy=config.policy,
            max_running=config.max_running,
            max_queued=config.max_queued,
            max_step_tokens=config.max_step_tokens,
            max_chunk_tokens=config.max_chunk_tokens,
            pages=self._kv.ledger.page_count,
            page_size=self._kv.page_size,
            context_length=config.context_length or 0,
            prefix_cache=config.prefix_cache,
        )


def _prefill_left(seq: Seq) -> int:
    return max(0, seq.prefill_end - seq.launched)
