"""A workload through the production scheduler in virtual time."""

import random
from pathlib import Path

import msgspec
import pytest

from branchline.base.clock import NS_PER_S
from branchline.base.config import POLICY_NAMES, EngineConfig
from branchline.base.errors import ConfigError
from branchline.base.finish import FinishReason
from branchline.core.events import Admitted
from branchline.sim.latency import LatencyModel
from branchline.sim.report import NS_PER_MS, Spread, by_group, make_timeline
from branchline.sim.run import simulate
from branchline.sim.synthetic import make_workload
from branchline.sim.traces import read_trace
from branchline.sim.workload import Arrival, Workload, best_hit_rate

SAMPLE = Path(__file__).parent.parent / "data" / "mooncake_60.jsonl"
CPU = LatencyModel(
    fixed_ns=20e6, per_new_token_ns=1e6, per_context_token_ns=2_000, per_row_ns=1e6, per_pair_ns=100
)  # fmt: skip
TEN_MS = LatencyModel(fixed_ns=10e6, per_new_token_ns=0, per_context_token_ns=0, per_row_ns=0)


def requests(*shapes):
    """(at_ms, prompt tokens, output tokens): nobody shares anything."""
    return Workload("w", tuple(
        Arrival(
            at_ns=at_ms * NS_PER_MS, request_id=f"r{i}", prompt=tuple(range(1000 * i, 1000 * i + prompt)),
            output_tokens=output, seed=i,
        ) for i, (at_ms, prompt, output) in enumerate(shapes)
    ))  # fmt: skip


# ---------------------------------------------------------------- arithmetic


def test_a_lone_request_takes_as_many_steps_as_tokens():
    (record,) = simulate(EngineConfig(), requests((5, 100, 4)), TEN_MS).requests
    assert record.admitted_ns == record.arrival_ns == 0 + 5 * NS_PER_MS
    assert record.ttft_ns == 10 * NS_PER_MS
    assert record.tpot_ns == 10 * NS_PER_MS
    assert record.total_ns == 40 * NS_PER_MS
    assert (record.output_tokens, record.cached_tokens, record.reason) == (4, 0, FinishReason.LENGTH)


def test_a_long_prompt_takes_a_step_for_each_chunk():
    (record,) = simulate(EngineConfig(max_step_tokens=64), requests((0, 200, 1)), TEN_MS).requests
    assert record.ttft_ns == 40 * NS_PER_MS
    assert record.tpot_ns is None


@pytest.mark.parametrize(("overlap", "wait_ms"), [(False, 7), (True, 17)])
def test_who_comes_during_a_step_waits_for_the_next_plan(overlap, wait_ms):
    """Step 1 ends at 10 ms. Without overlap step 2 is planned then; with it, step 2 was planned at 0 already."""
    result = simulate(EngineConfig(overlap=overlap), requests((0, 10, 5), (3, 10, 1)), TEN_MS)
    assert result.requests[1].ttft_ns == (wait_ms + 10) * NS_PER_MS


def test_a_client_that_leaves_is_cancelled_then():
    leaving = Arrival(at_ns=0, request_id="r", prompt=(1, 2), output_tokens=100, leaves_ns=45 * NS_PER_MS)
    (record,) = simulate(EngineConfig(overlap=False), Workload("w", (leaving,)), TEN_MS).requests
    assert record.reason is FinishReason.CANCELLED
    assert record.end_ns == 50 * NS_PER_MS  # heard after the step in which it left
    assert record.output_tokens == 5


def test_refusals_and_timeouts_are_counted_and_do_not_count_as_served():
    workload = requests(*((0, 10, 50) for _ in range(10)))
    config = EngineConfig(max_running=1, max_queued=4, waiting_timeout_s=0.6, policy="fcfs")
    summary = simulate(config, workload, TEN_MS).summary
    # Two are served (500 ms each), and all others who were let in have waited for 600 ms by then.
    assert summary.finished == {"length": 2, "rejected": 6, "waiting_timeout": 2}
    assert summary.ttft_ms.count == 2


# ---------------------------------------------------------------- conservation


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_everyone_ends_once_under_memory_pressure(policy):
    workload = make_workload("chat,requests=120,rate=3,turns=6,question=20")
    config = EngineConfig(policy=policy, pages=80, max_running=16, max_step_tokens=64)
    result = simulate(config, workload, CPU)
    assert [record.request_id for record in result.requests] == [arrival.request_id for arrival in workload.arrivals]
    assert result.summary.finished == {"length": 120}
    assert result.summary.output_tokens == workload.output_tokens
    assert result.summary.evicted_pages > 0
    for record in result.requests:
        assert record.arrival_ns <= record.admitted_ns < record.first_token_ns <= record.end_ns


def test_every_token_is_computed_or_cached():
    workload = make_workload("shared,requests=100,rate=4,prefixes=3,prefix=100")
    result = simulate(EngineConfig(), workload, CPU)
    (replica,) = result.replicas
    computed = int(replica.steps.prefill_tokens.sum())
    assert computed + result.summary.cached_tokens == workload.prompt_tokens == result.summary.prompt_tokens
    # The first token of an output comes with the prompt.
    assert int(replica.steps.decode_tokens.sum()) == workload.output_tokens - len(workload)
    assert result.summary.busy * result.summary.makespan_s == pytest.approx(
        replica.steps.duration_ns.sum() / NS_PER_S, rel=1e-3
    )


def test_the_timeline_adds_up_to_the_same_totals():
    workload = make_workload("shared,requests=100,rate=4,prefixes=3,prefix=100")
    result = simulate(EngineConfig(), workload, CPU)
    line = make_timeline(result.requests, [replica.steps for replica in result.replicas], 37)
    assert sum(line.prefill_tokens) == pytest.approx(workload.prompt_tokens - result.summary.cached_tokens, rel=0.02)
    assert sum(line.decode_tokens) == pytest.approx(workload.output_tokens - len(workload), rel=0.02)
    assert sum(line.prompt_tokens) == workload.prompt_tokens
    assert sum(line.cached_tokens) == result.summary.cached_tokens
    assert max(line.waiting) == result.summary.most_waiting
    assert len(line.busy) == 37
    assert max(line.busy) <= 1.001


def test_the_same_question_gets_the_same_bytes():
    workload = make_workload("chat,requests=60,rate=2")
    one, two = (simulate(EngineConfig(pages=100), workload, CPU) for _ in range(2))
    assert msgspec.json.encode([one.requests, one.summary]) == msgspec.json.encode([two.requests, two.summary])


def test_observers_hear_what_happens():
    class Ears:
        def __init__(self):
            self.admissions = []

        def notice(self, event):
            if isinstance(event, Admitted):
                self.admissions.append(event.request_id)

    ears = Ears()
    simulate(EngineConfig(), requests((0, 5, 1), (1, 5, 1)), TEN_MS, observers=[ears])
    assert ears.admissions == ["r0", "r1"]


def test_a_policy_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="policy"):
        simulate(EngineConfig(policy="sideways"), requests((0, 5, 1)), TEN_MS)


# ---------------------------------------------------------------- cache


def test_an_unlimited_cache_reaches_the_best_hit_rate_of_a_trace():
    workload = read_trace(SAMPLE)
    result = simulate(EngineConfig(max_queued=100), workload, CPU)
    assert result.summary.hit_rate >= 0.99 * best_hit_rate(workload.arrivals) > 0
    assert result.summary.evicted_pages == 0


@pytest.mark.parametrize("seed", range(5))
def test_requests_one_by_one_hit_exactly_what_an_unlimited_cache_can_serve(seed):
    rng = random.Random(seed)
    made = []
    for number in range(60):
        prompt = tuple(rng.randrange(2) for _ in range(rng.randint(1, 60)))
        # A bit for each token: prompts share short and long beginnings, in the middle of pages too.
        made.append(Arrival(at_ns=number * NS_PER_S, request_id=str(number), prompt=prompt, output_tokens=1))
    workload = Workload("bits", tuple(made))
    result = simulate(EngineConfig(page_size=4), workload, TEN_MS)
    assert result.summary.hit_rate == pytest.approx(best_of_whole_pages(workload), abs=1e-4)


def best_of_whole_pages(workload, page_size=4):
    """What a cache can serve that keeps whole pages only, but shares them to the token: by brute force."""
    hit = total = 0
    for number, request in enumerate(workload.arrivals):
        kept = [o.prompt[: len(o.prompt) // page_size * page_size] for o in workload.arrivals[:number]]
        shared = max((common(request.prompt, other) for other in kept), default=0)
        hit += min(shared, len(request.prompt) - 1)
        total += len(request.prompt)
    return hit / total


def common(one, other):
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def test_answers_that_are_sent_again_are_found_in_the_cache():
    """Only the question of a turn is new, and the rest of a page; but who speaks before the answer is over pays for it."""
    workload = make_workload("chat,requests=40,turns=8,rate=0.1,question=20,output=50,system=64,pause_s=60")
    result = simulate(EngineConfig(), workload, CPU)
    assert result.summary.hit_rate >= 0.99 * best_hit_rate(workload.arrivals)
    fresh = sorted(record.prompt_tokens - record.cached_tokens for record in result.requests if record.prompt_tokens > 150)
    assert fresh[len(fresh) // 2] <= 30 + 16


def test_a_small_cache_serves_less_than_a_large_one():
    workload = make_workload("shared,requests=150,rate=2,prefixes=8,prefix=160,output=8")
    rates = [simulate(EngineConfig(pages=pages), workload, CPU).summary.hit_rate for pages in (40, 80, None)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1] - 0.1


# ---------------------------------------------------------------- queueing theory


def test_one_row_is_a_queue_with_one_server():
    """M/D/1: the mean wait is u / (2 (1 - u)) service times at utilisation u (Pollaczek and Khinchine)."""
    workload = make_workload("independent,requests=6000,rate=70,prompt=1,output=1,seed=3")
    assert {arrival.output_tokens for arrival in workload.arrivals} == {1}
    config = EngineConfig(max_running=1, overlap=False, policy="fcfs", prefix_cache=False, max_queued=6000)
    result = simulate(config, workload, TEN_MS)
    service_ms, use = 10, 0.7
    expected = service_ms * (1 + use / (2 * (1 - use)))
    assert result.summary.ttft_ms.mean == pytest.approx(expected, rel=0.1)
    assert result.summary.busy == pytest.approx(use, rel=0.05)


def test_littles_law_holds():
    """Requests in the system = rate of arrivals times time in the system, whatever the scheduler does."""
    workload = make_workload("shared,requests=400,rate=3,output=12")
    result = simulate(EngineConfig(max_running=4, policy="hrrn", max_queued=400), workload, CPU)
    (replica,) = result.replicas
    steps = replica.steps
    # Integral of the number in the system, from the changes themselves.
    changes = sorted([(r.arrival_ns, 1) for r in result.requests] + [(r.end_ns, -1) for r in result.requests])
    area = inside = last = 0
    for at_ns, change in changes:
        area += inside * (at_ns - last)
        inside, last = inside + change, at_ns
    assert area == sum(record.total_ns for record in result.requests)
    # And the photographs agree: the mean of what they show while the worker computes is near it.
    shown = ((steps.running + steps.waiting) * steps.duration_ns).sum()
    assert shown == pytest.approx(area, rel=0.15)


def test_more_load_means_longer_waits():
    means = []
    for rate in (0.5, 2, 8):
        workload = make_workload("independent,requests=150,prompt=100,output=10").at_rate(rate)
        means.append(simulate(EngineConfig(max_queued=150), workload, CPU).summary.ttft_ms.mean)
    assert means == sorted(means)
    assert means[2] > 2 * means[0]


# ---------------------------------------------------------------- figures


def test_percentiles_are_values_that_occurred():
    spread = Spread.of([None, *(ms * NS_PER_MS for ms in range(1, 101))])
    assert (spread.count, spread.mean, spread.p50, spread.p90, spread.p99, spread.max) == (100, 50.5, 50, 90, 99, 100)
    assert Spread.of([3 * NS_PER_MS]).p99 == 3
    assert Spread.of([]).count == 0


def test_groups_are_told_apart_only_if_there_are_several():
    workload = make_workload("hot-cold,requests=60,cold=0.3,prompt=64,output=4")
    spreads = by_group(simulate(EngineConfig(), workload, CPU).requests)
    assert set(spreads) == {"hot", "cold"}
    assert spreads["hot"].count + spreads["cold"].count == 60
    assert by_group(simulate(EngineConfig(), requests((0, 5, 1)), TEN_MS).requests) == {}
