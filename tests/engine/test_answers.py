"""Questions to the engine, through the loop: which record answers, and who may see what."""

import msgspec
import pytest

from branchline.core.explain import CacheTree, RequestAnswer, RequestList, RequestStory, SchedulerView, WaitingView
from branchline.wire.messages import Ask
from tests.support.harness import Harness


def ask(harness, what, kind, request_id="", tenant=None):
    harness.inbox.put(Ask(call_id="q", what=what, request_id=request_id, tenant=tenant))
    harness.turn()
    told = harness.outbox.replies[-1]
    assert told.call_id == "q"
    return None if told.body is None else msgspec.json.decode(told.body, type=kind)


def short_of_memory():
    """``b`` of tenant two waits for the pages of ``a`` of tenant one."""
    harness = Harness(pages=20, policy="fcfs")
    harness.submit("a", range(30), max_new=20, tenant="one")
    harness.submit("b", range(30), max_new=20, tenant="two")
    harness.turn()
    return harness


def test_a_waiting_a_running_and_a_finished_request():
    harness = short_of_memory()
    (waiting,) = ask(harness, "request", RequestAnswer, "b").choices
    (running,) = ask(harness, "request", RequestAnswer, "a").choices
    assert isinstance(waiting, WaitingView)
    assert isinstance(running, RequestStory)
    assert not running.is_finished
    harness.run()
    (finished,) = ask(harness, "request", RequestAnswer, "b").choices
    assert (finished.is_finished, finished.finish, finished.completion_tokens) == (True, "length", 20)


def test_unknown_requests():
    assert ask(short_of_memory(), "request", RequestAnswer, "nobody") is None


def test_all_choices_of_a_call():
    harness = Harness()
    for index in range(3):
        harness.submit(f"call-{index}", range(8), max_new=2)
    harness.turn()
    answer = ask(harness, "request", RequestAnswer, "call")
    assert [view.request_id for view in answer.choices] == ["call-0", "call-1", "call-2"]


def test_a_tenant_sees_its_own_requests_and_nobody_in_them():
    harness = short_of_memory()
    assert ask(harness, "request", RequestAnswer, "a", tenant="two") is None
    (own,) = ask(harness, "request", RequestAnswer, "b", tenant="two").choices
    assert own.cause.short_pages > 0
    assert own.cause.holders == ()
    harness.run()
    (story,) = ask(harness, "request", RequestAnswer, "b", tenant="two").choices
    assert [miss.reason.value for miss in story.missed] == ["never_seen"], "what others have cached is nobody's business"
    (whole,) = ask(harness, "request", RequestAnswer, "b").choices
    assert [miss.reason.value for miss in whole.missed] == ["other_namespace"]


def test_everything_else():
    harness = short_of_memory()
    assert [line.state for line in ask(harness, "requests", RequestList).requests] == ["waiting", "running"]
    assert ask(harness, "scheduler", SchedulerView).queue.by_cause == {"kv_short": 1}
    harness.run()
    tree = ask(harness, "tree", CacheTree)
    assert tree.pages == harness.cache.page_count == sum(count_pages(root) for root in tree.roots)
    assert len(tree.roots) == 2


def count_pages(node, page_size=4):
    return node.tokens // page_size + sum(map(count_pages, node.children))


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_the_tree_is_bounded(nodes):
    harness = Harness()
    for i in range(4):
        harness.submit(f"r{i}", [*range(8), *range(20 + i * 10, 28 + i * 10)], max_new=1)
        harness.run()

    def shown(node):
        return 1 + sum(map(shown, node.children))

    def known(node):
        return 1 + node.omitted + sum(map(known, node.children))

    roots = harness.cache.outline(nodes)
    assert sum(map(shown, roots)) == nodes
    assert sum(map(known, roots)) >= min(nodes + 1, 6)
    assert sum(map(shown, harness.cache.outline(99))) == 6


def test_a_question_does_not_disturb_an_engine_at_rest():
    harness = Harness()
    harness.submit("a", range(8), max_new=2)
    harness.run()
    harness.loop.idle(0)
    rests = []
    harness.scheduler.rest = lambda: rests.append(1)
    assert ask(harness, "scheduler", SchedulerView).queue.waiting == 0
    harness.loop.idle(0)
    assert rests == []
