"""Routing policies as pure objects."""

import pytest

from branchline.base.errors import ConfigError
from branchline.router.policy import ROUTING, CacheAware, LeastLoad, RoundRobin, Thresholds

EVEN = {0: 0, 1: 0, 2: 0}
LONG = tuple(range(100))


def test_round_robin_takes_turns():
    policy = RoundRobin()
    assert [policy.choose((), EVEN) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_round_robin_goes_on_with_those_who_are_there():
    policy = RoundRobin()
    assert {policy.choose((), {0: 0, 2: 0}) for _ in range(4)} == {0, 2}


def test_least_load_takes_the_first_of_the_least_loaded():
    assert LeastLoad().choose((), {0: 3, 1: 2, 2: 2}) == 1


def test_cache_aware_returns_to_who_has_seen_the_prefix():
    policy = CacheAware()
    assert policy.choose(LONG, {0: 1, 1: 0, 2: 0}) == 1  # nobody knows it: least loaded
    assert policy.choose(LONG, {0: 0, 1: 9, 2: 0}) == 1  # known, though others are idle


def test_cache_aware_wants_more_than_a_share_of_the_prompt():
    policy = CacheAware(Thresholds(match_share=0.3))
    policy.choose(LONG, {0: 1, 1: 0})
    known = LONG[:30]
    assert policy.choose(known + tuple(range(1000, 1070)), {0: 0, 1: 5}) == 0  # 30 of 100 is not more than 0.3
    policy = CacheAware(Thresholds(match_share=0.3))
    policy.choose(LONG, {0: 1, 1: 0})
    assert policy.choose(LONG[:31] + tuple(range(1000, 1069)), {0: 0, 1: 5}) == 1


@pytest.mark.parametrize(("loads", "chosen"), [
    ({0: 64, 1: 0}, 0),  # 64 apart is not more than 64
    ({0: 65, 1: 0}, 1),
    ({0: 195, 1: 130}, 0),  # 65 apart, but only 1.5 times as much
    ({0: 196, 1: 130}, 1),
])  # fmt: skip
def test_cache_aware_gives_up_a_match_when_loads_are_out_of_balance(loads, chosen):
    policy = CacheAware()
    assert policy.choose(LONG, {0: 0, 1: 1}) == 0
    assert policy.choose(LONG, loads) == chosen


def test_a_detour_is_remembered_too():
    policy = CacheAware()
    policy.choose(LONG, {0: 0, 1: 1})
    policy.choose(LONG, {0: 100, 1: 0})
    assert policy.choose(LONG, {0: 5, 1: 5}) == 1


def test_cache_aware_looks_past_a_replica_that_is_gone():
    policy = CacheAware()
    policy.choose(LONG, {0: 0, 1: 1, 2: 1})
    policy.choose(LONG[:60], {1: 9, 2: 0})
    assert policy.choose(LONG, {1: 0, 2: 0}) == 2


def test_a_replica_that_lost_its_cache_is_forgotten():
    policy = CacheAware()
    policy.choose(LONG, {0: 0, 1: 1})
    policy.forget(0)
    assert policy.choose(LONG, {0: 5, 1: 0}) == 1


def test_characters_will_do_as_a_key():
    policy = CacheAware()
    policy.choose("You are a helpful assistant. Hello", {0: 1, 1: 0})
    assert policy.choose("You are a helpful assistant. Bye", {0: 0, 1: 1}) == 1


@pytest.mark.parametrize("name", ROUTING)
def test_every_policy_chooses_among_those_who_are_there(name):
    policy = ROUTING[name]()
    for turn in range(30):
        loads = {replica: turn % (replica + 2) for replica in range(5) if (turn + replica) % 3}
        assert policy.choose(LONG[: turn * 3], loads) in loads


@pytest.mark.parametrize("bad", [{"match_share": 1.5}, {"imbalance": -1}, {"imbalance_ratio": 0.5}, {"tree_size": 0}])
def test_thresholds_out_of_range_are_refused(bad):
    with pytest.raises(ConfigError):
        Thresholds(**bad)
