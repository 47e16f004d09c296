"""The scheduler: decides everything, computes nothing. Four verbs change it (submit, cancel, plan, commit), the rest
are questions and switches.

    submit(spec) ─▶ waiting ─▶ plan(now) ─▶ StepPlan ─▶ (a worker) ─▶ StepResult ─▶ commit(result, now) ─▶ take_news()

It is a pure object: no clock, no thread, no socket, no array. Nothing a request contains can make it raise; what is
wrong with a request becomes its `Finish`. It raises InvariantBroken only for our own bugs.
"""

from collections.abc import Sequence

from branchline.base.clock import NS_PER_S
from branchline.base.config import EngineConfig
from branchline.base.errors import require
from branchline.base.finish import FinishReason
from branchline.base.ids import Epoch, RequestId, SeqId, StepId, TokenId
from branchline.core.events import Admitted, Committed, Event, Evicted, Planned, Retracted, StepLost, Submitted
from branchline.core.explain import WaitingCause
from branchline.core.plan import StepPlan
from branchline.core.ports import Ledger, Observer, PrefixCache
from branchline.core.request import Namespace, RequestSpec
from branchline.core.result import Output, StepResult
from branchline.core.stats import EngineStats
from branchline.sched.admission import Admission
from branchline.sched.budget import NewTokenRatio
from branchline.sched.commit import Committer
from branchline.sched.compose import Composer
from branchline.sched.deadlines import Deadlines
from branchline.sched.endings import Counters, Endings, Refusal
from branchline.sched.explain import Explainer, Switches
from branchline.sched.kv import KvBooks
from branchline.sched.lifecycle import Seq
from branchline.sched.notes import NOTHING, Notebook, Notes
from branchline.sched.pins import Pins
from branchline.sched.policy import POLICIES, PassFacts
from branchline.sched.roster import Roster

CHECK_COMMITS = 256
"""Commits of a busy engine from one proof of its books to the next; more if the books are long, for a proof looks at every
page and takes a few microseconds for each."""
CHECK_PAGES_PER_COMMIT = 2
LONGEST_RETRY_S = 60
"""Nobody is told to come back later than that: queues change."""


class Scheduler:
    """The facade. ``config.context_length`` must be known, pages come with the ledger."""

    def __init__(
        self,
        config: EngineConfig,
        ledger: Ledger,
        cache: PrefixCache,
        observers: Sequence[Observer] = (),
        notes: Notes | None = None,
    ) -> None:
        """``notes``: what explanations are made from; left out, a notebook. They change no plan."""
        self._config = config
        self._observers = tuple(observers)
        self._counters = Counters()
        self._roster = Roster(config.max_running)
        self._notes: Notes = Notebook(cache, shares=config.prefix_cache) if notes is None else notes
        self._kv = KvBooks(ledger, cache, self._notes)
        self._ratio = NewTokenRatio()
        self._policy = POLICIES[config.policy](config)
        self._pins = Pins(self._kv, config.pin_share)
        self._deadlines = Deadlines(config.waiting_timeout_s, config.running_timeout_s)
        self._admission = Admission(self._roster, self._kv, self._ratio, self._notes, followers=config.prefix_cache)
        self._endings = Endings(self._roster, self._kv, self._admission, self._counters, self._emit)
        self._committer = Committer(self._roster, self._kv, self._endings, self._counters, self._policy, self._emit)
        self._composer = Composer(
            self._roster, self._kv, self._admission, self._policy, self._retract, self._preempt, self._notes,
            step_tokens=config.max_step_tokens, chunk_tokens=config.max_chunk_tokens,
        )  # fmt: skip
        self.explain = Explainer(
            config, self._roster, self._kv, self._ratio, self._admission, self._counters,
            self._notes if isinstance(self._notes, Notebook) else Notebook(cache, shares=config.prefix_cache),
            self._line, lambda: Switches(self._paused, self._draining),
        )  # fmt: skip
        self._plans: dict[StepId, StepPlan] = {}
        self._check_commits = max(CHECK_COMMITS, ledger.page_count // CHECK_PAGES_PER_COMMIT)
        self._last_step: StepId = 0
        self._paused = False
        self._draining = False

    # ------------------------------------------------------------ the four verbs

    def submit(self, spec: RequestSpec, now_ns: int) -> None:
        """Take a request in, or refuse it at once with a reason."""
        refusal = self._refusal(spec)
        if refusal is not None:
            self._endings.refuse(spec.request_id, len(spec.prompt), refusal, now_ns)
            return
        seq = self._roster.arrive(spec, now_ns)
        self._policy.note_arrived(seq, self._roster.waiting)
        self._deadlines.watch(seq)
        self._counters.submitted += 1
        self._emit(Submitted(now_ns, spec.request_id, len(spec.prompt), spec.max_new_tokens, spec.namespace.tenant))

    def cancel(self, request_id: RequestId, reason: FinishReason, now_ns: int) -> bool:
        """End a request wherever it is; False if it is not here (any more)."""
        seq = self._roster.find(request_id)
        if seq is None:
            return False
        self._endings.end(seq, reason, now_ns, message="" if reason.is_success else "The request was cancelled.")
        return True

    def plan(self, now_ns: int) -> StepPlan | None:
        """The next step, or ``None`` if nothing can be computed before something else happens."""
        self._pins.expire(now_ns)
        self._expire(now_ns)
        if self._paused or not len(self._roster):
            return None
        running = {seq.seq: seq.epoch for seq in self._roster.running.values()}
        evicted = self._kv.evicted_pages
        self._notes.begin(now_ns)
        plan = self._composer.compose(self._last_step + 1, now_ns)
        if plan is None and not self._plans and self._pins.release_all():
            plan = self._composer.compose(self._last_step + 1, now_ns)
        self._tell_admissions(running, evicted, now_ns)
        if plan is None:
            self._insist_on_progress(now_ns)
            return None
        self._last_step = plan.step
        self._plans[plan.step] = plan
        self._emit(Planned(now_ns, plan))
        return plan

    def commit(self, result: StepResult, now_ns: int) -> None:
        """Take the outcome of the oldest plan in flight."""
        plan = self._settle(result.step)
        self._counters.steps += 1
        self._counters.busy_ns += result.duration_ns
        self._committer.apply(plan, result, now_ns)
        self._ratio.decay()
        self._notes.stepped(result.duration_ns, self._counters.computed_tokens)
        self._emit(Committed(now_ns, result.step, result.duration_ns))
        if self._counters.steps % self._check_commits == 0:
            self.check()

    def commit_failure(self, step: StepId, message: str, now_ns: int) -> None:
        """The oldest plan in flight was lost: its rows end with an error, the books must still add up."""
        plan = self._settle(step)
        self._counters.failed_steps += 1
        self._committer.fail(plan, message, now_ns)
        self._emit(StepLost(now_ns, step, message))
        self.check()

    def take_news(self) -> list[Output]:
        """Everything there is to tell since the last call, in order."""
        return self._endings.take_news()

    # ------------------------------------------------------------ switches

    def pause(self) -> None:
        """Plan nothing until ``resume``; steps in flight are still committed, running sequences stay where they are."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def drain(self) -> None:
        """Refuse new requests from now on; finish those that are here."""
        self._draining = True

    def flush(self) -> bool:
        """Empty the prefix cache. False, and no change, while anything runs or is in flight."""
        if self._roster.running or self._plans:
            return False
        self._pins.release_all()
        self._kv.flush()
        self._ratio.reset()
        return True

    def pin(self, namespace: Namespace, tokens: Sequence[TokenId], until_ns: int, now_ns: int) -> tuple[int, str]:
        """Keep what is cached of a prefix until then, whatever eviction would do; a time that has passed removes the pin.
        Returns the number of tokens that are pinned and, if none, the reason. Pins go when the cache is flushed, and
        when the head of the line could not run otherwise."""
        return self._pins.pin(namespace, tokens, until_ns, now_ns)

    def end_all(self, reason: FinishReason, message: str, now_ns: int) -> None:
        for seq in self._roster.everyone():
            self._endings.end(seq, reason, now_ns, message=message)

    def retract_youngest(self, now_ns: int) -> bool:
        """Put the running sequence that arrived last back into the line (for tests and operators)."""
        seq = max(self._roster.running.values(), key=lambda seq: seq.seq, default=None)
        if seq is None:
            return False
        self._retract(seq, now_ns)
        return True

    def rest(self) -> None:
        """Nothing to do: prove the books, start the ratio anew."""
        self._ratio.reset()
        self.check()

    # ------------------------------------------------------------ questions

    @property
    def in_flight(self) -> int:
        return len(self._plans)

    @property
    def is_empty(self) -> bool:
        return not len(self._roster)

    def next_wakeup_ns(self) -> int | None:
        """When the next deadline passes, if any request has one."""
        return self._deadlines.next_ns

    def stats(self) -> EngineStats:
        ledger, cache, counters = self._kv.ledger, self._kv.cache, self._counters
        return EngineStats(
            running=len(self._roster.running),
            waiting=len(self._roster.waiting),
            waiting_tokens=self._roster.waiting.prompt_tokens,
            paused=self._paused,
            draining=self._draining,
            plans_in_flight=len(self._plans),
            pages_total=ledger.page_count,
            pages_free=ledger.free_pages,
            pages_private=ledger.private_pages,
            pages_tree=ledger.tree_pages,
            pages_retired=ledger.retired_pages,
            pages_evictable=cache.evictable_pages,
            locked_nodes=cache.locked_nodes,
            pins=len(self._pins),
            pages_pinned=self._pins.page_count,
            slots_used=self._roster.slots_used,
            new_token_ratio=self._ratio.value,
            max_running=self._config.max_running,
            page_size=self._kv.page_size,
            context_length=self._config.context_length or 0,
            waiting_causes=self._waiting_causes(),
            steps=counters.steps,
            submitted=counters.submitted,
            finished=dict(counters.finished),
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            computed_tokens=counters.computed_tokens,
            generated_tokens=counters.generated_tokens,
            retractions=counters.retractions,
            preemptions=counters.preemptions,
            evicted_pages=self._kv.evicted_pages,
            missed_tokens=self._notes.missed_tokens(),
            late_results=counters.late_results,
            failed_steps=counters.failed_steps,
            busy_ns=counters.busy_ns,
        )

    def check(self) -> None:
        """Prove that the books add up (reliability invariants I1-I6, I8, I20). Raises InvariantBroken."""
        ledger, cache = self._kv.ledger, self._kv.cache
        ledger.check()
        cache.check()
        self._roster.check()
        private = 0
        for seq in self._roster.running.values():
            self._check_running(seq)
            private += len(seq.private_pages)
        require(private == ledger.private_pages, "every private page belongs to a running sequence")
        held = [seq.path for seq in self._roster.running.values() if seq.path is not None]
        cache.check_locks([*held, *self._pins.paths])
        require(bool(self._plans) or not ledger.retired_pages, "nothing in flight, nothing retired")
        if not self._roster.running and not self._pins:
            require(cache.locked_nodes == 0, "nothing runs, nothing is locked")
        if not self._roster.running and not self._plans:
            usable = ledger.free_pages + cache.evictable_pages
            require(usable + self._pins.page_count == ledger.page_count, "an idle engine can use every page but pinned ones")

    # ------------------------------------------------------------ inner

    def _refusal(self, spec: RequestSpec) -> Refusal | None:
        """Why a request cannot come in."""
        if self._draining:
            return Refusal("The server is shutting down and takes no new requests.", 503)
        if self._roster.find(spec.request_id) is not None:
            return Refusal("A request with this id is being served already.", 409)
        if not spec.prompt or spec.max_new_tokens < 1:
            return Refusal("A request needs a prompt and at least one new token.", 400)
        pages, limit = self._kv.pages_for(len(spec.prompt) + spec.max_new_tokens), self._kv.ledger.page_count
        if pages > limit:
            return Refusal(f"The request may need {pages} KV pages, but the server has {limit}.", 400)
        return self._full_queue(spec)

    def _full_queue(self, spec: RequestSpec) -> Refusal | None:
        waiting, most_tokens = self._roster.waiting, self._config.max_queued_tokens
        count, tokens = len(waiting), waiting.prompt_tokens
        if count >= self._config.max_queued:
            return Refusal(f"The queue is full: {count} requests are waiting.", 429, self._seconds_for(tokens // count))
        if most_tokens is not None and tokens and tokens + len(spec.prompt) > most_tokens:
            words = f"The queue is full: {tokens} prompt tokens are waiting, at most {most_tokens} may."
            return Refusal(words, 429, self._seconds_for(tokens + len(spec.prompt) - most_tokens))
        return None

    def _seconds_for(self, tokens: int) -> int:
        """How long so many tokens take at the rate so far; an estimate for those who shall come back."""
        counters = self._counters
        seconds = tokens * counters.busy_ns // (max(1, counters.computed_tokens) * NS_PER_S)
        return min(1 + seconds, LONGEST_RETRY_S)

    def _retract(self, seq: Seq, now_ns: int) -> None:
        """Back to the line with what is committed; whole pages stay in the cache as long as nobody needs them."""
        self._put_back(seq, now_ns)
        self._admission.note_retraction()
        stay = self._roster.running.values()
        self._ratio.raise_after_retraction(
            sum(s.output_count for s in stay), sum(s.spec.max_new_tokens for s in stay), len(stay)
        )

    def _preempt(self, seq: Seq, now_ns: int) -> None:
        """The same for the sake of somebody more important: memory is not short, so admission stays open."""
        self._counters.preemptions += 1
        self._put_back(seq, now_ns)

    def _put_back(self, seq: Seq, now_ns: int) -> None:
        computed = seq.computed
        given_back = self._kv.let_go(seq, now_ns, keep=True)
        self._roster.retract(seq, now_ns)
        self._counters.retractions += 1
        self._emit(Retracted(now_ns, seq.spec.request_id, computed, given_back))

    def _settle(self, step: StepId) -> StepPlan:
        require(bool(self._plans) and step == next(iter(self._plans)), "results come in the order of their plans")
        plan = self._plans.pop(step)
        self._kv.ledger.settle(step)
        return plan

    def _expire(self, now_ns: int) -> None:
        for seq in self._deadlines.passed(self._roster.everyone(), now_ns):
            reason, message = self._deadlines.verdict(seq, now_ns)
            self._endings.end(seq, reason, now_ns, message=message)

    def _insist_on_progress(self, now_ns: int) -> None:
        """No plan and nothing in flight: nothing will change by itself. So the head can never run. Say so, go on."""
        if self._plans:
            return
        require(not self._roster.running, "somebody runs, nothing is in flight, and yet nothing can be computed")
        for seq in self._roster.waiting:
            self._endings.end(seq, FinishReason.ERROR, now_ns, message="The request does not fit into the KV memory.")
            return

    def _tell_admissions(self, running_before: dict[SeqId, Epoch], evicted_before: int, now_ns: int) -> None:
        for seq in self._roster.running.values():
            if running_before.get(seq.seq) == seq.epoch:
                continue
            if not seq.retractions:
                self._deadlines.watch(seq)
                self._counters.prompt_tokens += seq.prompt_count
                self._counters.cached_tokens += seq.cached_tokens or 0
            entry = self._notes.entry(seq.seq) or NOTHING
            self._emit(
                Admitted(
                    now_ns, seq.spec.request_id, seq.cached_tokens or 0, seq.retractions, entry.tail_tokens, entry.missed
                )
            )
        if self._kv.evicted_pages > evicted_before:
            self._emit(Evicted(now_ns, self._kv.evicted_pages - evicted_before))

    def _line(self) -> list[Seq]:
        """The waiting line in the order of the policy, from exact figures: the memo of planning passes is left alone."""
        match = self._kv.match
        facts = PassFacts(lambda seq: match(seq).token_count, lambda seq: match(seq).pages)
        return list(self._policy.order(self._roster.waiting, facts))

    def _waiting_causes(self) -> dict[str, int]:
        waiting = len(self._roster.waiting)
        if self._paused and waiting:
            return {WaitingCause.PAUSED.value: waiting}
        return self._notes.by_cause(waiting)

    def _check_running(self, seq: Seq) -> None:
        require(0 <= seq.computed <= seq.launched <= seq.expected, "computed, launched and expected are in order")
        require(seq.computed <= len(seq.tokens) <= seq.expected, "no token is known before its time")
        require(seq.launched <= len(seq.page_table) * self._kv.page_size, "every launched position has a page")
        require(frozenset(seq.private_pages) == self._kv.ledger.pages_of(seq.seq), "a sequence holds what the ledger says")

    def _emit(self, event: Event) -> None:
        for observer in self._observers:
            observer.notice(event)
