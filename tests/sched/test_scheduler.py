"""Single behaviours of the scheduler, each with its name."""

import pytest

from branchline.base.config import EngineConfig
from branchline.base.errors import ConfigError, InvariantBroken
from branchline.base.finish import FinishReason
from branchline.core.events import Admitted, Committed, Finished, FirstToken, Planned, Submitted
from branchline.core.result import RowResult, StepResult
from tests.support.harness import Harness
from tests.support.stamped import reference_output

S = 1_000_000_000


def reason(harness, name):
    (finish,) = harness.finishes()[name]
    return finish.reason


def test_decode_rows_and_several_prefill_chunks_share_one_step():
    harness = Harness(max_step_tokens=10, max_running=4, overlap=False)
    harness.submit("a", [1] * 3, max_new=10)
    harness.turn()
    harness.submit("b", [2] * 6, max_new=2)
    harness.submit("c", [3] * 20, max_new=2)
    harness.turn()
    assert [(row.start, row.count, row.sample) for row in harness.worker.plans[-1].rows] == [
        (3, 1, True),
        (0, 6, True),
        (0, 3, False),
    ]


def test_overlap_plans_the_next_step_before_the_tokens_of_the_last_are_known():
    harness = Harness(overlap=True)
    harness.submit("a", [1, 2, 3], max_new=5)
    harness.turn()
    assert [plan.step for plan in harness.worker.plans] == [1, 2]
    assert harness.worker.plans[1].rows[0].start == 3
    assert harness.tokens()["a"] == reference_output([1, 2, 3], 7, 97, 1)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_that_ends_by_length_never_computes_a_token_too_many(overlap):
    harness = Harness(overlap=overlap)
    harness.submit("a", [1, 2, 3], max_new=5)
    harness.run()
    assert sum(plan.token_count for plan in harness.worker.plans) == 3 + 4
    assert harness.scheduler.stats().late_results == 0


def test_a_token_sampled_beyond_a_stop_token_is_dropped():
    harness = Harness(overlap=True)
    output = reference_output([1, 2, 3], 7, 97, 5)
    harness.submit("a", [1, 2, 3], max_new=50, stop_ids=(output[3],))
    harness.run()
    assert harness.tokens()["a"] == output[:4]
    assert reason(harness, "a") is FinishReason.STOP
    assert harness.finishes()["a"][0].stop_token == output[3]
    assert harness.scheduler.stats().late_results == 1


def test_the_second_request_hits_all_but_its_last_token():
    harness = Harness(page_size=4)
    prompt = list(range(30))
    harness.submit("a", prompt, max_new=2)
    harness.run()
    harness.submit("b", prompt, max_new=2)
    harness.run()
    assert harness.finishes()["b"][0].usage.cached_tokens == 28  # whole pages; the rest was never part of a whole page


def test_a_conversation_hits_its_own_output():
    harness = Harness(page_size=4)
    prompt = list(range(21))
    harness.submit("a", prompt, max_new=12)
    harness.run()
    harness.submit("b", prompt + harness.tokens()["a"] + [5, 6], max_new=2)
    harness.run()
    assert harness.finishes()["b"][0].usage.cached_tokens == 32  # 33 tokens known; KV of 32 was computed, all on whole pages


def test_namespaces_do_not_share():
    harness = Harness()
    for salt in ("x", "y"):
        harness.submit(salt, range(40), max_new=1, salt=salt)
        harness.run()
    assert harness.finishes()["y"][0].usage.cached_tokens == 0


def test_a_burst_with_a_common_prefix_computes_it_once():
    harness = Harness(pages=256, max_running=16, max_step_tokens=64)
    shared = list(range(80))
    for i in range(16):
        harness.submit(f"r{i}", [*shared, 90 + i % 5, i], max_new=4)
    harness.run()
    assert harness.scheduler.stats().computed_tokens < 80 + 16 * (2 + 4)


def test_without_a_cache_nobody_waits_for_a_leader():
    harness = Harness(pages=256, max_running=16, prefix_cache=False, max_step_tokens=64)
    for i in range(4):
        harness.submit(f"r{i}", range(16), max_new=4)
    harness.turn()
    assert len(harness.worker.plans[0].rows) == 4


def test_what_can_never_fit_is_refused_at_once():
    harness = Harness(pages=8, page_size=4)
    harness.submit("big", range(30), max_new=3)
    harness.submit("small", range(29), max_new=3)
    harness.run()
    assert reason(harness, "big") is FinishReason.REJECTED
    assert harness.finishes()["big"][0].status == 400
    assert reason(harness, "small") is FinishReason.LENGTH


@pytest.mark.parametrize("filler", range(20, 30))
def test_a_request_that_needs_the_whole_pool_gets_it_whatever_is_cached(filler):
    harness = Harness(pages=8, page_size=4)
    harness.submit("first", range(filler), max_new=2)
    harness.run()
    harness.submit("second", [*range(6), *range(50, 73)], max_new=3)  # shares a page and a half, needs all eight
    harness.run()
    assert reason(harness, "second") is FinishReason.LENGTH


def test_a_full_queue_refuses_but_takes_retracted_work_back():
    harness = Harness(max_queued=1, max_running=1, overlap=False)
    harness.submit("runs", range(5), max_new=30)
    harness.turn()
    harness.submit("waits", range(5), max_new=2)
    harness.submit("too_many", range(5), max_new=2)
    harness.turn()
    assert harness.finishes()["too_many"][0].status == 429
    assert harness.scheduler.retract_youngest(0)
    harness.run()
    assert reason(harness, "runs") is FinishReason.LENGTH
    assert reason(harness, "waits") is FinishReason.LENGTH


def test_a_live_id_cannot_come_twice_but_may_come_again():
    harness = Harness()
    harness.submit("a", range(5), max_new=4)
    harness.submit("a", range(9), max_new=4)
    harness.run()
    assert sorted(finish.status for finish in harness.finishes()["a"]) == [200, 409]
    harness.submit("a", range(5), max_new=4)
    harness.run()
    assert len(harness.finishes()["a"]) == 3


def test_drain_finishes_what_is_here_and_refuses_what_comes():
    harness = Harness(max_running=1)
    harness.submit("runs", range(5), max_new=8)
    harness.submit("waits", range(5), max_new=8)
    harness.turn()
    harness.scheduler.drain()
    harness.submit("late", range(5), max_new=8)
    harness.run()
    assert [reason(harness, name) for name in ("runs", "waits", "late")] == [
        FinishReason.LENGTH,
        FinishReason.LENGTH,
        FinishReason.REJECTED,
    ]


def test_pause_keeps_everything_in_place():
    harness = Harness()
    harness.submit("a", range(5), max_new=8)
    harness.turn()
    harness.scheduler.pause()
    harness.run()
    assert harness.scheduler.stats().running == 1
    steps = harness.scheduler.stats().steps
    for _ in range(5):
        assert not harness.turn()
    assert harness.scheduler.stats().steps == steps
    harness.scheduler.resume()
    harness.run()
    assert harness.tokens()["a"] == reference_output(range(5), 7, 97, 8)


def test_flush_is_refused_while_something_runs():
    harness = Harness()
    harness.submit("a", range(9), max_new=8)
    harness.turn()
    assert not harness.scheduler.flush()
    harness.run()
    assert harness.ledger.tree_pages
    assert harness.scheduler.flush()
    assert harness.ledger.free_pages == harness.ledger.page_count


def test_waiting_and_running_timeouts_are_told_apart():
    harness = Harness(max_running=1, waiting_timeout_s=2, running_timeout_s=5)
    harness.submit("runs", range(5), max_new=200)
    harness.submit("waits", range(5), max_new=200)
    harness.turn()
    assert harness.scheduler.next_wakeup_ns() <= harness.clock.now_ns() + 2 * S
    harness.clock.advance(2 * S)
    harness.turn()
    assert reason(harness, "waits") is FinishReason.WAITING_TIMEOUT
    assert "runs" not in harness.finishes()
    harness.clock.advance(3 * S)
    harness.turn()
    assert reason(harness, "runs") is FinishReason.RUNNING_TIMEOUT
    harness.run()
    assert harness.scheduler.is_empty


def test_a_retracted_request_has_no_waiting_timeout_any_more():
    harness = Harness(waiting_timeout_s=1)
    harness.submit("a", range(5), max_new=30)
    harness.turn()
    harness.clock.advance(3 * S)
    harness.scheduler.retract_youngest(harness.clock.now_ns())
    harness.run()
    assert reason(harness, "a") is FinishReason.LENGTH


@pytest.mark.parametrize("turns", range(8))
def test_an_abort_at_any_point_gives_everything_back(turns):
    harness = Harness(max_step_tokens=8, max_running=4)
    harness.submit("a", range(30), max_new=6)
    harness.submit("b", range(12), max_new=6)
    for _ in range(turns):
        harness.turn()
    harness.cancel("a")
    harness.run()
    assert harness.tokens()["b"] == reference_output(range(12), 7, 97, 6)
    assert len(harness.finishes()["a"]) == 1
    assert harness.scheduler.stats().pages_private == 0


def test_a_lost_step_ends_its_rows_and_nobody_else():
    harness = Harness(overlap=True, max_running=2, max_step_tokens=4)
    harness.worker.fail_steps = {3}
    harness.submit("a", range(4), max_new=20)
    harness.turn()
    harness.turn()
    harness.submit("b", range(4), max_new=6)
    harness.run()
    assert reason(harness, "a") is FinishReason.ERROR
    assert harness.tokens()["b"] == reference_output(range(4), 7, 97, 6)


def test_a_bad_row_ends_alone_and_is_not_cached():
    harness = Harness(overlap=False)
    harness.worker.bad_rows = {(1, 0)}
    harness.submit("a", range(20), max_new=5)
    harness.submit("b", range(50, 70), max_new=5)
    harness.run()
    assert reason(harness, "a") is FinishReason.ERROR
    assert harness.tokens()["b"] == reference_output(range(50, 70), 7, 97, 5)
    harness.submit("again", range(20), max_new=5)
    harness.run()
    assert harness.finishes()["again"][0].usage.cached_tokens == 0


def test_memory_pressure_retracts_but_everyone_finishes_correctly():
    harness = Harness(pages=16, page_size=4, max_running=8, max_step_tokens=32)
    for i in range(8):
        harness.submit(f"r{i}", [i] * 7, max_new=40, seed=i)
    harness.run()
    assert harness.scheduler.stats().retractions
    for i in range(8):
        assert harness.tokens()[f"r{i}"] == reference_output([i] * 7, i, 97, 40)


def test_lpm_takes_the_longest_cached_prefix_first_and_fcfs_the_first():
    for policy, expected in (("lpm", "hot"), ("fcfs", "cold")):
        harness = Harness(policy=policy, max_running=1, overlap=False)
        harness.submit("seed", range(40), max_new=1)
        harness.run()
        harness.submit("cold", range(50, 90), max_new=1)
        harness.submit("hot", range(41), max_new=1)
        harness.run()
        assert next(name for name in harness.finishes() if name != "seed") == expected


def test_results_must_come_in_order_and_match_their_plan():
    harness = Harness()
    harness.submit("a", range(3), max_new=4)
    harness.inbox.drain()
    scheduler = harness.scheduler
    scheduler.submit(harness.specs["a"], 0)
    scheduler.plan(0)
    with pytest.raises(InvariantBroken):
        scheduler.commit(StepResult(2, ()), 0)
    with pytest.raises(InvariantBroken):
        scheduler.commit(StepResult(1, (RowResult(99, 0),)), 0)


def test_observers_hear_the_story_in_order():
    heard = []

    class Ear:
        def notice(self, event):
            heard.append(event)

    harness = Harness(observers=[Ear()], overlap=False)
    harness.submit("a", range(3), max_new=2)
    harness.run()
    story = [Submitted, Admitted, Planned, FirstToken, Committed, Planned, Finished, Committed]
    assert [type(event) for event in heard] == story


def test_a_budget_below_the_number_of_rows_is_a_contradiction():
    with pytest.raises(ConfigError):
        EngineConfig(max_step_tokens=8, max_running=9)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_max_new_tokens_counts_across_retractions(limit):
    harness = Harness()
    harness.submit("a", range(6), max_new=limit)
    harness.turn()
    harness.scheduler.retract_youngest(0)
    harness.run()
    assert harness.tokens()["a"] == reference_output(range(6), 7, 97, limit)


@pytest.mark.parametrize(("pages", "commits"), [(64, 256), (1024, 512)])
def test_the_books_of_a_busy_engine_are_proven_now_and_then(pages, commits, monkeypatch):
    proofs = []
    harness = Harness(pages=pages, page_size=16, overlap=False, check_every=10**9)
    monkeypatch.setattr(harness.scheduler, "check", lambda: proofs.append(harness.scheduler.stats().steps))
    harness.submit("a", range(3), max_new=1000)
    harness.run()
    assert proofs == list(range(commits, 1001, commits))


@pytest.mark.parametrize("overlap", [False, True])
def test_who_runs_alone_gets_every_page_that_nobody_uses(overlap):
    """A short common beginning of a long cached prompt: what comes after it is no longer wanted. (It was locked as part
    of the same node, and the only request of the engine waited for ever.)"""
    harness = Harness(pages=6, page_size=4, overlap=overlap)
    harness.submit("long", range(20), max_new=1)
    harness.run()
    assert harness.scheduler.stats().pages_tree == 5
    harness.submit("short", [*range(4), 90, 91], max_new=18)
    harness.run()
    assert harness.tokens()["short"] == reference_output([*range(4), 90, 91], 7, 97, 18)
    assert harness.finishes()["short"][0].usage.cached_tokens == 4
