"""Clock, inbox and worker of a simulation, each for itself."""

import pytest

from branchline.base.errors import InvariantBroken
from branchline.core.plan import PlanRow, SlotOpen, StepPlan
from branchline.core.request import SamplingParams
from branchline.sim.clock import VirtualClock
from branchline.sim.inbox import TimedInbox
from branchline.sim.latency import LatencyModel
from branchline.sim.worker import OUTPUT_TOKENS_FROM, SimulatedWorker, simulated_token
from branchline.wire.messages import Cancel

TEN = LatencyModel(fixed_ns=10, per_new_token_ns=0, per_context_token_ns=0, per_row_ns=0)


def test_the_clock_never_runs_backwards():
    clock = VirtualClock(5)
    clock.advance_to(3)
    assert clock.now_ns() == 5
    clock.advance_to(8)
    assert clock.now_ns() == 8


def test_messages_are_drained_when_they_are_due_and_not_before():
    clock = VirtualClock()
    inbox = TimedInbox(clock)
    for at_ns, name in ((10, "b"), (5, "a"), (10, "c"), (20, "d")):
        inbox.put(at_ns, Cancel(name))
    assert inbox.drain() == []
    inbox.wait(None)
    assert clock.now_ns() == 5
    assert [message.request_id for message in inbox.drain()] == ["a"]
    clock.advance_to(15)
    assert [message.request_id for message in inbox.drain()] == ["b", "c"]
    assert not inbox.is_empty


def test_waiting_ends_at_the_timeout_if_nothing_comes_before():
    clock = VirtualClock()
    inbox = TimedInbox(clock)
    inbox.put(100, Cancel("a"))
    inbox.wait(30)
    assert clock.now_ns() == 30
    inbox.wait(1000)
    assert clock.now_ns() == 100


def test_waiting_for_nothing_at_all_is_our_bug():
    with pytest.raises(InvariantBroken, match="never come"):
        TimedInbox(VirtualClock()).wait(None)


def plan(step, *rows, opens=()):
    return StepPlan(step, rows, tuple(SlotOpen(slot, slot, 0, (1,), 1, SamplingParams(), seed, ()) for slot, seed in opens))


def row(slot, start, count, sample=True):
    return PlanRow(slot, slot, 0, start, count, sample, ())


def test_steps_run_one_after_the_other_and_the_clock_moves_when_they_are_collected():
    clock = VirtualClock()
    worker = SimulatedWorker(TEN, clock)
    first = worker.launch(plan(1, row(0, 0, 3), opens=[(0, 7)]))
    second = worker.launch(plan(2, row(0, 3, 1)))
    assert clock.now_ns() == 0
    assert worker.collect(first).duration_ns == 10
    assert clock.now_ns() == 10
    worker.collect(second)
    assert clock.now_ns() == 20
    clock.advance_to(100)
    worker.collect(worker.launch(plan(3, row(0, 4, 1))))
    assert clock.now_ns() == 110


def test_tokens_depend_on_seed_and_position_only():
    worker = SimulatedWorker(TEN, VirtualClock())
    opening = worker.launch(plan(1, row(0, 0, 3), row(1, 0, 2, sample=False), opens=[(0, 7), (1, 8)]))
    # The slot is taken over before the step of its former tenant is collected.
    following = worker.launch(plan(2, row(0, 0, 3), opens=[(0, 9)]))
    assert [each.token for each in worker.collect(opening).rows] == [simulated_token(7, 3), None]
    assert [each.token for each in worker.collect(following).rows] == [simulated_token(9, 3)]


def test_tokens_differ_and_stay_in_their_range():
    tokens = {simulated_token(seed, position) for seed in range(50) for position in range(50)}
    assert len(tokens) == 2500
    assert OUTPUT_TOKENS_FROM <= min(tokens) <= max(tokens) < 2 * OUTPUT_TOKENS_FROM


def test_a_foreign_ticket_is_our_bug():
    with pytest.raises(InvariantBroken, match="another worker"):
        SimulatedWorker(TEN, VirtualClock()).collect(object())
