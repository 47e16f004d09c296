"""Why does the queue grow? Four staged situations on the production scheduler, and the words around them."""

import pytest

from branchline.core.explain import MissReason
from branchline.observe.diagnose import Verdict, diagnose
from tests.support.harness import Harness


def look(harness):
    return harness.scheduler.explain.scheduler(harness.clock.now_ns())


def flags(diagnosis):
    return {advice.flag: advice.value for advice in diagnosis.advice}


def press(harness, count, prompt_of, max_new, every=1, turns=None):
    """``count`` requests, one every so many turns; then a few turns more."""
    for i in range(count):
        harness.submit(f"r{i}", prompt_of(i), max_new=max_new)
        for _ in range(every):
            harness.turn()
    for _ in range(turns or 0):
        harness.turn()


def unique(length):
    return lambda i: [(i * 31 + k * 7) % 89 for k in range(length - 1)] + [i]


def staged_row_cap(**settings):
    harness = Harness(**({"max_running": 2, "pages": 400, "max_step_tokens": 64} | settings))
    press(harness, 12, unique(8), max_new=40)
    return harness


def staged_budget(**settings):
    harness = Harness(**({"max_running": 8, "pages": 4000, "max_step_tokens": 8} | settings))
    press(harness, 12, unique(120), max_new=2)
    return harness


def staged_kv(**settings):
    harness = Harness(**({"max_running": 8, "pages": 24, "max_step_tokens": 64} | settings))
    press(harness, 12, unique(40), max_new=20)
    return harness


def staged_misses(**settings):
    """Twelve prefixes take turns, and there is room for a few of them only."""
    harness = Harness(**({"max_running": 8, "pages": 64, "max_step_tokens": 16} | settings))
    press(harness, 72, lambda i: [*unique(60)(i % 12), 90, i], max_new=2, every=2)
    return harness


STAGES = {
    Verdict.ROW_CAP: (staged_row_cap, "--max-running"),
    Verdict.TOKEN_BUDGET: (staged_budget, "--max-step-tokens"),
    Verdict.KV_SPACE: (staged_kv, "--pages"),
    Verdict.CACHE_MISSES: (staged_misses, "--pages"),
}


@pytest.mark.parametrize("verdict", STAGES, ids=lambda v: v.value)
def test_the_right_cause_and_the_right_setting(verdict):
    stage, flag = STAGES[verdict]
    harness = stage()
    diagnosis = diagnose(look(harness))
    assert diagnosis.verdict is verdict
    now = getattr(harness.config, flag.removeprefix("--").replace("-", "_"))
    assert int(flags(diagnosis)[flag]) > now
    assert diagnosis.sentence
    assert diagnosis.evidence


@pytest.mark.parametrize("verdict", STAGES, ids=lambda v: v.value)
def test_the_advice_helps(verdict):
    """The same load with the suggested settings leaves fewer waiting: following the advice is never in vain."""
    stage, _ = STAGES[verdict]
    before = stage()
    advised = {
        flag.removeprefix("--").replace("-", "_"): int(value) for flag, value in flags(diagnose(look(before))).items()
    }

    after = stage(**advised)
    assert look(after).queue.waiting < look(before).queue.waiting


def test_misses_are_named_by_their_reason():
    view = look(staged_misses())
    missed = view.cache.recent_missed_tokens
    assert max(missed, key=missed.get) == MissReason.EVICTED.value
    assert sum(missed.values()) + view.cache.recent_cached_tokens <= view.cache.recent_prompt_tokens
    assert view.cache.evictions[0].cost_tokens > 0


def test_without_a_cache_the_cache_is_the_cause():
    harness = Harness(max_running=8, pages=4000, max_step_tokens=8, prefix_cache=False)
    press(harness, 12, lambda i: [*range(100), i], max_new=2)
    diagnosis = diagnose(look(harness))
    assert diagnosis.verdict is Verdict.CACHE_MISSES
    assert flags(diagnosis) == {"--prefix-cache": "on"}


def test_salts_that_keep_requests_apart_are_the_cause():
    harness = Harness(max_running=8, pages=4000, max_step_tokens=8)
    for i in range(12):
        harness.submit(f"r{i}", range(100), max_new=2, salt=f"s{i}")
        for _ in range(16):
            harness.turn()
    for i in range(4):
        harness.submit(f"x{i}", range(100), max_new=2, salt=f"x{i}")
    harness.turn()
    diagnosis = diagnose(look(harness))
    assert diagnosis.verdict is Verdict.CACHE_MISSES
    assert "another key or salt" in diagnosis.sentence
    assert diagnosis.advice == ()


def test_nobody_waits():
    harness = Harness()
    assert diagnose(look(harness)).verdict is Verdict.NO_QUEUE


def test_a_pause_explains_everything():
    harness = staged_row_cap()
    harness.scheduler.pause()
    assert diagnose(look(harness)).verdict is Verdict.PAUSED


def test_followers_are_no_trouble():
    harness = Harness(max_running=8, pages=400, max_step_tokens=64, max_chunk_tokens=8)
    for i in range(3):
        harness.submit(f"r{i}", [*range(60), i], max_new=2)
    harness.turn()
    assert look(harness).queue.by_cause == {"follows": 2}
    assert diagnose(look(harness)).verdict is Verdict.PASSING
