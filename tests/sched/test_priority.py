"""Policy ``priority``: who goes first, who has to make way, and that it never goes round in circles."""

import pytest

from branchline.base.finish import FinishReason
from branchline.core.events import Admitted, Retracted
from branchline.sched.retract import choose_victim, fewest_victims
from tests.support.harness import Harness
from tests.support.stamped import reference_output

GAP = 10


class Ear:
    def __init__(self):
        self.heard = []

    def notice(self, event):
        if isinstance(event, Admitted | Retracted):
            self.heard.append((type(event).__name__, event.request_id))


def make(**settings):
    ear = Ear()
    return ear, Harness([ear], policy="priority", preemption_gap=GAP, **{"overlap": False} | settings)


def submit(harness, name, priority, length=8, new=30):
    number = len(harness.specs)
    harness.submit(name, [number * 7 + place for place in range(length)], max_new=new, priority=priority)


def running(harness):
    return {seq.spec.request_id for seq in harness.scheduler._roster.running.values()}


def finish_all(harness):
    harness.run()
    for name, spec in harness.specs.items():
        assert harness.finishes()[name][0].reason is FinishReason.LENGTH
        assert harness.tokens()[name] == reference_output(spec.prompt, spec.seed, 97, spec.max_new_tokens)


def test_higher_priority_goes_first_and_equals_in_arrival_order():
    ear, harness = make(max_running=1)
    for name, priority in (("a", 0), ("b", 5), ("c", 5), ("d", 9)):
        submit(harness, name, priority, new=2)
    finish_all(harness)
    assert [name for what, name in ear.heard if what == "Admitted"] == ["d", "b", "c", "a"]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_lowest_and_latest_makes_way_for_a_slot(overlap):
    ear, harness = make(max_running=3, overlap=overlap)
    for name, priority in (("middle", 5), ("low_early", 0), ("low_late", 0)):
        submit(harness, name, priority)
    harness.turn()
    submit(harness, "high", GAP + 1)
    harness.turn()
    assert running(harness) == {"middle", "low_early", "high"}
    assert ear.heard[-2:] == [("Retracted", "low_late"), ("Admitted", "high")]
    assert harness.scheduler.stats().preemptions == 1
    finish_all(harness)
    assert harness.scheduler.stats().preemptions == 1


@pytest.mark.parametrize("priority", [1, GAP])
def test_a_small_gap_is_no_reason(priority):
    _, harness = make(max_running=1)
    submit(harness, "low", 0)
    harness.turn()
    submit(harness, "high", priority)
    harness.turn()
    assert running(harness) == {"low"}
    finish_all(harness)
    assert harness.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_several_make_way_for_pages_and_no_more_than_needed(overlap):
    _, harness = make(pages=24, page_size=4, max_running=8, overlap=overlap)
    for number in range(4):
        submit(harness, f"low{number}", 0, length=16, new=6)  # 4 pages each, and some for what comes
    for _ in range(3):
        harness.turn()
    assert len(running(harness)) >= 3
    before = len(running(harness))
    submit(harness, "high", 50, length=36, new=4)
    for _ in range(3):  # pages of a step in flight come back with its result
        harness.turn()
    assert "high" in running(harness)
    assert 1 <= harness.scheduler.stats().preemptions < before
    finish_all(harness)


def test_nobody_makes_way_if_it_would_not_be_enough():
    _, harness = make(pages=24, page_size=4, max_running=8)
    submit(harness, "equal", 50, length=40, new=20)
    submit(harness, "low", 0, length=8, new=20)
    harness.turn()
    submit(harness, "high", 50, length=60, new=4)
    for _ in range(5):
        harness.turn()
    assert running(harness) == {"equal", "low"}
    assert harness.scheduler.stats().preemptions == 0
    finish_all(harness)


def test_nobody_makes_way_for_a_request_that_waits_for_its_leader():
    _, harness = make(max_running=2, max_step_tokens=4, page_size=4)
    prompt = list(range(40))
    submit(harness, "low", 0, new=60)
    for _ in range(3):
        harness.turn()
    harness.submit("leader", prompt, max_new=4, priority=50)
    harness.turn()
    harness.submit("follower", [*prompt, 1], max_new=4, priority=50)
    for _ in range(4):
        harness.turn()
    assert running(harness) == {"leader", "low"}
    finish_all(harness)


def test_memory_is_taken_from_the_lowest_priority():
    ear, harness = make(pages=20, page_size=4, max_running=4)
    harness.scheduler._ratio.value = 0.1
    submit(harness, "low", 0, length=12, new=40)
    submit(harness, "high", 9, length=12, new=40)  # no gap that would preempt: memory runs short later
    finish_all(harness)
    assert {name for what, name in ear.heard if what == "Retracted"} == {"low"}


def test_a_stream_of_arrivals_of_every_priority_comes_to_an_end():
    _, harness = make(pages=40, page_size=4, max_running=4, max_step_tokens=16, overlap=True)
    for number in range(60):
        submit(harness, f"r{number}", number * 37 % 100, length=4 + number % 20, new=1 + number % 9)
        harness.turn()
    finish_all(harness)
    assert harness.scheduler.stats().preemptions > 5


def test_victims_by_precedence_then_by_cost():
    class Running:
        def __init__(self, seq, precedence, own_tokens):
            self.seq, self.precedence, self.last_step = seq, precedence, 1
            self.private_pages, self.tree_pages, self.computed = (1, 2), 0, own_tokens

    dear, cheap, low, top = Running(1, 5, 8), Running(2, 5, 1), Running(3, 2, 8), Running(4, 9, 1)
    by = {"precedence": lambda seq: seq.precedence}
    assert choose_victim([dear, cheap, low, top], 4, 2, **by) is low
    assert choose_victim([dear, cheap, top], 4, 2, **by) is cheap
    assert choose_victim([top], 4, 2, **by) is None, "somebody always comes to an end"
    assert choose_victim([dear, cheap], 4, 2) is cheap
    assert choose_victim([dear, cheap, low], 4, 2) is cheap


def test_the_shortest_list_of_victims():
    assert fewest_victims([1, 2, 3], lambda some: sum(some) >= 3) == [1, 2]
    assert fewest_victims([1, 2, 3], lambda some: sum(some) >= 9) == []
    assert fewest_victims([], lambda some: True) == []
