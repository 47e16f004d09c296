"""Random schedules of the whole core against what each request must generate alone (`tests.support.schedules`).

``python -m tests.schedules --count 5000`` runs many more; a failing case prints the command that repeats it.
"""

import random
from collections import Counter

import pytest

from branchline.base.finish import FinishReason
from tests.support.harness import Harness
from tests.support.schedules import VIOLATIONS, Schedule, replay_command, run_schedule

SEEDS, PART = 600, 50


@pytest.mark.parametrize("start", range(0, SEEDS, PART))
def test_every_schedule_gives_each_request_its_own_tokens(start):
    for seed in range(start, start + PART):
        try:
            run_schedule(seed)
        except VIOLATIONS as error:
            raise AssertionError(f"schedule {seed} fails; {replay_command(seed)} repeats it") from error


def test_the_schedules_reach_the_interesting_places():
    """Otherwise the test above proves little."""
    covered = sum((run_schedule(seed, check_every=1).coverage for seed in range(200)), Counter())
    wanted = {
        "late results": 200, "retractions for memory": 5, "retractions by force": 100, "evicted pages": 500,
        "page copies": 100, "tokens from the cache": 800, "failed steps": 20, "preemptions": 2, "pins": 2,
        "aborts while waiting": 20, "aborts in prefill, row in flight": 5, "aborts in decode, row in flight": 10,
        "aborts after the end": 50, "ended waiting_timeout": 10, "ended running_timeout": 10, "ended error": 20,
        "refused with 400": 5, "refused with 429": 5, "depth 0": 10, "depth 2": 10,
    }  # fmt: skip
    assert {name: covered[name] for name, count in wanted.items() if covered[name] < count} == {}


def test_one_seed_decides_everything():
    once, again = Schedule(11), Schedule(11)
    once.run()
    again.run()
    assert once.harness.worker.plans == again.harness.worker.plans
    assert once.harness.outbox.outputs == again.harness.outbox.outputs


@pytest.mark.parametrize("seed", range(20))
def test_an_abort_changes_nobody_elses_tokens(seed):
    """I17, by two runs: with a request that is aborted somewhere, and without it."""
    rng = random.Random(seed)
    names = [f"r{number}" for number in range(6)]
    prompts = {name: [rng.randrange(3) for _ in range(rng.randint(1, 12))] for name in names}
    turns = {name: rng.randrange(10) for name in names}
    aborted, aborted_at = rng.choice(names), rng.randrange(25)

    def run(requests):
        harness = Harness(pages=14, page_size=2, max_running=4, max_step_tokens=8, max_chunk_tokens=3, vocabulary=3)
        for turn in range(30):
            for name in requests:
                if turns[name] == turn:
                    harness.submit(name, prompts[name], max_new=10, seed=len(prompts[name]))
            if turn == aborted_at and aborted in requests:
                harness.cancel(aborted)
            harness.turn()
        harness.run()
        assert all(harness.finishes()[name][0].reason.is_success for name in requests if name != aborted)
        return {name: harness.tokens()[name] for name in requests if name != aborted}

    assert run(names) == run([name for name in names if name != aborted])


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "hrrn"])
@pytest.mark.parametrize("seed", range(5))
def test_a_namespace_learns_nothing_of_another(policy, seed):
    """I24, by two runs: what an attacker finds in the cache is the same with and without a victim. Pages suffice here:
    what eviction and queueing tell about the load of others is not hidden."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(2) for _ in range(rng.randint(1, 20))] for _ in range(12)]
    guesses = [[rng.randrange(2) for _ in range(rng.randint(1, 20))] for _ in range(12)]

    def attack(*, with_victim):
        harness = Harness(pages=512, page_size=2, max_running=4, vocabulary=2, policy=policy)
        for number, (prompt, guess) in enumerate(zip(prompts, guesses, strict=True)):
            if with_victim:
                harness.submit(f"victim{number}", prompt, max_new=4, tenant="victim")
            harness.submit(f"guess{number}", guess, max_new=4, tenant="attacker")
            harness.run()
        return [
            (output.request_id, output.tokens, output.cached_tokens)
            for output in harness.outbox.outputs
            if output.request_id.startswith("guess")
        ]

    alone = attack(with_victim=False)
    assert attack(with_victim=True) == alone
    assert any(cached for _, _, cached in alone)


def test_a_failed_step_ends_nobody_who_was_not_in_it():
    harness = Harness(overlap=False)
    harness.submit("in", range(5), max_new=6)
    harness.worker.fail_steps = {2}
    harness.turn()
    harness.submit("late", range(5), max_new=6)
    harness.turn()
    harness.run()
    assert {name: ends[0].reason for name, ends in harness.finishes().items()} == {
        "in": FinishReason.ERROR,
        "late": FinishReason.ERROR,
    }
