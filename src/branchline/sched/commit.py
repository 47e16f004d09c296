"""What a result changes: tokens are appended, prefixes shared, sequences ended. Rows that come too late are dropped.

Knows: plan rows beside their results. Refuses to know: how the next plan will look.
"""

from collections.abc import Callable

from branchline.base.errors import require
from branchline.base.finish import FinishReason
from branchline.base.ids import TokenId
from branchline.core.events import Event, FirstToken
from branchline.core.plan import PlanRow, StepPlan
from branchline.core.result import RowResult, StepResult
from branchline.sched.endings import Counters, Endings
from branchline.sched.kv import KvBooks
from branchline.sched.lifecycle import Seq
from branchline.sched.policy import OrderPolicy
from branchline.sched.roster import Roster


class Committer:
    def __init__(
        self,
        roster: Roster,
        kv: KvBooks,
        endings: Endings,
        counters: Counters,
        policy: OrderPolicy,
        emit: Callable[[Event], None],
    ) -> None:
        self._roster = roster
        self._kv = kv
        self._endings = endings
        self._counters = counters
        self._policy = policy
        self._emit = emit

    def apply(self, plan: StepPlan, result: StepResult, now_ns: int) -> None:
        require(len(plan.rows) == len(result.rows), "a result has one row per plan row")
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            require((row.seq, row.epoch) == (outcome.seq, outcome.epoch), "result rows come in plan order")
            seq = self._current(row)
            if seq is None:
                self._counters.late_results += 1
            else:
                self._apply_row(seq, row, outcome, now_ns)

    def fail(self, plan: StepPlan, message: str, now_ns: int) -> None:
        """The step was lost: everyone who had a row in it ends with an error, nobody else does."""
        for row in plan.rows:
            seq = self._current(row)
            if seq is not None:
                self._endings.end(seq, FinishReason.ERROR, now_ns, message=message)

    def _current(self, row: PlanRow) -> Seq | None:
        seq = self._roster.running.get(row.seq)
        return seq if seq is not None and seq.epoch == row.epoch else None

    def _apply_row(self, seq: Seq, row: PlanRow, outcome: RowResult, now_ns: int) -> None:
        if outcome.error is not None:
            self._endings.end(seq, FinishReason.ERROR, now_ns, message=outcome.error)
            return
        was_prefilling = seq.computed < seq.prefill_end
        seq.commit(row.end, outcome.token, len(outcome.prompt_logprobs))
        self._counters.computed_tokens += row.count
        if was_prefilling:
            self._kv.share(seq, now_ns)
        if outcome.token is None:
            if outcome.prompt_logprobs:
                self._endings.tell(seq, (), outcome.prompt_logprobs)
            return
        self._counters.generated_tokens += 1
        self._policy.note_generated(seq)
        if was_prefilling and seq.first_token_ns is None:
            seq.speak(now_ns)
            self._emit(FirstToken(now_ns, seq.spec.request_id))
        logprobs = (outcome.logprobs,) if outcome.logprobs is not None else ()
        reason = _finish_reason(seq, outcome.token)
        if reason is None:
            self._endings.tell(seq, logprobs, outcome.prompt_logprobs)
            return
        stop_token = outcome.token if reason is FinishReason.STOP else None
        self._endings.end(
            seq, reason, now_ns, stop_token=stop_token, logprobs=logprobs, prompt_logprobs=outcome.prompt_logprobs
        )


def _finish_reason(seq: Seq, token: TokenId) -> FinishReason | None:
    """Stop tokens come before length. ``min_tokens`` needs no check here: the sampler masks stop tokens until then."""
    if token in seq.stop_ids:
        return FinishReason.STOP
    if seq.output_count >= seq.spec.max_new_tokens:
        return FinishReason.LENGTH
    return None
