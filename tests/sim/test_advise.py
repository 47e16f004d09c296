"""Advice: what it recommends and what it says limits the engine first."""

import msgspec
import pytest

from branchline.base.config import EngineConfig
from branchline.cli.advise import sentences
from branchline.sim.advise import Adviser, Goal
from branchline.sim.latency import LatencyModel
from branchline.sim.report import RequestRecord
from branchline.sim.synthetic import make_workload

MEMORY_BOUND = LatencyModel(fixed_ns=20e6, per_new_token_ns=20_000, per_context_token_ns=0, per_row_ns=10_000)
"""A step costs the same for one row and for many: like a GPU."""
COMPUTE_BOUND = LatencyModel(fixed_ns=1e6, per_new_token_ns=1e6, per_context_token_ns=0, per_row_ns=1e6)
NO_GOAL = Goal()


def advise(traffic, latency, goal=NO_GOAL, **settings):
    workload = make_workload(traffic)
    return Adviser(workload, latency, goal).advise(EngineConfig(max_queued=len(workload), **settings))


def test_a_row_cap_that_is_too_small_is_raised():
    advice = advise("independent,requests=50,rate=30,prompt=32,output=20", MEMORY_BOUND, max_running=4)
    assert advice.settings["max_running"] > 8
    assert advice.summary.total_ms.mean < 0.5 * advice.before.total_ms.mean


def test_a_step_budget_that_is_too_small_is_raised():
    advice = advise("independent,requests=30,rate=5,prompt=600,output=2", MEMORY_BOUND, max_step_tokens=64)
    assert advice.settings["max_step_tokens"] > 64
    assert advice.summary.ttft_ms.mean < advice.before.ttft_ms.mean


def test_memory_that_is_missing_is_the_bottleneck():
    """Sixteen prefixes of ten pages do not fit into eighty pages: they are computed again and again."""
    advice = advise(
        "shared,requests=80,rate=1.5,prefixes=16,prefix=160,question=8,output=4", COMPUTE_BOUND, pages=80, max_running=4
    )
    assert advice.settings["pages"] == 80
    assert advice.bottleneck == "KV pages"
    assert advice.reliefs[0].name in {"KV pages", "speed of the worker"}


def test_pages_that_nobody_needs_are_given_back():
    advice = advise("independent,requests=30,rate=1,prompt=64,output=4", COMPUTE_BOUND, pages=8000)
    assert advice.settings["pages"] == 1000
    assert advice.bottleneck == "speed of the worker"


def test_headroom_is_found_on_both_sides():
    light = advise("independent,requests=30,rate=1,prompt=64,output=4", COMPUTE_BOUND)
    heavy = advise("independent,requests=30,rate=40,prompt=64,output=4", COMPUTE_BOUND)
    assert light.keeps_up
    assert light.headroom > 2
    assert not heavy.keeps_up
    assert heavy.headroom < 1
    # The same requests: what they can bear must be about the same rate in both.
    assert heavy.headroom * 40 == pytest.approx(light.headroom * 1, rel=0.35)


def test_a_goal_decides_what_keeping_up_means():
    traffic = "independent,requests=30,rate=4,prompt=64,output=4"
    strict, easy = (advise(traffic, COMPUTE_BOUND, Goal(ttft_ms=limit)) for limit in (70, 10_000))
    assert strict.share_within_goal < easy.share_within_goal == 1
    assert strict.headroom < easy.headroom


def test_the_same_question_gets_the_same_answer():
    one, two = (advise("independent,requests=20,rate=4,prompt=64,output=4", COMPUTE_BOUND) for _ in range(2))
    assert msgspec.json.encode(one) == msgspec.json.encode(two)


def test_a_goal_is_met_by_both_figures():
    record = RequestRecord(
        request_id="r", group="", tenant="", replica=0, arrival_ns=0, admitted_ns=0, first_token_ns=100_000_000,
        end_ns=300_000_000, reason="length", prompt_tokens=1, output_tokens=3, cached_tokens=0, retractions=0,
    )  # fmt: skip
    record = msgspec.convert(msgspec.to_builtins(record), RequestRecord)
    assert Goal(100, 100).is_met(record)
    assert not Goal(99, 100).is_met(record)
    assert not Goal(100, 99).is_met(record)
    assert Goal().is_met(record)


def test_advice_is_put_into_words():
    advice = advise("independent,requests=30,rate=40,prompt=64,output=8", COMPUTE_BOUND)
    text = " ".join(sentences(Goal(), advice))
    assert "does not keep up" in text
    assert "The first bottleneck is the speed of the worker." in text
    assert "would make hardly any difference there" in text
