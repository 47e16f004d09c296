"""The worker of one machine: a thread that executes plans in the order in which they were launched.

It feeds itself: the token that step N samples goes into the slot before step N+1 runs, so N+1 may be launched while
nobody has seen the result of N.

A step that fails ends the sequences of its rows, here as in the scheduler: rows of theirs in a later plan that was
launched already get an error, the other rows of that plan are computed. An opening of the slot starts afresh.

Knows: the order of things within a step. Refuses to know: arithmetic, page ownership, when a sequence ends.
"""

import itertools
from collections.abc import Sequence as SequenceOf
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from branchline.base.clock import Clock
from branchline.base.errors import InvariantBroken, StepFailed
from branchline.base.ids import Slot, StepId
from branchline.core.plan import PlanRow, StepPlan
from branchline.core.ports import Ticket
from branchline.core.result import RowResult, StepResult, TokenLogprobs
from branchline.memory.kv import FloatArray
from branchline.ops.batch import NO_LOGPROB, NOT_FINITE, NOTHING_LEFT, Choice, Executor
from branchline.worker.inputs import make_batch, make_columns
from branchline.worker.slots import Sequence, SlotTable

LOST = "The step that computed this request failed."
SENTENCES = {
    NOT_FINITE: "The model produced numbers that are not finite.",
    NOTHING_LEFT: "Every token is forbidden by min_tokens, logit_bias or penalties.",
    NO_LOGPROB: "A token of the prompt is none of the model's and has no log probability.",
}
"""Why there is no choice for a row; safe to show."""

Tenants: TypeAlias = SequenceOf[tuple[PlanRow, Sequence]]


@dataclass(frozen=True, slots=True)
class LocalTicket:
    step: StepId
    future: "Future[StepResult]"


class LocalWorker:
    """Implements ``core.ports.Worker`` in this process.

    Args:
        token_limit: usable token ids, ``0 <= token < token_limit``: those that the tokenizer knows.
        threads: threads of the BLAS library, for the whole process, until ``close``.
    """

    def __init__(self, executor: Executor, *, token_limit: int, threads: int, clock: Clock) -> None:
        self._executor = executor
        self._token_limit = min(token_limit, executor.vocab_size)
        self._clock = clock
        self._slots = SlotTable(vocab_size=executor.vocab_size, token_limit=self._token_limit)
        self._limits = threadpool_limits(threads, user_api="blas")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="branchline-worker")

    def launch(self, plan: StepPlan) -> Ticket:
        try:
            return LocalTicket(plan.step, self._thread.submit(self._execute, plan))
        except RuntimeError as error:
            raise StepFailed("the worker is closed") from error

    def collect(self, ticket: Ticket) -> StepResult:
        if not isinstance(ticket, LocalTicket):
            raise InvariantBroken("this ticket is another worker's")
        try:
            return ticket.future.result()
        except CancelledError as error:
            raise StepFailed(f"step {ticket.step} was dropped: the worker is closed") from error

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._limits.restore_original_limits()

    def _execute(self, plan: StepPlan) -> StepResult:
        started_ns = self._clock.now_ns()
        try:
            rows = self._run(plan)
        except Exception as error:
            self._slots.fail(plan.rows, LOST)
            cause = str(error) if isinstance(error, StepFailed) else f"{type(error).__name__}: {error}"
            raise StepFailed(f"step {plan.step} failed: {cause}") from error
        return StepResult(plan.step, rows, self._clock.now_ns() - started_ns)

    def _run(self, plan: StepPlan) -> tuple[RowResult, ...]:
        for opening in plan.opens:
            self._slots.open(opening)
        if len({row.slot for row in plan.rows}) < len(plan.rows):
            raise StepFailed("two rows of one plan share a slot")
        tenants = [(row, self._slots.find(row)) for row in plan.rows]
        self._executor.copy_pages(plan.copies)
        results = self._compute([(row, sequence) for row, sequence in tenants if sequence.failure is None])
        return tuple(results.get(row.slot) or _failed(row, sequence) for row, sequence in tenants)

    def _compute(self, tenants: Tenants) -> dict[Slot, RowResult]:
        """Forward and sampling; extends the sequences that sampled."""
        if not tenants:
            return {}
        rows, sequences = zip(*tenants, strict=True)
        executor = self._executor
        batch = make_batch(rows, sequences, page_size=executor.page_size, page_count=executor.page_count)
        hidden = executor.forward(batch)
        choices = self._sample(rows, sequences, hidden[batch.row_offsets[1:] - 1])
        # One look at all positions: a step of many rows has no time for a call of numpy for each.
        finite = np.logical_and.reduceat(np.isfinite(hidden).all(axis=1), batch.row_offsets[:-1]).tolist()
        borders = itertools.pairwise(batch.row_offsets.tolist())
        return {
            row.slot: self._outcome(row, sequence, hidden[begin:end] if fine else None, choices.get(row.slot))
            for row, sequence, (begin, end), fine in zip(rows, sequences, borders, finite, strict=True)
        }

    def _sample(self, rows: SequenceOf[PlanRow], sequences: SequenceOf[Sequence], last: FloatArray) -> dict[Slot, Choice]:
        """For rows that sample, by slot; ``last [rows, hidden]``: the last position of each row."""
        places = [place for place, row in enumerate(rows) if row.sample]
        if not places:
            return {}
        columns = make_columns([sequences[place] for place in places], token_limit=self._token_limit)
        choices = self._executor.sample(last[places], columns)
        return {rows[place].slot: choices[index] for index, place in enumerate(places)}

    def _outcome(self, row: PlanRow, sequence: Sequence, hidden: FloatArray | None, choice: Choice | None) -> RowResult:
        """``hidden``: of the positions of the row; ``None``: not all are finite."""
        try:
            if hidden is None:
                raise RowFailed(SENTENCES[NOT_FINITE])
            prompt_logprobs = self._prompt_logprobs(row, sequence, hidden)
            if choice is None:
                return RowResult(row.seq, row.epoch, prompt_logprobs=prompt_logprobs)
            choice = _successful(choice)
        except RowFailed as error:
            sequence.fail(str(error))
            return _failed(row, sequence)
        sequence.append(choice.token)
        return RowResult(row.seq, row.epoch, choice.token, choice.logprobs, prompt_logprobs)

    def _prompt_logprobs(self, row: PlanRow, sequence: Sequence, hidden: FloatArray) -> tuple[TokenLogprobs, ...]:
        """For the prompt tokens that follow a position of this row: position ``p`` tells about token ``p + 1``."""
        if row.prompt_logprobs_from is None:
            return ()
        first = max(row.prompt_logprobs_from, row.start + 1)
        behind = max(first, min(row.end + 1, sequence.prompt_count))
        before, top = hidden[first - row.start - 1 : behind - row.start - 1], sequence.sampling.prompt_logprobs or 0
        scores = self._executor.score(before, sequence.tokens[first:behind], top, self._token_limit)
        told = (_successful(scores[index]).logprobs for index in range(behind - first))
        return tuple(logprobs for logprobs in told if logprobs is not None)


class RowFailed(Exception):
    """Nothing can be told about this row; the sentence is safe to show."""


def _successful(choice: Choice) -> Choice:
    if choice.token < 0:
        raise RowFailed(SENTENCES[choice.token])
    return choice


def _failed(row: PlanRow, sequence: Sequence) -> RowResult:
    return RowResult(row.seq, row.epoch, error=sequence.failure)
