"""Several engines behind a router in one virtual time."""

import pytest
from msgspec.structs import replace

from branchline.base.config import EngineConfig
from branchline.base.errors import ConfigError
from branchline.router.policy import ROUTING
from branchline.sim.fleet import simulate_fleet
from branchline.sim.latency import LatencyModel
from branchline.sim.run import simulate
from branchline.sim.synthetic import make_workload
from branchline.sim.workload import Workload

CPU = LatencyModel(fixed_ns=20e6, per_new_token_ns=1e6, per_context_token_ns=2_000, per_row_ns=1e6)
TRAFFIC = "shared,requests=150,rate=8,prefixes=6,prefix=160,question=16,output=8"


@pytest.mark.parametrize("routing", ROUTING)
def test_a_fleet_of_one_is_an_engine(routing):
    workload = make_workload(TRAFFIC)
    config = EngineConfig(pages=200, max_running=8)
    alone, fleet = simulate(config, workload, CPU), simulate_fleet(config, workload, CPU, replicas=1, routing=routing)
    assert fleet.requests == alone.requests
    assert fleet.summary == alone.summary


@pytest.mark.parametrize("routing", ROUTING)
def test_everyone_is_served_by_one_replica(routing):
    workload = make_workload(TRAFFIC)
    result = simulate_fleet(EngineConfig(pages=100), workload, CPU, replicas=3, routing=routing)
    assert result.summary.finished == {"length": 150}
    assert {record.replica for record in result.requests} == {0, 1, 2}
    assert sum(replica.stats.submitted for replica in result.replicas) == 150
    assert result.summary.pages == 300
    again = simulate_fleet(EngineConfig(pages=100), workload, CPU, replicas=3, routing=routing)
    assert again.requests == result.requests


def test_round_robin_deals_evenly():
    result = simulate_fleet(EngineConfig(), make_workload(TRAFFIC), CPU, replicas=3, routing="round-robin")
    assert [record.replica for record in result.requests] == [number % 3 for number in range(150)]


def test_cache_aware_routing_finds_more_in_small_caches():
    """Six prefixes of ten pages: a replica has room for some of them, not for all."""
    results = {
        name: simulate_fleet(EngineConfig(pages=60), make_workload(TRAFFIC), CPU, replicas=3, routing=name).summary
        for name in ROUTING
    }
    assert results["cache-aware"].hit_rate > results["round-robin"].hit_rate + 0.1
    assert results["cache-aware"].ttft_ms.mean < results["round-robin"].ttft_ms.mean


def test_least_load_evens_out_what_chance_does_not():
    """Short and long answers alternate: dealt in turn, all the long ones meet in one replica."""
    drawn = make_workload("independent,requests=120,rate=4,prompt=32").arrivals
    longs = [replace(arrival, output_tokens=2 if i % 2 else 40) for i, arrival in enumerate(drawn)]
    workload = Workload("alternating", tuple(longs))
    robin, least = (
        simulate_fleet(EngineConfig(max_running=2), workload, CPU, replicas=2, routing=name).summary
        for name in ("round-robin", "least-load")
    )  # fmt: skip
    assert least.ttft_ms.mean < 0.8 * robin.ttft_ms.mean


def test_two_replicas_are_better_than_one():
    workload = make_workload("independent,requests=120,rate=20,prompt=64,output=12")
    one, two = (
        simulate_fleet(EngineConfig(), workload, CPU, replicas=count, routing="least-load").summary for count in (1, 2)
    )  # fmt: skip
    assert two.total_ms.mean < one.total_ms.mean
    assert two.makespan_s < one.makespan_s


def test_a_client_that_leaves_is_heard_by_its_replica():
    arrivals = make_workload("independent,requests=30,rate=20,output=64").arrivals
    leaving = [a if i % 3 else replace(a, leaves_ns=a.at_ns + 10**8) for i, a in enumerate(arrivals)]
    workload = Workload("leaving", tuple(leaving))
    result = simulate_fleet(EngineConfig(), workload, CPU, replicas=2, routing="least-load")
    assert result.summary.finished == {"cancelled": 10, "length": 20}


def test_what_cannot_be_a_fleet_is_refused():
    workload = make_workload("independent,requests=3")
    with pytest.raises(ConfigError, match="at least one replica"):
        simulate_fleet(EngineConfig(), workload, CPU, replicas=0, routing="least-load")
    with pytest.raises(ConfigError, match="no routing 'sideways'"):
        simulate_fleet(EngineConfig(), workload, CPU, replicas=1, routing="sideways")
