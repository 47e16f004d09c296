"""The loop: order of things, controls, rest."""

import pytest

from branchline.wire.messages import Cancel, Control
from tests.support.harness import Harness
from tests.support.stamped import reference_output


def control(harness, verb):
    harness.inbox.put(Control(call_id=verb, verb=verb))
    harness.turn()
    return harness.outbox.replies[-1]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_worker_always_has_a_plan_in_hand(overlap):
    """With depth 1 a second plan is launched before the first is collected: the worker never waits for the scheduler."""
    harness = Harness(overlap=overlap)
    most = 0
    collect = harness.worker.collect

    def watching(ticket):
        nonlocal most
        most = max(most, len(harness.worker.queue))
        return collect(ticket)

    harness.worker.collect = watching
    harness.submit("a", range(5), max_new=8)
    harness.run()
    assert most == (2 if overlap else 1)


def test_controls_answer_with_their_call_id():
    harness = Harness()
    assert control(harness, "pause").call_id == "pause"
    assert harness.scheduler.stats().paused
    assert control(harness, "continue").done
    assert not harness.scheduler.stats().paused
    assert control(harness, "check").done
    assert not control(harness, "make coffee").done


def test_flush_finishes_steps_in_flight_and_refuses_while_someone_runs():
    harness = Harness()
    harness.submit("a", range(9), max_new=30)
    harness.turn()
    assert not control(harness, "flush").done
    harness.run()
    assert control(harness, "flush").done
    assert harness.ledger.free_pages == harness.ledger.page_count


def test_abort_all_ends_everyone_once():
    harness = Harness(max_running=2)
    for name in "abc":
        harness.submit(name, range(9), max_new=30)
    harness.turn()
    assert control(harness, "abort_all").done
    harness.run()
    assert {name: len(ends) for name, ends in harness.finishes().items()} == {"a": 1, "b": 1, "c": 1}
    assert harness.scheduler.is_empty


def test_unknown_ids_are_nothing_to_worry_about():
    harness = Harness()
    harness.inbox.put(Cancel("nobody"))
    harness.turn()
    harness.submit("a", range(3), max_new=3)
    harness.run()
    assert harness.tokens()["a"] == reference_output(range(3), 7, 97, 3)


def test_an_idle_loop_checks_its_books_once_and_sleeps():
    harness = Harness()
    harness.submit("a", range(3), max_new=3)
    harness.run()
    checks, naps = [], []
    harness.scheduler.rest = lambda: checks.append(1)
    harness.inbox.wait = naps.append
    for _ in range(3):
        assert not harness.loop.turn()
        harness.loop.idle(1000)
    assert (len(checks), naps) == (1, [1000, 1000, 1000])


def test_an_idle_loop_wakes_for_the_next_deadline():
    harness = Harness(waiting_timeout_s=1, max_running=1)
    harness.submit("a", range(3), max_new=200)
    harness.submit("b", range(3), max_new=3)
    harness.turn()
    harness.scheduler.pause()
    harness.run()
    naps = []
    harness.inbox.wait = naps.append
    harness.loop.idle(10**12)
    assert 0 < naps[0] <= 10**9


def test_abandon_tells_everyone():
    harness = Harness(max_running=1)
    harness.submit("a", range(3), max_new=200)
    harness.submit("b", range(3), max_new=3)
    harness.turn()
    harness.loop.finish_steps()
    harness.loop.abandon("over")
    assert {name: ends[0].message for name, ends in harness.finishes().items()} == {"a": "over", "b": "over"}
    harness.scheduler.check()
