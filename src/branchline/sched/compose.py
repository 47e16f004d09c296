"""How a step is put together: one token budget, decode rows first, then prefill chunks, then newcomers.

    rows with one pending token (latency bound)      each takes a page if its position starts one; if none is left,
                                                     unlocked content is dropped, then a victim is retracted
    rows with a rest of their prompt                 chunks of several share what the budget leaves, oldest first
    waiting sequences, in the order of the policy    while there are slots, tokens and pages

Knows: the order of these things. Refuses to know: what comes back (`commit`).
"""

from collections.abc import Callable, Iterator

from branchline.base.ids import SeqId, StepId
from branchline.core.explain import WaitingCause
from branchline.core.plan import PageCopy, PlanRow, SlotOpen, StepPlan
from branchline.sched.admission import Admission, Verdict
from branchline.sched.budget import StepBudget
from branchline.sched.kv import KvBooks
from branchline.sched.lifecycle import Seq
from branchline.sched.matches import MatchMemo
from branchline.sched.notes import Notes
from branchline.sched.policy import OrderPolicy
from branchline.sched.retract import choose_victim, fewest_victims
from branchline.sched.roster import Roster


class Composer:
    def __init__(
        self,
        roster: Roster,
        kv: KvBooks,
        admission: Admission,
        policy: OrderPolicy,
        retract: Callable[[Seq, int], None],
        preempt: Callable[[Seq, int], None],
        notes: Notes,
        *,
        step_tokens: int,
        chunk_tokens: int | None,
    ) -> None:
        self._roster = roster
        self._kv = kv
        self._admission = admission
        self._policy = policy
        self._retract = retract
        self._preempt = preempt
        self._notes = notes
        self._step_tokens = step_tokens
        self._chunk_tokens = chunk_tokens
        self._memo = MatchMemo(kv)

    def compose(self, step: StepId, now_ns: int) -> StepPlan | None:
        """The next plan, or ``None`` if there is nothing that can be computed now."""
        draft = Draft(step, StepBudget(self._step_tokens, self._chunk_tokens))
        self._make_way(step, now_ns)
        self._decode_rows(draft, now_ns)
        after_decode = draft.budget.left
        self._prefill_rows(draft)
        self._notes.spent(self._step_tokens - after_decode, after_decode - draft.budget.left)
        self._newcomers(draft, now_ns)
        return draft.finish()

    def order(self) -> Iterator[Seq]:
        """The line as the policy would have it now."""
        return iter(self._policy.order(self._roster.waiting, self._memo.start_pass(self._roster.waiting)))

    def _decode_rows(self, draft: "Draft", now_ns: int) -> None:
        for seq in list(self._roster.running.values()):
            if seq.seq not in self._roster.running or seq.is_prefilling or not seq.pending:
                continue
            if self._has_page(seq, draft.step, now_ns):
                draft.add(seq, 1)

    def _has_page(self, seq: Seq, step: StepId, now_ns: int) -> bool:
        """See to it that the next position has a page, if need be at the cost of a victim."""
        if seq.launched < len(seq.page_table) * self._kv.page_size:
            return True
        while (pages := self._kv.take(seq, 1)) is None:
            if self._kv.ledger.retired_pages:
                return False  # pages come back as soon as a step in flight is committed: sit this one out
            victim = choose_victim(self._roster.running.values(), self._kv.page_size, step, self._policy.precedence)
            if victim is None:
                return False
            self._retract(victim, now_ns)
            if victim is seq:
                return False
        seq.extend(pages)
        return True

    def _prefill_rows(self, draft: "Draft") -> None:
        for seq in self._roster.running.values():
            if seq.is_prefilling and seq.pending:
                draft.add(seq, draft.budget.chunk(seq.pending))

    def _newcomers(self, draft: "Draft", now_ns: int) -> None:
        waiting = self._roster.waiting
        if not waiting:
            return
        if not self._admission.is_open:
            self._notes.stop(WaitingCause.RECOVERING, None, len(waiting))
            return
        if (full := self._full(draft)) is not None:  # nobody can come in, so who would be first is not worth a sort
            self._notes.stop(full, None, len(waiting))
            return
        for seq in self.order():
            if (full := self._full(draft)) is not None:
                self._notes.stop(full, seq, len(waiting))
                return
            verdict = self._admission.consider(seq, draft.step, now_ns, draft.copies)
            if verdict is Verdict.NO_PAGES:
                self._notes.stop(WaitingCause.KV_SHORT, seq, len(waiting))
                return  # nobody overtakes for being small: the head of the line would starve
            if verdict is Verdict.ADMITTED:
                self._policy.note_admitted(seq, seq.expected - seq.computed)
                draft.add(seq, draft.budget.chunk(seq.pending))

    def _full(self, draft: "Draft") -> WaitingCause | None:
        if not self._roster.has_free_slot:
            return WaitingCause.ROW_CAP
        return None if draft.budget.left else WaitingCause.TOKEN_BUDGET

    def _make_way(self, step: StepId, now_ns: int) -> None:
        """If the policy says so, take slots and pages from running work for the head of the line: only for the head, only
        if it could start then, and before anybody has a row in this plan."""
        gap = self._policy.preemption_gap
        head = next(self.order(), None) if gap is not None and self._admission.is_open else None
        if gap is None or head is None or self._admission.is_led(head, step):
            return
        least = self._policy.precedence(head) - gap
        lesser = [seq for seq in self._roster.running.values() if self._policy.precedence(seq) < least]
        short = self._admission.short_pages(head, now_ns) if lesser else 0
        if self._roster.has_free_slot and short <= 0:
            return
        lesser.sort(key=lambda seq: (self._policy.precedence(seq), -seq.seq))
        for victim in fewest_victims(lesser, lambda some: self._kv.pages_freed_by(some) >= short):
            self._preempt(victim, now_ns)


class Draft:
    """A plan in the making."""

    def __init__(self, step: StepId, budget: StepBudget) -> None:
        self.step = step
        self.budget = budget
        self.copies: list[PageCopy] = []
        self._opens: list[SlotOpen] = []
        self._rows: dict[SeqId, PlanRow] = {}

    def add(self, seq: Seq, count: int) -> None:
        """One row, if the budget leaves anything for it."""
        if count < 1:
            return
        self.budget.spend(count)
        if seq.pending_open:
            self._opens.append(seq.open_slot())
        self._rows[seq.seq] = seq.launch(self.step, count)

    def finish(self) -> StepPlan | None:
        if not self._rows:
            return None
        return StepPlan(self.step, tuple(self._rows.values()), tuple(self._opens), tuple(self.copies))
