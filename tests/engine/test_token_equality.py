"""Greedy output does not depend on the schedule: cache x chunk size x batch x overlap x retraction (the promise of the
project, on the default model, with the reference executor and with the native one at its default settings)."""

import pytest

from tests.support.executors import BEST, executor_with_pool
from tests.support.real import generate_tokens

NEW_TOKENS = 5


@pytest.fixture(scope="module", params=BEST)
def executor(default_checkpoint, request):
    return executor_with_pool(request.param, default_checkpoint, page_size=16, page_count=320)


def prompt(number: int, length: int) -> list[int]:
    """Text-like ids; prompts share a beginning of 34 tokens that does not end with a page."""
    shared = [(i * 7919) % 20_000 + 100 for i in range(34)]
    return (shared + [(i * 104_729 + number * 31) % 30_000 + 100 for i in range(length)])[:length]


PROMPTS = [prompt(0, 104)] + [prompt(n, 36 + n % 4) for n in range(1, 16)]


@pytest.fixture(scope="module")
def expected(executor):
    """Each prompt alone, in one piece, nothing cached, nothing overlapped."""
    return [
        generate_tokens(executor, [p], max_new=NEW_TOKENS, prefix_cache=False, overlap=False, max_step_tokens=4096)[0][0]
        for p in PROMPTS
    ]


@pytest.mark.parametrize("retract_every", [None, 3], ids=["", "retract"])
@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
@pytest.mark.parametrize("count", [1, 16], ids=["alone", "among-15"])
@pytest.mark.parametrize("chunk", [16, 100, 4096])
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["no-cache", "cache"])
def test_greedy_output_does_not_depend_on_the_schedule(
    executor, expected, prefix_cache, chunk, count, overlap, retract_every
):
    tokens, stats = generate_tokens(
        executor, PROMPTS[:count], max_new=NEW_TOKENS, prefix_cache=prefix_cache, overlap=overlap,
        max_step_tokens=chunk, retract_every=retract_every,
    )  # fmt: skip
    assert tokens == expected[:count]
    assert stats.retractions > 0 if retract_every else True
    assert stats.cached_tokens > 0 if prefix_cache and count > 1 else True


def test_a_warm_cache_changes_nothing(executor, expected):
    tokens, stats = generate_tokens(executor, [PROMPTS[0]] * 3, max_new=NEW_TOKENS, max_running=1)
    assert tokens == [expected[0]] * 3
    assert stats.cached_tokens >= 2 * 96
