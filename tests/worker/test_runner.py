"""The worker's promises: order, relay, failure domains, prompt log probabilities; on a scripted and on a real executor."""

import itertools
import threading
from collections import deque

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from branchline.base.clock import MonotonicClock
from branchline.base.errors import InvariantBroken, StepFailed
from branchline.core.plan import PageCopy, PlanRow, SlotOpen, StepPlan
from branchline.core.request import SamplingParams
from branchline.models.random import RandomCheckpoint, tiny_config
from branchline.ops.reference import ReferenceExecutor
from branchline.worker.runner import LOST, LocalWorker
from tests.support.executors import BEST, executor_with_pool

VOCAB = 50
BOOM, POISON = 48, 49
"""Tokens at which the scripted executor raises, or yields NaN."""


class Scripted(ReferenceExecutor):
    """The most likely successor of token t at position p is (3 t + p) mod 40; other logits fall with their ids."""

    page_size, page_count, vocab_size = 4, 64, VOCAB

    def __init__(self):
        self.batches, self.copied = [], []
        self.gate = threading.Event()
        self.gate.set()

    def copy_pages(self, copies):
        self.copied.extend(copies)

    def forward(self, batch):
        assert self.gate.wait(10)
        self.batches.append(batch)
        if BOOM in batch.tokens:
            raise ArithmeticError("boom")
        hidden = np.stack([batch.tokens, batch.positions], axis=1).astype(np.float32)
        hidden[batch.tokens == POISON] = np.nan
        return hidden

    def logits(self, hidden):
        best = np.nan_to_num(3 * hidden[:, 0] + hidden[:, 1]).astype(int) % 40
        logits = np.tile(-0.1 * np.arange(VOCAB, dtype=np.float32), (len(hidden), 1))
        logits[np.arange(len(hidden)), best] = 1
        logits[:, VOCAB - 5 :] = 9  # ids that no tokenizer knows
        logits[np.isnan(hidden).any(axis=1)] = np.nan
        return logits


def follow(token, position):
    return (3 * token + position) % 40


@pytest.fixture
def scripted():
    return Scripted()


@pytest.fixture
def worker(scripted):
    worker = LocalWorker(scripted, token_limit=VOCAB - 5, threads=1, clock=MonotonicClock())
    yield worker
    scripted.gate.set()
    worker.close()


def open_slot(slot, tokens, epoch=0, seq=None, prompt_count=None, **sampling):
    params = SamplingParams(**{"temperature": 0.0} | sampling)
    seq = slot + 100 if seq is None else seq
    return SlotOpen(slot, seq, epoch, tuple(tokens), prompt_count or len(tokens), params, 5, ())


def row(slot, start, count, sample=True, epoch=0, seq=None, pages=None, **more):
    pages = tuple(range(8 * slot, 8 * slot + 8)) if pages is None else pages
    return PlanRow(slot, slot + 100 if seq is None else seq, epoch, start, count, sample, pages, **more)


def run(worker, step, rows, opens=(), copies=()):
    return worker.collect(worker.launch(StepPlan(step, tuple(rows), tuple(opens), tuple(copies))))


# ---------------------------------------------------------------- order and relay


def test_next_plan_uses_the_token_of_the_last_before_anyone_saw_it(worker, scripted):
    scripted.gate.clear()
    first = worker.launch(StepPlan(1, (row(0, 0, 3),), (open_slot(0, (1, 2, 3)),)))
    second = worker.launch(StepPlan(2, (row(0, 3, 1), row(1, 0, 2)), (open_slot(1, (8, 9)),)))
    third = worker.launch(StepPlan(3, (row(1, 2, 1), row(0, 4, 1))))
    assert scripted.batches == []
    scripted.gate.set()
    a = follow(3, 2)
    b, c = follow(a, 3), follow(9, 1)
    tokens = [[result.token for result in worker.collect(ticket).rows] for ticket in (first, second, third)]
    assert tokens == [[a], [b, c], [follow(c, 2), follow(b, 4)]]
    assert [batch.tokens.tolist() for batch in scripted.batches] == [[1, 2, 3], [a, 8, 9], [c, b]]


def test_a_row_launched_ahead_of_a_failure_gets_the_same_error_and_its_neighbour_a_token(worker, scripted):
    scripted.gate.clear()
    opens = (open_slot(0, (POISON,)), open_slot(1, (3,)))
    first = worker.launch(StepPlan(1, (row(0, 0, 1), row(1, 0, 1)), opens))
    second = worker.launch(StepPlan(2, (row(0, 1, 1), row(1, 1, 1))))
    scripted.gate.set()
    failed, fine = worker.collect(first).rows
    assert [of.error for of in worker.collect(second).rows] == [failed.error, None]
    assert "not finite" in failed.error
    assert scripted.batches[1].tokens.tolist() == [0, fine.token]


def test_a_later_table_has_the_pages_of_its_own_plan(worker, scripted):
    run(worker, 1, [row(0, 0, 4, pages=(7,))], [open_slot(0, (1, 2, 3, 4))])
    run(worker, 2, [row(0, 4, 1, pages=(7, 9))])
    run(worker, 3, [row(0, 5, 1, pages=(7, 9))])
    run(worker, 4, [row(0, 6, 1, pages=(8, 9))])
    tables = [batch.page_tables.tolist() for batch in scripted.batches]
    assert tables == [[[7]], [[7, 9]], [[7, 9]], [[8, 9]]]


def test_results_carry_identity_step_and_duration(worker):
    result = run(
        worker, 7, [row(2, 0, 2, epoch=4), row(1, 0, 1, sample=False)], [open_slot(2, (1, 2), epoch=4), open_slot(1, (3, 4))]
    )
    assert result.step == 7
    assert [(of.seq, of.epoch, of.token is None) for of in result.rows] == [(102, 4, False), (101, 0, True)]
    assert result.duration_ns > 0


def test_chunks_give_positions_pages_and_offsets(worker, scripted):
    run(worker, 1, [row(0, 0, 5, sample=False)], [open_slot(0, range(9))])
    run(worker, 2, [row(0, 5, 4), row(1, 0, 1)], [open_slot(1, (7,))])
    batch = scripted.batches[1]
    assert batch.positions.tolist() == [5, 6, 7, 8, 0]
    assert batch.row_offsets.tolist() == [0, 4, 5]
    assert batch.page_tables[:, 0].tolist() == [0, 8]
    assert batch.page_tables.shape == (2, 3)


def test_copies_run_before_the_rows(worker, scripted):
    copies = (PageCopy(1, 2, 3), PageCopy(4, 5, 1))
    run(worker, 1, [row(0, 0, 1)], [open_slot(0, (1,))], copies)
    assert tuple(scripted.copied) == copies


def test_ids_that_the_tokenizer_lacks_are_never_chosen(worker):
    result = run(
        worker, 1, [row(0, 0, 1), row(1, 0, 1)], [open_slot(0, (1,), logprobs=49), open_slot(1, (1,), temperature=9.0)]
    )
    assert all(of.token < VOCAB - 5 for of in result.rows)
    assert len(result.rows[0].logprobs.top) == VOCAB - 5


# ---------------------------------------------------------------- failures


def test_a_failed_step_ends_its_own_sequences_only(worker, scripted):
    run(worker, 1, [row(0, 0, 1), row(1, 0, 1)], [open_slot(0, (1,)), open_slot(1, (2,))])
    scripted.gate.clear()
    lost = worker.launch(StepPlan(2, (row(0, 1, 1), row(2, 0, 1)), (open_slot(2, (BOOM,)),)))
    later = worker.launch(StepPlan(3, (row(0, 2, 1), row(1, 1, 1), row(2, 1, 1))))
    scripted.gate.set()
    with pytest.raises(StepFailed, match="step 2 failed: ArithmeticError: boom"):
        worker.collect(lost)
    rows = worker.collect(later).rows
    assert [of.error for of in rows] == [LOST, None, LOST]
    assert rows[1].token == follow(follow(2, 0), 1)


def test_an_opening_starts_afresh_after_a_failure(worker):
    with pytest.raises(StepFailed):
        run(worker, 1, [row(0, 0, 1)], [open_slot(0, (BOOM,))])
    result = run(worker, 2, [row(0, 0, 2, epoch=1)], [open_slot(0, (1, 2), epoch=1)])
    assert result.rows[0].token == follow(2, 1)


def test_poisoned_row_gets_an_error_and_its_neighbours_a_token(worker):
    opens = [open_slot(0, (1,)), open_slot(1, (POISON,)), open_slot(2, (3,))]
    rows = run(worker, 1, [row(0, 0, 1), row(1, 0, 1), row(2, 0, 1)], opens).rows
    assert [of.token for of in rows] == [follow(1, 0), None, follow(3, 0)]
    assert "not finite" in rows[1].error
    again = run(worker, 2, [row(1, 1, 1), row(0, 1, 1)]).rows
    assert again[0].error == rows[1].error
    assert again[1].token == follow(follow(1, 0), 1)


def test_poison_in_a_chunk_is_found_before_its_pages_are_shared(worker):
    result = run(worker, 1, [row(0, 0, 2, sample=False)], [open_slot(0, (POISON, 2, 3))])
    assert "not finite" in result.rows[0].error


def test_a_row_that_may_choose_nothing_gets_an_error_and_its_neighbour_a_token(worker):
    barred = SlotOpen(0, 100, 0, (1,), 1, SamplingParams(temperature=0, min_tokens=1), 5, tuple(range(VOCAB)))
    rows = run(worker, 1, [row(0, 0, 1), row(1, 0, 1)], [barred, open_slot(1, (2,))]).rows
    assert rows[0].token is None
    assert "forbidden" in rows[0].error
    assert rows[1].token == follow(2, 0)


def test_a_prompt_token_that_cannot_be_drawn_has_no_logprob(worker):
    opens = [open_slot(0, (1, VOCAB - 3, 3), prompt_logprobs=0), open_slot(1, (2,))]
    rows = run(worker, 1, [row(0, 0, 3, prompt_logprobs_from=0), row(1, 0, 1)], opens).rows
    assert "no log probability" in rows[0].error
    assert rows[1].token == follow(2, 0)


def test_token_outside_the_vocabulary_is_an_error_of_the_row(worker):
    rows = run(worker, 1, [row(0, 0, 1), row(1, 0, 1)], [open_slot(0, (VOCAB,)), open_slot(1, (1,))]).rows
    assert "outside" in rows[0].error
    assert rows[1].token == follow(1, 0)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (row(3, 0, 1), "not open"),
        (row(0, 0, 2, epoch=1), "not open"),
        (row(0, 0, 2, seq=55), "not open"),
        (row(0, 2, 1), "do not suit 2 known"),
        (row(0, 0, 3, sample=False), "do not suit 2 known"),
        (row(0, 0, 1), "do not suit 2 known"),
        (row(0, 0, 0), "do not suit 2 known"),
        (row(0, 0, 2, pages=()), "cannot hold"),
        (row(0, 0, 2, pages=(64,)), "outside"),
        (row(0, 0, 2, pages=(-1,)), "outside"),
        (row(1, 0, 1), "share a slot"),
    ],
    ids=str,
)
def test_a_plan_that_does_not_fit_fails_as_a_step(worker, bad, words):
    with pytest.raises(StepFailed, match=words):
        run(worker, 1, [row(1, 0, 1), bad], [open_slot(0, (1, 2)), open_slot(1, (4,))])
    assert run(worker, 2, [row(5, 0, 1)], [open_slot(5, (1,))]).rows[0].token == follow(1, 0)


def test_a_lost_step_leaves_the_next_tenant_of_a_slot_alone(worker):
    run(worker, 1, [row(0, 0, 1, epoch=1)], [open_slot(0, (1,), epoch=1)])
    with pytest.raises(StepFailed):
        run(worker, 2, [row(0, 1, 1, epoch=0)])
    assert run(worker, 3, [row(0, 1, 1, epoch=1)]).rows[0].token == follow(follow(1, 0), 1)


# ---------------------------------------------------------------- closing


def test_close_is_idempotent_and_refuses_further_plans(worker):
    run(worker, 1, [row(0, 0, 1)], [open_slot(0, (1,))])
    worker.close()
    worker.close()
    with pytest.raises(StepFailed, match="closed"):
        worker.launch(StepPlan(2, (row(0, 1, 1),)))


def test_plans_still_queued_at_close_are_dropped(worker, scripted):
    scripted.gate.clear()
    running = worker.launch(StepPlan(1, (row(0, 0, 1),), (open_slot(0, (1,)),)))
    queued = worker.launch(StepPlan(2, (row(0, 1, 1),)))
    threading.Timer(0.05, scripted.gate.set).start()
    worker.close()
    assert worker.collect(running).rows[0].token == follow(1, 0)
    with pytest.raises(StepFailed, match="dropped"):
        worker.collect(queued)


def test_foreign_tickets_are_refused(worker):
    class Foreign:
        step = 1

    with pytest.raises(InvariantBroken):
        worker.collect(Foreign())


def test_thread_limit_holds_until_close():
    def blas_threads():
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    before = blas_threads()
    worker = LocalWorker(Scripted(), token_limit=VOCAB, threads=1, clock=MonotonicClock())
    assert blas_threads() == {1}
    worker.close()
    assert blas_threads() == before


# ---------------------------------------------------------------- prompt log probabilities


@pytest.mark.parametrize("cuts", [(), (1,), (4, 5), (3, 40), tuple(range(1, 70))], ids=len)
def test_chunks_together_report_every_prompt_token_but_the_first(worker, scripted, cuts):
    """More positions than a slab; the same numbers however the prompt is cut."""
    prompt = [(7 * i) % 40 for i in range(70)]
    edges = [0, *cuts, 70]
    opens, found = [open_slot(0, prompt, prompt_logprobs=2)], []
    for step, (start, end) in enumerate(itertools.pairwise(edges), 1):
        plan_row = row(0, start, end - start, sample=end == 70, pages=tuple(range(18)), prompt_logprobs_from=start)
        found += run(worker, step, [plan_row], opens if step == 1 else ()).rows[0].prompt_logprobs
    assert [of.token for of in found] == prompt[1:]
    for position, of in enumerate(found, 1):
        logits = scripted.logits(np.array([[prompt[position - 1], position - 1]], np.float32))[0, : VOCAB - 5].astype(
            np.float64
        )
        expected = logits - np.log(np.exp(logits).sum())
        assert of.logprob == pytest.approx(expected[of.token], abs=1e-9)
        assert of.top[0] == (follow(prompt[position - 1], position - 1), pytest.approx(expected.max(), abs=1e-9))
        assert len(of.top) == 2


def test_rows_beside_each_other_are_told_about_their_own_prompts(worker):
    prompts = {0: (1, 2, 3), 1: (4, 5), 2: (6, 7, 8, 9)}
    wanted = {0: 2, 1: None, 2: 0}
    opens = [open_slot(slot, prompt, prompt_logprobs=wanted[slot]) for slot, prompt in prompts.items()]
    rows = [
        row(slot, 0, len(prompt), prompt_logprobs_from=None if wanted[slot] is None else 0)
        for slot, prompt in prompts.items()
    ]
    told = [of.prompt_logprobs for of in run(worker, 1, rows, opens).rows]
    assert [[of.token for of in row] for row in told] == [[2, 3], [], [7, 8, 9]]
    assert [[len(of.top) for of in row] for row in told] == [[2, 2], [], [0, 0, 0]]


def test_prompt_logprobs_begin_where_they_are_asked_for_and_end_with_the_prompt(worker):
    opening = open_slot(0, (1, 2, 3, 4, 5, 6), prompt_count=5, prompt_logprobs=0)
    result = run(worker, 1, [row(0, 0, 6, prompt_logprobs_from=3)], [opening])
    assert [of.token for of in result.rows[0].prompt_logprobs] == [4, 5]
    assert result.rows[0].prompt_logprobs[0].top == ()


# ---------------------------------------------------------------- with real numbers


@pytest.fixture(scope="module")
def checkpoint():
    return RandomCheckpoint(tiny_config("llama"), seed=3)


@pytest.fixture(params=BEST)
def real(checkpoint, request):
    executor = executor_with_pool(request.param, checkpoint, page_size=4, page_count=256)
    worker = LocalWorker(executor, token_limit=259, threads=1, clock=MonotonicClock())
    yield worker
    worker.close()


SAMPLINGS = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.3, "top_p": 0.6, "repetition_penalty": 1.2},
    {"temperature": 0.9, "min_p": 0.1, "presence_penalty": 0.7, "logprobs": 3},
    {"temperature": 2.0, "logit_bias": ((5, 3.0),), "frequency_penalty": 0.4},
    {"repetition_penalty": 1.1, "logprobs": 1},
]


def decode(worker, slots, steps, first_step=1):
    """Prompts of slots ``{slot: sampling}`` in one step, then decode rows; tokens by slot."""
    prompts = {slot: [(slot * 31 + i * 7) % 259 for i in range(3 + slot)] for slot in slots}
    opens = [open_slot(slot, prompts[slot], **sampling) for slot, sampling in slots.items()]
    rows = [row(slot, 0, len(prompt)) for slot, prompt in prompts.items()]
    tokens = {slot: [] for slot in slots}
    for step in range(steps):
        for slot, result in zip(slots, run(worker, first_step + step, rows, opens).rows, strict=True):
            tokens[slot].append(result.token)
        opens, rows = (), [row(slot, len(prompts[slot]) + step, 1) for slot in slots]
    return tokens


def test_outputs_do_not_depend_on_neighbours(real):
    together = decode(real, dict(enumerate(SAMPLINGS)), steps=16)
    for slot, sampling in enumerate(SAMPLINGS):
        assert decode(real, {slot: sampling}, steps=16) == {slot: together[slot]}
    assert len({tuple(tokens) for tokens in together.values()}) == len(SAMPLINGS)


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_outputs_do_not_depend_on_how_many_steps_are_launched_ahead(real, ahead):
    """Penalties look back at tokens that are not known when the step is launched."""
    slots = dict(enumerate(SAMPLINGS))
    expected = decode(real, slots, steps=10)
    prompts = {slot: [(slot * 31 + i * 7) % 259 for i in range(3 + slot)] for slot in slots}
    opens = tuple(open_slot(slot, prompts[slot], **sampling) for slot, sampling in slots.items())
    plans = [StepPlan(1, tuple(row(slot, 0, len(prompt)) for slot, prompt in prompts.items()), opens)]
    plans += [
        StepPlan(1 + step, tuple(row(slot, len(prompt) + step - 1, 1) for slot, prompt in prompts.items()))
        for step in range(1, 10)
    ]
    tickets, found = deque(), []
    for plan in plans:
        tickets.append(real.launch(plan))
        if len(tickets) > ahead:
            found.append(real.collect(tickets.popleft()).rows)
    found += [real.collect(ticket).rows for ticket in tickets]
    assert {slot: [rows[slot].token for rows in found] for slot in slots} == expected


def test_same_seed_same_tokens_and_another_seed_others(real):
    hot = {"temperature": 1.5}
    assert decode(real, {1: hot}, steps=12) == decode(real, {1: hot}, steps=12)
    opening = SlotOpen(1, 101, 0, tuple((31 + i * 7) % 259 for i in range(4)), 4, SamplingParams(temperature=1.5), 6, ())
    other = [run(real, 1, [row(1, 0, 4)], [opening]).rows[0].token]
    other += [run(real, step, [row(1, 2 + step, 1)]).rows[0].token for step in range(2, 13)]
    assert other != decode(real, {1: hot}, steps=12)[1]


def test_resumed_sequence_continues_as_if_never_interrupted(real):
    """A retraction: the slot is opened anew with prompt and kept output; seeds go by position, penalties by prompt_count."""
    sampling = {"temperature": 1.0, "presence_penalty": 0.8, "top_p": 0.9}
    whole = decode(real, {0: sampling}, steps=12)[0]
    prompt = [(i * 7) % 259 for i in range(3)]
    kept = [*prompt, *whole[:5]]
    result = run(real, 1, [row(0, 0, 8, epoch=1)], [open_slot(0, kept, epoch=1, prompt_count=3, **sampling)])
    resumed = [result.rows[0].token]
    resumed += [run(real, step, [row(0, 6 + step, 1, epoch=1)]).rows[0].token for step in range(2, 8)]
    assert resumed == whole[5:]
