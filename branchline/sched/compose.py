"""How a step is put together: one token budget, decode rows first, then prefill chunks, then newcomers.

    rows with one pending token (latency bound)      each takes a page if its position starts one; if none is left,
                                                     unlocked content is dropped, then a victim is retracted
    rows with a rest of their prompt                 chunks of several share what the budget leaves, oldest first
    waiting sequences, in the order of the policy    while there are slots, tokens and pages

Knows: the order of these things. Refuses to know: what comes back (`commit`).
"""

from collections.abc import Callable

from branchline.base.ids import SeqId, StepId
from branchline.core.plan import PageCopy, PlanRow, SlotOpen, StepPlan
from branchline.sched.admission import Admission, Verdict
from branchline.sched.budget import StepBudget
from branchline.sched.kv import KvBooks
from branchline.sched.lifecycle import Seq
from branchline.sched.policy import OrderPolicy
from branchline.sched.retract import choose_victim
from branchline.sched.roster import Roster

MATCHES_PER_PASS = 64
"""Waiting sequences whose cached prefix is looked up anew in one pass; the others keep their last figure."""


class Composer:
    def __init__(
        self,
        roster: Roster,
        kv: KvBooks,
        admission: Admission,
        policy: OrderPolicy,
        retract: Callable[[Seq, int], None],
        *,
        step_tokens: int,
        chunk_tokens: int | None,
    ) -> None:
        self._roster = roster
        self._kv = kv
        self._admission = admission
        self._policy = policy
        self._retract = retract
        self._step_tokens = step_tokens
        self._chunk_tokens = chunk_tokens
        self._memo = MatchMemo(kv)

    def compose(self, step: StepId, now_ns: int) -> StepPlan | None:
        """The next plan, or ``None`` if there is nothing that can be computed now."""
        draft = Draft(step, StepBudget(self._step_tokens, self._chunk_tokens))
        self._decode_rows(draft, now_ns)
        self._prefill_rows(draft)
        self._newcomers(draft, now_ns)
        return draft.finish()

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
        while (pages := self._kv.take(seq.seq, 1)) is None:
            if self._kv.ledger.retired_pages:
                return False  # pages come back as soon as a step in flight is committed: sit this one out
            victim = choose_victim(self._roster.running.values(), self._kv.page_size, step)
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
        if not self._roster.waiting or not self._admission.is_open:
            return
        for seq in self._policy.order(self._roster.waiting, self._memo.start_pass(len(self._roster.waiting))):
            if not self._roster.has_free_slot or not draft.budget.left:
                return
            verdict = self._admission.consider(seq, draft.step, now_ns, draft.copies)
            if verdict is Verdict.NO_PAGES:
                return  # nobody overtakes for being small: the head of the line would starve
            if verdict is Verdict.ADMITTED:
                draft.add(seq, draft.budget.chunk(seq.pending))


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


class MatchMemo:
    """Cached prefix lengths of waiting sequences, looked up again only when the cache has changed, and then only so
    many in a pass: ordering a long line must stay cheap."""

    def __init__(self, kv: KvBooks) -> None:
        self._kv = kv
        self._known: dict[SeqId, tuple[int, int]] = {}
        self._left = 0

    def start_pass(self, waiting_count: int) -> Callable[[Seq], int]:
        self._left = MATCHES_PER_PASS
        if len(self._known) > 2 * waiting_count + MATCHES_PER_PASS:
            self._known.clear()  # mostly sequences that have left the line
        return self._cached_tokens

    def _cached_tokens(self, seq: Seq) -> int:
        version = self._kv.cache.version
        known = self._known.get(seq.seq)
        if known is not None and (known[0] == version or not self._left):
            return known[1]
        self._left = max(0, self._left - 1)
        tokens = self._kv.match(seq).token_count
        self._known[seq.seq] = (version, tokens)
        return tokens
