"""The worker of one machine: a thread that computes plans in the order in which they were launched.

It feeds itself: the token that step N samples goes into the arrays of step N+1 just before that runs, so N+1 may be
launched while nobody has seen the result of N. All else is done by the thread that launches and collects, beside a step:

    launching thread   arrays of N+1 │      │ results of N │ arrays of N+2 │
    computing thread   step N .........│tokens│ step N+1 ......................│tokens│ step N+2

A step that fails ends the sequences of its rows, here as in the scheduler: rows of theirs in a later plan that was
launched already get an error, the other rows of that plan count. An opening of the slot starts afresh.

Knows: the order of things within a step. Refuses to know: arithmetic, page ownership, when a sequence ends.
"""

import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass

from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from branchline.base.clock import Clock
from branchline.base.errors import InvariantBroken, StepFailed
from branchline.base.ids import StepId
from branchline.core.plan import PageCopy, PlanRow, StepPlan
from branchline.core.ports import Ticket
from branchline.core.result import RowResult, StepResult
from branchline.ops.batch import NO_LOGPROB, NOT_FINITE, NOTHING_LEFT, Choice, Executor, Outcome
from branchline.worker.inputs import Relay, Tenant, make_inputs, scored_positions
from branchline.worker.slots import Done, Sequence, SlotTable, Source

LOST = "The step that computed this request failed."
SENTENCES = {
    NOT_FINITE: "The model produced numbers that are not finite.",
    NOTHING_LEFT: "Every token is forbidden by min_tokens, logit_bias or penalties.",
    NO_LOGPROB: "A token of the prompt is none of the model's and has no log probability.",
}
"""Why there is no choice for a row; safe to show."""


@dataclass(frozen=True, slots=True)
class LocalTicket:
    step: StepId
    tenants: SequenceOf[Tenant]
    done: Future[Done]


class LocalWorker:
    """Implements ``core.ports.Worker`` in this process. One thread launches and collects.

    Args:
        token_limit: usable token ids, ``0 <= token < token_limit``: those that the tokenizer knows.
        threads: threads of the BLAS library, for the whole process, until ``close``.
    """

    def __init__(self, executor: Executor, *, token_limit: int, threads: int, clock: Clock) -> None:
        self._executor = executor
        self._token_limit = min(token_limit, executor.vocab_size)
        self._clock = clock
        self._slots = SlotTable(
            vocab_size=executor.vocab_size, token_limit=self._token_limit, page_count=executor.page_count
        )
        self._limits = threadpool_limits(threads, user_api="blas")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="branchline-worker")

    def launch(self, plan: StepPlan) -> Ticket:
        """What is wrong with a plan is the failure of its step: ``collect`` tells it."""
        try:
            tenants = self._tenants(plan)
            inputs = make_inputs(tenants, page_size=self._executor.page_size, token_limit=self._token_limit)
            step = self._executor.prepare(inputs.batch, inputs.columns, inputs.scored)
        except Exception as error:
            self._slots.fail(plan.rows, LOST)
            failed: Future[Done] = Future()
            failed.set_exception(error)
            return LocalTicket(plan.step, (), failed)
        try:
            done = self._thread.submit(self._execute, plan.copies, inputs.relays, step)
        except RuntimeError as error:
            raise StepFailed("the worker is closed") from error
        for index, sequence in enumerate(sequence for row, sequence in tenants if row.sample):
            sequence.expect(Source(done, index))
        return LocalTicket(plan.step, tenants, done)

    def collect(self, ticket: Ticket) -> StepResult:
        if not isinstance(ticket, LocalTicket):
            raise InvariantBroken("this ticket is another worker's")
        try:
            done = ticket.done.result()
        except CancelledError as error:
            raise StepFailed(f"step {ticket.step} was dropped: the worker is closed") from error
        except Exception as error:
            for _, sequence in ticket.tenants:
                sequence.fail(LOST)
            cause = str(error) if isinstance(error, StepFailed) else f"{type(error).__name__}: {error}"
            raise StepFailed(f"step {ticket.step} failed: {cause}") from error
        return StepResult(ticket.step, tuple(_results(ticket.tenants, done.outcome)), done.duration_ns)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._limits.restore_original_limits()

    def _tenants(self, plan: StepPlan) -> SequenceOf[Tenant]:
        for opening in plan.opens:
            self._slots.open(opening)
        if len({row.slot for row in plan.rows}) < len(plan.rows):
            raise StepFailed("two rows of one plan share a slot")
        return [(row, self._slots.find(row)) for row in plan.rows]

    def _execute(self, copies: SequenceOf[PageCopy], relays: SequenceOf[Relay], step: Callable[[], Outcome]) -> Done:
        started_ns = self._clock.now_ns()
        self._executor.copy_pages(copies)
        for relay in relays:
            relay.fetch()
        outcome = step()
        return Done(outcome, self._clock.now_ns() - started_ns)


def _results(tenants: SequenceOf[Tenant], outcome: Outcome) -> Iterator[RowResult]:
    """Extends the sequences that sampled, ends those that failed."""
    choices, scores = iter(outcome.choices), iter(outcome.scores)
    for (row, sequence), is_finite in zip(tenants, outcome.finite.tolist(), strict=True):
        told = list(itertools.islice(scores, len(scored_positions(row, sequence))))
        yield _result(row, sequence, is_finite, next(choices) if row.sample else None, told)


def _result(
    row: PlanRow, sequence: Sequence, is_finite: bool, choice: Choice | None, scores: SequenceOf[Choice]
) -> RowResult:
    answers = scores if choice is None else [*scores, choice]
    wrong = next((of.token for of in answers if of.token < 0), None) if is_finite else NOT_FINITE
    if wrong is not None:
        sequence.fail(SENTENCES[wrong])
    if sequence.failure is not None:
        return RowResult(row.seq, row.epoch, error=sequence.failure)
    prompt_logprobs = tuple(of.logprobs for of in scores if of.logprobs is not None)
    if choice is None:
        return RowResult(row.seq, row.epoch, prompt_logprobs=prompt_logprobs)
    sequence.learn(choice.token)
    return RowResult(row.seq, row.epoch, choice.token, choice.logprobs, prompt_logprobs)
