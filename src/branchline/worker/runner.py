"""The worker of one machine: a thread that executes plans in the order in which they were launched.

It feeds itself: the token that step N samples goes into the slot before step N+1 runs, so N+1 may be launched while
nobody has seen the result of N.

A step that fails ends the sequences of its rows, here as in the scheduler: rows of theirs in a later plan that was
launched already get an error, the other rows of that plan are computed. An opening of the slot starts afresh.

Knows: the order of things within a step. Refuses to know: arithmetic, page ownership, when a sequence ends.
"""

from collections.abc import Iterator
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
from branchline.ops.batch import Executor
from branchline.worker.inputs import make_batch
from branchline.worker.sample import (
    NOTHING,
    Head,
    RowFailed,
    decide,
    require_finite,
    token_logprobs,
    wants_only_the_best,
)
from branchline.worker.slots import Sequence, SlotTable

SLAB_POSITIONS = 32
"""Prompt positions whose logits exist at the same time."""
LOST = "The step that computed this request failed."

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
        hidden = np.split(executor.forward(batch), batch.row_offsets[1:-1])
        tenants_hidden = tuple(zip(rows, sequences, hidden, strict=True))
        heads = self._heads(tenants_hidden)
        return {row.slot: self._outcome(row, sequence, part, heads.get(row.slot)) for row, sequence, part in tenants_hidden}

    def _heads(self, tenants: SequenceOf[tuple[PlanRow, Sequence, FloatArray]]) -> dict[Slot, Head]:
        """For rows that sample: the best token if they want nothing else, else their logits."""
        last = [(row.slot, wants_only_the_best(of), part[-1]) for row, of, part in tenants if row.sample]
        simple = {slot: hidden for slot, only_best, hidden in last if only_best}
        others = {slot: hidden for slot, only_best, hidden in last if not only_best}
        best = self._executor.greedy(np.stack([*simple.values()]), self._token_limit).tolist() if simple else ()
        logits = self._logits(np.stack([*others.values()])) if others else ()
        return {**dict(zip(simple, best, strict=True)), **dict(zip(others, logits, strict=True))}

    def _outcome(self, row: PlanRow, sequence: Sequence, hidden: FloatArray, head: Head | None) -> RowResult:
        try:
            require_finite(hidden)
            prompt_logprobs = tuple(self._prompt_logprobs(row, sequence, hidden))
            choice = NOTHING if head is None else decide(head, sequence)
        except RowFailed as error:
            sequence.fail(str(error))
            return _failed(row, sequence)
        if choice.token is not None:
            sequence.append(choice.token)
        return RowResult(row.seq, row.epoch, choice.token, choice.logprobs, prompt_logprobs)

    def _prompt_logprobs(self, row: PlanRow, sequence: Sequence, hidden: FloatArray) -> Iterator[TokenLogprobs]:
        """For the prompt tokens that follow a position of this row: position ``p`` tells about token ``p + 1``."""
        if row.prompt_logprobs_from is None:
            return
        first = max(row.prompt_logprobs_from, row.start + 1)
        behind = min(row.end + 1, sequence.prompt_count)
        top = sequence.sampling.prompt_logprobs or 0
        for start in range(first, behind, SLAB_POSITIONS):
            positions = range(start, min(start + SLAB_POSITIONS, behind))
            slab = self._logits(hidden[positions[0] - row.start - 1 : positions[-1] - row.start])
            for position, logits in zip(positions, slab, strict=True):
                require_finite(logits)
                yield token_logprobs(logits, int(sequence.tokens[position]), top)

    def _logits(self, hidden: FloatArray) -> FloatArray:
        return self._executor.logits(hidden)[:, : self._token_limit]


def _failed(row: PlanRow, sequence: Sequence) -> RowResult:
    return RowResult(row.seq, row.epoch, error=sequence.failure)
