"""Why does a request wait, what did it find in the cache, what was lost: answers tested against what then happens."""

import random

import pytest

import branchline.sched.notes as notes_module
from branchline.core.explain import (
    Behind,
    Fairness,
    Follows,
    KvShort,
    MissReason,
    NotTried,
    Paused,
    Priority,
    Recovering,
    RowCap,
    TokenBudget,
    WaitingCause,
)
from branchline.core.words import describe, remedy
from branchline.sched.notes import NoNotes
from tests.support.harness import TURN_NS, Harness


def view(harness, name):
    return harness.scheduler.explain.waiting(name, harness.clock.now_ns())


def cause(harness, name):
    return view(harness, name).cause


def missed(harness, name):
    return [(miss.reason, miss.start, miss.token_count) for miss in harness.stories.finished(name).missed]


# ---------------------------------------------------------------- causes


def test_kv_short_with_its_numbers():
    harness = Harness(pages=20, policy="fcfs")
    harness.submit("a", range(30), max_new=20)
    harness.submit("b", range(100, 130), max_new=20)
    harness.submit("c", range(200, 210), max_new=4)
    for _ in range(4):
        harness.turn()
    short = cause(harness, "b")
    assert isinstance(short, KvShort)
    assert short.needed_pages == 8
    assert short.short_pages == short.needed_pages + short.promised_pages - short.available_pages > 0
    assert [(holder.request_id, holder.own_pages) for holder in short.holders] == [("a", 9)]
    assert short.next_release_tokens == short.enough_after_tokens == short.holders[0].remaining_tokens
    assert cause(harness, "c") == Behind("b", WaitingCause.KV_SHORT)
    assert f"short by {short.short_pages} pages" in describe(short)
    steps_left = short.enough_after_tokens
    while view(harness, "b") is not None:
        steps_left -= 1
        harness.turn()
    assert steps_left >= -2, "it started later than was said to be the latest"


def test_row_cap():
    harness = Harness(max_running=2, pages=400, policy="fcfs", overlap=False)
    for i, length in enumerate((9, 5, 30)):
        harness.submit(f"r{i}", range(i * 50, i * 50 + 8), max_new=length)
    harness.turn()
    assert cause(harness, "r2") == RowCap(rows=2, next_row_tokens=4)
    for _ in range(4):
        assert view(harness, "r2") is not None
        harness.turn()
    harness.turn()
    assert view(harness, "r2") is None


def test_token_budget():
    harness = Harness(max_step_tokens=16, pages=400, policy="fcfs", overlap=False)
    harness.submit("a", range(40), max_new=4)
    harness.submit("b", range(100, 120), max_new=4)
    harness.submit("c", range(200, 210), max_new=4)
    harness.turn()
    assert cause(harness, "b") == TokenBudget(step_tokens=16, decode_tokens=0, prefill_tokens=0, prompt_tokens_ahead=24)
    assert cause(harness, "c") == TokenBudget(step_tokens=16, decode_tokens=0, prefill_tokens=0, prompt_tokens_ahead=44)


def test_follows_names_the_leader():
    harness = Harness(max_chunk_tokens=8, pages=400, overlap=False)
    harness.submit("a", range(60), max_new=4)
    harness.submit("b", range(60), max_new=4)
    harness.turn()
    assert cause(harness, "b") == Follows("a", tokens_left=52)


def test_recovering_after_a_retraction():
    harness = Harness(pages=100, policy="fcfs")
    for i in range(9):
        harness.submit(f"r{i}", range(i * 50, i * 50 + 12), max_new=60)
    while not harness.scheduler.stats().retractions:
        harness.turn()
    waiting = [name for name in harness.specs if view(harness, name) is not None]
    available = harness.cache.evictable_pages + harness.ledger.free_pages
    assert available < 25
    assert {cause(harness, name) for name in waiting} == {Recovering(available, needed_pages=25)}
    back = next(name for name in waiting if view(harness, name).retractions)
    assert view(harness, back).waited_ns < harness.clock.now_ns() - TURN_NS, "its time in the line begins anew"


def test_priority():
    harness = Harness(max_running=1, pages=400, policy="priority", preemption_gap=100)
    harness.submit("running", range(8), max_new=50)
    harness.turn()
    harness.submit("low", range(50, 58), priority=1)
    harness.submit("high", range(100, 108), priority=5)
    harness.submit("highest", range(150, 158), priority=7)
    harness.turn()
    assert cause(harness, "low") == Priority("highest", own_priority=1, their_priority=7, ahead_count=2)
    assert isinstance(cause(harness, "highest"), RowCap)
    assert view(harness, "low").position == 3


def test_fairness():
    harness = Harness(max_running=1, pages=400, policy="fair")
    harness.submit("running", range(60), max_new=50, tenant="greedy")
    harness.turn()
    harness.submit("greedy", range(100, 108), tenant="greedy")
    harness.turn()
    assert isinstance(cause(harness, "greedy"), RowCap)
    harness.submit("modest", range(200, 208), tenant="modest")
    for _ in range(4):  # the greedy one is charged for what it generates meanwhile
        harness.turn()
    assert cause(harness, "greedy") == Fairness("modest", ahead_count=1)
    assert isinstance(cause(harness, "modest"), RowCap)


def test_paused_and_not_tried():
    harness = Harness(pages=400)
    harness.control("pause")
    harness.submit("a", range(8))
    harness.turn()
    assert cause(harness, "a") == Paused()
    assert view(harness, "a").starts_in_ns is None
    harness.scheduler.resume()
    assert cause(harness, "a") == NotTried()


def test_every_cause_has_words():
    causes = (
        TokenBudget(512, 10, 502, 1000), RowCap(8, None), Follows("x", 1), Recovering(1, 2), Priority("x", 0, 1, 1),
        Behind("x", WaitingCause.KV_SHORT), Fairness("x", 1), Paused(), NotTried(), KvShort(1, 2, 0, 3, 0, (), None, None),
    )  # fmt: skip
    assert {cause.cause for cause in causes} == set(WaitingCause)
    for each in causes:
        assert describe(each)
        assert remedy(each)
        assert "x" not in describe(each).split(), "sentences name nobody"


# ---------------------------------------------------------------- misses


def test_never_seen_and_shorter_than_a_page():
    harness = Harness()
    harness.submit("a", range(30), max_new=1)
    harness.run()
    harness.submit("again", range(30))
    harness.submit("tiny", range(70, 72))
    harness.run()
    assert missed(harness, "a") == [(MissReason.NEVER_SEEN, 0, 30)]
    assert missed(harness, "again") == [(MissReason.SHORTER_THAN_PAGE, 28, 2)]
    assert missed(harness, "tiny") == [(MissReason.SHORTER_THAN_PAGE, 0, 2)]


def test_a_prompt_that_is_cached_but_for_its_last_token_misses_nothing():
    harness = Harness()
    harness.submit("a", range(32), max_new=8)
    harness.run()
    harness.submit("again", range(32))
    harness.run()
    assert missed(harness, "again") == []
    assert harness.stories.finished("again").cached_tail_tokens == 3


@pytest.mark.parametrize("shared", [8, 10, 12])
def test_diverged_at_the_token(shared):
    harness = Harness()
    harness.submit("a", range(40))
    harness.run()
    harness.submit("b", [*range(shared), *range(60, 80)])
    harness.run()
    assert missed(harness, "b") == [(MissReason.DIVERGED, shared, 20)]


def test_a_conversation_that_goes_on_has_not_diverged():
    harness = Harness()
    harness.submit("a", range(32), max_new=1)
    harness.run()
    harness.submit("b", range(60))
    harness.run()
    assert missed(harness, "b") == [(MissReason.NEVER_SEEN, 32, 28)]


def test_other_namespace():
    harness = Harness()
    harness.submit("a", range(40), salt="x")
    harness.run()
    harness.submit("b", range(40), salt="y")
    harness.submit("c", range(50, 90), salt="y")
    harness.run()
    assert missed(harness, "b") == [(MissReason.OTHER_NAMESPACE, 0, 40)]
    assert missed(harness, "c") == [(MissReason.NEVER_SEEN, 0, 40)]


def test_evicted_for_whom_and_when():
    harness = Harness(pages=16, policy="fcfs")
    harness.submit("a", range(40), max_new=1)
    harness.run()
    harness.submit("thief", range(100, 150), max_new=1)
    harness.run()
    stolen_at_ns = harness.clock.now_ns()
    harness.submit("again", [*range(40), *range(60, 70)], max_new=1)
    harness.run()
    first, second = harness.stories.finished("again").missed
    assert (first.reason, first.evicted_for) == (MissReason.EVICTED, "thief")
    assert first.evicted_at_ns < stolen_at_ns
    assert first.start + first.token_count == 40
    assert (second.reason, second.start, second.token_count) == (MissReason.NEVER_SEEN, 40, 10)
    record = harness.scheduler.explain.scheduler(harness.clock.now_ns()).cache.evictions[-1]
    assert (record.caused_by, record.length_tokens, record.cost_tokens) == ("thief", 40, first.token_count)
    assert record.pages * 4 == record.cost_tokens
    assert record.last_used_at_ns < record.evicted_at_ns == first.evicted_at_ns


def test_a_flush_is_an_eviction_for_nobody():
    harness = Harness()
    harness.submit("a", range(40))
    harness.run()
    assert harness.scheduler.flush()
    harness.submit("again", range(40))
    harness.run()
    assert missed(harness, "again") == [(MissReason.EVICTED, 0, 40)]
    assert harness.stories.finished("again").missed[0].evicted_for == ""


def test_what_the_client_or_the_setting_forbids():
    harness = Harness()
    harness.submit("a", range(40), logprobs=0, prompt_logprobs=0)
    harness.run()
    assert missed(harness, "a") == [(MissReason.LOGPROBS_WANTED, 0, 40)]
    harness = Harness(prefix_cache=False)
    harness.submit("a", range(40))
    harness.run()
    assert missed(harness, "a") == [(MissReason.CACHE_OFF, 0, 40)]


def test_the_memory_of_losses_is_bounded(monkeypatch):
    monkeypatch.setattr(notes_module, "LOST_PAGES", 5)
    harness = Harness(pages=16)
    for i in range(6):
        harness.submit(f"r{i}", range(i * 50, i * 50 + 40), max_new=1)
        harness.run()
    assert len(harness.scheduler._notes._lost) == 5
    harness.submit("first", range(40), max_new=1)
    harness.submit("last", range(200, 240), max_new=1)
    harness.run()
    assert missed(harness, "first") == [(MissReason.NEVER_SEEN, 0, 40)], "forgotten"


# ---------------------------------------------------------------- always


def schedule(seed, questions, **settings):
    """A random schedule; ``questions(harness)`` is called after every turn."""
    rng = random.Random(seed)
    harness = Harness(
        pages=rng.choice([24, 48, 200]), max_running=rng.choice([2, 4, 8]), max_step_tokens=rng.choice([8, 24, 64]),
        policy=rng.choice(["fcfs", "lpm", "hrrn", "fair", "priority", "lof", "random"]), check_every=50, **settings,
    )  # fmt: skip
    for i in range(24):
        start = rng.choice([0, 0, 7, 100])
        harness.submit(
            f"r{i}", range(start, start + rng.randint(1, 60)), max_new=rng.randint(1, 12), salt=rng.choice(["", "s"]),
            tenant=rng.choice(["", "t"]), priority=rng.choice([0, 0, 30]),
        )  # fmt: skip
        for _ in range(rng.randint(0, 3)):
            harness.turn()
            questions(harness)
    while harness.turn():
        questions(harness)
    return harness


def ask_everything(harness):
    """Everybody is explained, and the figures agree with each other."""
    now_ns, explain = harness.clock.now_ns(), harness.scheduler.explain
    whole, lines, stats = explain.scheduler(now_ns), explain.requests(now_ns), harness.scheduler.stats()
    waiting = [line for line in lines.requests if line.state == "waiting"]
    assert len(waiting) == stats.waiting == sum(stats.waiting_causes.values()) == sum(whole.queue.by_cause.values())
    positions = []
    for line in waiting:
        found = explain.waiting(line.request_id, now_ns)
        assert found.cause.cause.value == line.cause
        assert found.would_admit == remedy(found.cause)
        assert found.starts_in_ns is None or found.starts_in_ns >= 0
        positions.append(found.position)
    assert positions == list(range(1, len(waiting) + 1))
    explain.tree(now_ns)


@pytest.mark.parametrize("seed", range(30))
def test_asking_changes_nothing_and_neither_do_notes(seed):
    asked = schedule(seed, ask_everything)
    silent = schedule(seed, lambda harness: None, notes=NoNotes())
    assert asked.worker.plans == silent.worker.plans


@pytest.mark.parametrize("seed", range(30))
def test_every_prompt_token_is_accounted_for(seed):
    harness = schedule(seed, lambda harness: None)
    for name, spec in harness.specs.items():
        story = harness.stories.finished(name)
        spent = sum(miss.token_count for miss in story.missed)
        cached = story.cached_page_tokens + story.cached_tail_tokens
        assert cached + spent == story.prompt_tokens or (not story.missed and cached == story.prompt_tokens - 1)
        ends = [miss.start + miss.token_count for miss in story.missed]
        assert [cached, *ends][:-1] == [miss.start for miss in story.missed] or story.missed[0].start == 0
        assert story.finish == "length"
        assert story.completion_tokens == spec.max_new_tokens
        assert story.steps >= story.chunks >= 1 + story.retractions - (story.retractions > 0)
        assert min(story.queue_ns, story.prefill_ns, story.decode_ns, story.requeued_ns) >= 0
    stats = harness.scheduler.stats()
    assert stats.cached_tokens + sum(stats.missed_tokens.values()) <= stats.prompt_tokens
