"""Random schedules of the whole core against what each request must generate alone (reliability I1-I20).

A failing case prints its seed; `run_schedule(seed)` repeats it exactly.
"""

import random

import pytest

from branchline.base.finish import FinishReason
from tests.support.harness import Harness
from tests.support.stamped import reference_output

VOCABULARY = 5
"""Small, so that prompts share prefixes and outputs meet stop tokens often."""


def random_settings(rng: random.Random) -> dict:
    max_running = rng.choice([1, 2, 4, 8])
    return {
        "pages": rng.choice([8, 12, 24, 64]),
        "page_size": rng.choice([1, 2, 4, 16]),
        "max_running": max_running,
        "max_step_tokens": max(max_running, rng.choice([1, 4, 9, 32, 100])),
        "max_chunk_tokens": rng.choice([None, None, 1, 3, 16]),
        "prefix_cache": rng.random() < 0.8,
        "overlap": rng.random() < 0.7,
        "policy": rng.choice(["fcfs", "lpm"]),
        "vocabulary": VOCABULARY,
    }


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    length = rng.randint(1, longest)
    trunk = [(i * i) % VOCABULARY for i in range(longest)]
    shared = rng.randint(0, length)
    return trunk[:shared] + [rng.randrange(VOCABULARY) for _ in range(length - shared)]


def run_schedule(seed: int) -> Harness:
    rng = random.Random(seed)
    settings = random_settings(rng)
    harness = Harness(**settings)
    room = settings["pages"] * settings["page_size"]
    cancelled, failed, flights = set(), set(), rng.randint(1, 14)
    harness.worker.fail_steps = {rng.randint(1, 40)} if rng.random() < 0.2 else set()
    harness.worker.bad_rows = {(rng.randint(1, 30), 0)} if rng.random() < 0.2 else set()
    for turn in range(120):
        if flights and rng.random() < 0.4:
            flights -= 1
            prompt = random_prompt(rng, max(1, min(60, room // 2)))
            harness.submit(
                f"r{flights}", prompt, max_new=rng.randint(1, max(1, min(20, room - len(prompt)))),
                seed=rng.randrange(3), stop_ids=rng.choice([(), (), (1,)]), salt=rng.choice(["", "", "other"]),
                logprobs=rng.choice([None, 0]), prompt_logprobs=rng.choice([None, None, None, 0]),
            )  # fmt: skip
        if rng.random() < 0.05 and harness.specs:
            name = rng.choice(sorted(harness.specs))
            cancelled.add(name)
            harness.cancel(name)
        if rng.random() < 0.05:
            harness.scheduler.retract_youngest(turn)
            harness.scheduler.check()
        harness.turn()
    harness.run()
    failed = {name for name, ends in harness.finishes().items() if ends[0].reason is FinishReason.ERROR}
    assert not failed or harness.worker.fail_steps or harness.worker.bad_rows
    judge(harness, cancelled, failed)
    return harness


def judge(harness: Harness, cancelled: set[str], failed: set[str]) -> None:
    tokens, finishes = harness.tokens(), harness.finishes()
    for name, spec in harness.specs.items():
        assert len(finishes[name]) == 1, f"{name} ended {len(finishes[name])} times"
        finish = finishes[name][0]
        expected = reference_output(spec.prompt, spec.seed, VOCABULARY, spec.max_new_tokens, spec.eos_token_ids)
        if name in cancelled | failed:
            assert tokens[name] == expected[: len(tokens[name])]
            continue
        assert finish.reason in (FinishReason.STOP, FinishReason.LENGTH), finish
        assert tokens[name] == expected
        assert finish.usage.prompt_tokens == len(spec.prompt)
        assert finish.usage.completion_tokens == len(expected)
        assert finish.usage.cached_tokens < len(spec.prompt)
        judge_logprobs(harness, name)
    stats = harness.scheduler.stats()
    assert (stats.running, stats.waiting, stats.pages_private, stats.pages_retired, stats.locked_nodes, stats.slots_used) == (
        0, 0, 0, 0, 0, 0,
    )  # fmt: skip
    assert stats.pages_free + stats.pages_evictable == stats.pages_total
    assert harness.scheduler.flush()
    assert harness.ledger.free_pages == harness.ledger.page_count


def judge_logprobs(harness: Harness, name: str) -> None:
    spec = harness.specs[name]
    mine = [output for output in harness.outbox.outputs if output.request_id == name]
    rows = [row.token for output in mine for row in output.logprobs]
    assert rows == (harness.tokens()[name] if spec.sampling.logprobs is not None else [])
    prompt_rows = [(row.token, row.logprob) for output in mine for row in output.prompt_logprobs]
    wanted = spec.sampling.prompt_logprobs is not None
    assert prompt_rows == [(spec.prompt[p], -float(p)) for p in range(1, len(spec.prompt)) if wanted]


@pytest.mark.parametrize("start", range(0, 600, 50))
def test_every_schedule_gives_each_request_its_own_tokens(start):
    for seed in range(start, start + 50):
        try:
            run_schedule(seed)
        except Exception as error:
            raise AssertionError(f"schedule {seed} fails; run_schedule({seed}) repeats it") from error


def test_the_schedules_reach_the_interesting_places():
    """Otherwise the test above proves little."""
    totals = [run_schedule(seed).scheduler.stats() for seed in range(150)]
    assert sum(stats.retractions for stats in totals) > 50
    assert sum(stats.late_results for stats in totals) > 20
    assert sum(stats.evicted_pages for stats in totals) > 100
    assert sum(stats.cached_tokens for stats in totals) > 1000
    assert sum(stats.failed_steps for stats in totals) > 5
