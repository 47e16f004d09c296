"""What bounds the line: requests, tokens and time."""

import pytest

from branchline.base.finish import FinishReason
from branchline.core.events import Admitted
from branchline.core.result import RowResult, StepResult
from branchline.sched.scheduler import LONGEST_RETRY_S
from tests.support.harness import Harness

S = 1_000_000_000
MS = S // 1000


def ends(harness):
    return {name: finishes[0].reason for name, finishes in harness.finishes().items()}


# ---------------------------------------------------------------- a full line


def test_prompt_tokens_in_line_are_bounded():
    harness = Harness(max_queued_tokens=100, max_running=1, overlap=False)
    harness.submit("runs", range(8), max_new=30)
    harness.turn()
    for name, length in (("fits", 60), ("too_much", 41), ("fits_too", 40)):
        harness.submit(name, range(length), max_new=1)
    harness.turn()
    (finish,) = harness.finishes()["too_much"]
    assert (finish.reason, finish.status) == (FinishReason.REJECTED, 429)
    assert finish.message == "The queue is full: 60 prompt tokens are waiting, at most 100 may."
    assert harness.scheduler.stats().waiting_tokens == 100
    harness.run()
    assert harness.scheduler.stats().waiting_tokens == 0
    assert ends(harness)["fits_too"] is FinishReason.LENGTH


def test_a_long_prompt_may_come_if_nobody_waits():
    harness = Harness(max_queued_tokens=10)
    harness.submit("long", range(80), max_new=1)
    harness.run()
    assert ends(harness) == {"long": FinishReason.LENGTH}


def test_retracted_work_does_not_fill_the_line():
    harness = Harness(max_queued_tokens=20, max_running=1, overlap=False)
    harness.submit("runs", range(30), max_new=20)
    harness.turn()
    assert harness.scheduler.retract_youngest(0)
    assert harness.scheduler.stats().waiting_tokens == 0
    harness.submit("waits", range(20), max_new=1)
    harness.run()
    assert set(ends(harness).values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize(("step_ns", "seconds"), [(0, 1), (2 * S, 11), (3600 * S, LONGEST_RETRY_S)])
def test_whoever_is_refused_hears_when_to_come_back(step_ns, seconds):
    """60 tokens too many; a step of 12 tokens took so long."""
    harness = Harness(max_queued_tokens=100, max_running=1, max_step_tokens=12)
    harness.submit("runs", range(12), max_new=30)
    scheduler = harness.scheduler
    scheduler.submit(harness.specs["runs"], 0)
    plan = scheduler.plan(0)
    scheduler.commit(StepResult(plan.step, (RowResult(plan.rows[0].seq, 0, token=5),), step_ns), 0)
    for name, length in (("waits", 80), ("refused", 80)):
        scheduler.submit(harness.submit(name, range(length), max_new=1), 0)
    (finish,) = [output.finish for output in scheduler.take_news() if output.request_id == "refused"]
    assert finish.retry_after_s == seconds


def test_a_line_with_too_many_requests_names_a_time_too():
    harness = Harness(max_queued=1, max_running=1, overlap=False)
    harness.submit("runs", range(8), max_new=30)
    harness.turn()
    for name in ("waits", "refused"):
        harness.submit(name, range(8), max_new=1)
    harness.turn()
    assert harness.finishes()["refused"][0].retry_after_s == 1


# ---------------------------------------------------------------- deadlines


class Admissions:
    def __init__(self):
        self.names = []

    def notice(self, event):
        if isinstance(event, Admitted):
            self.names.append(event.request_id)


def test_a_request_past_its_deadline_is_never_admitted():
    """Not even if the slot it waited for becomes free in the same turn."""
    admissions = Admissions()
    harness = Harness([admissions], max_running=1, waiting_timeout_s=0.05, overlap=False)
    harness.submit("runs", range(5), max_new=3)
    harness.turn()
    harness.submit("late", range(50, 60), max_new=3)
    harness.turn()
    harness.clock.advance(49 * MS)
    harness.run()
    assert admissions.names == ["runs"]
    assert ends(harness)["late"] is FinishReason.WAITING_TIMEOUT
    assert sum(plan.token_count for plan in harness.worker.plans) == 5 + 2


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_may_bring_its_own_limit(overlap):
    harness = Harness(max_running=1, overlap=overlap)
    harness.submit("runs", range(5), max_new=200, timeout_s=0.020)
    harness.submit("waits", range(5), max_new=200, timeout_s=0.010)
    harness.submit("patient", range(5), max_new=4)
    harness.run()
    assert ends(harness) == {
        "runs": FinishReason.RUNNING_TIMEOUT,
        "waits": FinishReason.WAITING_TIMEOUT,
        "patient": FinishReason.LENGTH,
    }
    assert [harness.finishes()[name][0].status for name in ("runs", "waits")] == [504, 503]
    assert harness.finishes()["waits"][0].message == "The request was not finished within its own limit of 0.01 s."
    assert 5 < len(harness.tokens()["runs"]) < 25, "it kept what it had"


@pytest.mark.parametrize(("own_s", "turns"), [(0.03, 30), (None, 50), (9.0, 50)])
def test_the_shorter_of_two_limits_counts(own_s, turns):
    harness = Harness(running_timeout_s=0.05)
    harness.submit("a", range(5), max_new=200, timeout_s=own_s)
    for _ in range(turns):
        harness.turn()
        assert "a" not in harness.finishes()
    harness.turn()
    assert ends(harness)["a"] is FinishReason.RUNNING_TIMEOUT


def test_the_loop_knows_when_to_wake():
    harness = Harness(max_running=1, running_timeout_s=5)
    assert harness.scheduler.next_wakeup_ns() is None
    harness.submit("a", range(5), max_new=200, timeout_s=9)
    harness.turn()
    assert harness.scheduler.next_wakeup_ns() == MS + 5 * S
    harness.submit("b", range(5), max_new=200, timeout_s=2)
    harness.turn()
    assert harness.scheduler.next_wakeup_ns() == 2 * MS + 2 * S
    harness.cancel("b")
    harness.clock.advance(2 * S)
    harness.turn()
    assert harness.scheduler.next_wakeup_ns() == MS + 5 * S, "a deadline of somebody who has gone is dropped when it passes"
    harness.clock.advance(5 * S)
    harness.turn()
    assert harness.scheduler.next_wakeup_ns() is None


def test_time_does_not_stop_for_a_retracted_request():
    harness = Harness(waiting_timeout_s=1)
    harness.submit("a", range(5), max_new=200, timeout_s=0.05)
    for _ in range(10):
        harness.turn()
    harness.scheduler.retract_youngest(harness.clock.now_ns())
    harness.run()
    assert ends(harness)["a"] is FinishReason.RUNNING_TIMEOUT
    assert harness.clock.now_ns() < 60 * MS
