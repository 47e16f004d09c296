"""What each policy puts first, and that ordering a long line stays cheap."""

import random

import pytest

from branchline.base.config import CACHE_ONLY_POLICIES, EVICTION_NAMES, POLICY_NAMES, EngineConfig
from branchline.base.errors import ConfigError
from branchline.cache.eviction import EVICTION_ORDERS
from branchline.core.request import Namespace, RequestSpec, SamplingParams
from branchline.sched.admission import FOLLOW_STEPS
from branchline.sched.lifecycle import Seq
from branchline.sched.matches import FIRST_LOOKS, SECOND_LOOKS
from branchline.sched.policies.cache_aware import DfsWeight, Hrrn, LongestPrefix
from branchline.sched.policies.fair import MAX_TENANTS, Fair
from branchline.sched.policies.plain import Fcfs, LongestOutput, Priority, Random
from branchline.sched.policies.port import PassFacts
from branchline.sched.policy import POLICIES
from tests.support.harness import Harness

COLD = PassFacts(lambda seq: 0, lambda seq: ())


def waiting(number, length=10, max_new=8, user="", tenant="", priority=0):
    spec = RequestSpec(
        request_id=f"r{number}", prompt=tuple(range(length)), sampling=SamplingParams(), max_new_tokens=max_new, seed=0,
        user=user, namespace=Namespace(tenant=tenant), priority=priority,
    )  # fmt: skip
    return Seq(number, spec, 0)


def retracted(number, **fields):
    seq = waiting(number, **fields)
    seq.admit(0, object(), (), (0,), 0, 0)
    seq.retract(0)
    return seq


def cached(tokens_by_number):
    return PassFacts(lambda seq: tokens_by_number.get(seq.seq, 0), lambda seq: ())


def numbers(policy, line, facts=COLD):
    return [seq.seq for seq in policy.order(line, facts)]


def arrive(policy, *line):
    for count in range(1, len(line) + 1):
        policy.note_arrived(line[count - 1], line[:count])


# ---------------------------------------------------------------- all of them


def test_names_are_the_same_everywhere():
    assert set(POLICY_NAMES) == set(POLICIES)
    assert set(EVICTION_NAMES) == set(EVICTION_ORDERS)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_an_order_loses_nobody_changes_nothing_and_states_its_bound(name):
    policy = POLICIES[name](EngineConfig(policy=name))
    line = [retracted(1), *(waiting(n, length=5 + n % 4, max_new=1 + n % 3, user="ab"[n % 2]) for n in range(2, 30))]
    arrive(policy, *line[1:])
    facts = PassFacts(lambda seq: seq.seq % 5, lambda seq: tuple(range(seq.seq % 3)))
    once = numbers(policy, line, facts)
    assert sorted(once) == list(range(1, 30))
    assert once == numbers(policy, line, facts)
    assert once[0] == 1, "retracted work goes first"
    assert "Starvation bound:" in type(policy).__doc__


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_serves_everyone_in_the_end(name):
    harness = Harness(policy=name, pages=40, max_running=4, tenant_weights=(("b", 3.0),))
    for n in range(30):
        prompt = [*range(12), n] if n % 2 else [n] * 9
        harness.submit(f"r{n}", prompt, max_new=1 + n % 7, priority=n % 5 * 10, user="ab"[n % 2])
    harness.run()
    assert len(harness.finishes()) == 30


@pytest.mark.parametrize("policy", CACHE_ONLY_POLICIES)
def test_an_order_by_nothing_but_the_cache_needs_one(policy):
    with pytest.raises(ConfigError, match=rf"policy {policy} orders by cached prefixes, but prefix_cache is off"):
        EngineConfig(policy=policy, prefix_cache=False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy": "magic"}, "there is no policy 'magic'; choose one of hrrn, fcfs"),
        ({"eviction": "mru"}, "there is no eviction order 'mru'"),
        ({"tenant_weights": (("a", 0.0),)}, "the weight of tenant 'a' must be a positive number"),
        ({"preemption_gap": -1}, "preemption_gap must not be negative"),
        ({"pin_share": 1.0}, "pin_share must be at least 0 and below 1"),
        ({"overtake_tokens": 0}, "overtake_tokens must be a positive number"),
        ({"max_queued_tokens": 0}, "max_queued_tokens must be a positive number"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_words(settings, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**settings)


# ---------------------------------------------------------------- plain


def test_fcfs_keeps_the_line():
    assert numbers(Fcfs(), [waiting(3), waiting(5), waiting(9)]) == [3, 5, 9]


def test_lof_takes_the_longest_output_first():
    line = [waiting(1, max_new=5), waiting(2, max_new=50), waiting(3, max_new=5), waiting(4, max_new=60)]
    assert numbers(LongestOutput(), line) == [4, 2, 1, 3]


def test_random_is_drawn_anew_after_work_and_the_same_for_the_same_seed():
    line = [waiting(n) for n in range(20)]
    one, other = Random(7), Random(7)
    before = numbers(one, line)
    one.note_generated(line[0])
    other.note_generated(line[0])
    assert numbers(one, line) == numbers(other, line) != before
    assert numbers(Random(8), line) != before


def test_random_gives_everybody_a_fair_chance():
    line, policy = [waiting(n) for n in range(5)], Random(1)
    firsts = []
    for _ in range(2000):
        policy.note_generated(line[0])
        firsts.append(numbers(policy, line)[0])
    assert all(300 < firsts.count(n) < 500 for n in range(5))


def test_priority_counts_before_having_run():
    line = [retracted(1), waiting(2, priority=5), waiting(3, priority=9), waiting(4, priority=5)]
    assert numbers(Priority(10), line) == [3, 2, 4, 1]


# ---------------------------------------------------------------- cache-aware


def test_lpm_takes_the_longest_prefix_first():
    assert numbers(LongestPrefix(), [waiting(1), waiting(2), waiting(3)], cached({2: 4, 3: 8})) == [3, 2, 1]


def test_dfs_weight_keeps_branches_together_and_takes_the_thickest_first():
    pages = {1: (), 2: (7, 8), 3: (7, 9), 4: (7, 8, 1), 5: (2,), 6: (7, 9), 7: (7, 9), 8: (7,), 9: (2,)}
    facts = PassFacts(lambda seq: 0, lambda seq: pages[seq.seq])
    line = [waiting(n) for n in pages]
    assert numbers(DfsWeight(), line, facts) == [3, 6, 7, 4, 2, 8, 5, 9, 1]


def test_dfs_weight_survives_a_chain_deeper_than_the_stack():
    facts = PassFacts(lambda seq: 0, lambda seq: tuple(range(seq.seq)))
    line = [waiting(n) for n in range(1, 1500)]
    assert numbers(DfsWeight(), line, facts) == list(range(1499, 0, -1))


def test_hrrn_weighs_age_against_what_must_be_computed():
    policy = Hrrn(10_000)
    cold, hot = waiting(1, length=100), waiting(3, length=100)
    arrive(policy, cold)
    policy.note_admitted(waiting(2), 50)
    policy.note_arrived(hot, [cold, hot])
    policy.note_generated(waiting(2))
    facts = cached({3: 99})
    assert numbers(policy, [cold, hot], facts) == [3, 1], "51/100 against 1/1"
    for _ in range(50):
        policy.note_generated(waiting(2))
    policy.note_arrived(waiting(4, length=100), [cold, hot, waiting(4)])
    line = [cold, hot, waiting(4, length=100)]
    assert numbers(policy, line, cached({3: 99, 4: 99})) == [3, 1, 4], "a newcomer has no age"


def test_hrrn_stops_overtaking_in_the_middle_of_a_pass():
    policy = Hrrn(20)
    _, *hot = line = [waiting(n, length=100) for n in range(1, 6)]
    arrive(policy, *line)
    order = policy.order(line, cached({seq.seq: 88 for seq in hot}))
    policy.note_generated(waiting(0))
    tried = []
    for seq in order:
        tried.append(seq.seq)
        policy.note_admitted(seq, 12 if seq in hot else 100)
    assert tried[:3] == [2, 3, 1], "two hot ones cost 24 tokens, then the elder is due"


def test_hrrn_knows_exactly_what_later_arrivals_have_cost():
    rng, policy = random.Random(5), Hrrn(10**9)
    line, everyone, work = [], [], {}
    for number in range(400):
        seq = waiting(number)
        everyone.append(seq)
        line.append(seq)
        policy.note_arrived(seq, line)
        work[number] = 0
        if rng.random() < 0.8:
            out = line.pop(rng.randrange(len(line)))
            policy.note_admitted(out, 7)
            work[out.seq] += 7
        for seq in rng.sample(everyone, min(3, len(everyone))):
            policy.note_generated(seq)
            work[seq.seq] += 1
        for seq in line:
            assert policy.overtaken_tokens(seq) == sum(cost for other, cost in work.items() if other > seq.seq)
    assert len(policy._work_of) == number - line[0].seq + 1, "who is older than everybody who waits is forgotten"


# ---------------------------------------------------------------- fair


def test_fair_charges_what_the_cache_did_not_spare():
    policy = Fair({})
    line = [waiting(1, user="a"), waiting(2, user="a"), waiting(3, user="b")]
    arrive(policy, *line)
    order = policy.order(line, COLD)
    first = next(order)
    policy.note_admitted(first, 2)
    assert (first.seq, policy.charged("a"), next(order).seq) == (1, 2, 3)


def test_the_tenant_of_the_key_is_not_overruled_by_the_body():
    assert waiting(1, user="a", tenant="key").spec.payer == "key"
    assert waiting(1, user="a").spec.payer == "a"


def test_what_a_retraction_lost_is_not_charged_again():
    policy = Fair({})
    policy.note_admitted(waiting(1, user="a"), 10)
    policy.note_admitted(retracted(2, user="a"), 10)
    assert policy.charged("a") == 10


def test_coming_back_gives_no_credit_and_forgives_no_debt():
    policy = Fair({"b": 2.0})
    alone = waiting(1, user="a")
    arrive(policy, alone)
    policy.note_admitted(alone, 100)
    back = waiting(2, user="b")
    policy.note_arrived(back, [back])
    assert policy.charged("b") == 100, "level with who was served last"
    policy.note_admitted(back, 50)
    assert policy.charged("b") == 125, "half price for weight 2"
    again = [waiting(3, user="a"), waiting(4, user="b")]
    arrive(policy, *again)
    assert (policy.charged("a"), policy.charged("b")) == (125, 125)


def test_tenants_that_never_come_back_are_forgotten():
    policy = Fair({})
    for number in range(5 * MAX_TENANTS):
        seq = waiting(number, length=1, user=f"once {number}")
        policy.note_arrived(seq, [seq])
        policy.note_admitted(seq, 1)
    assert len(policy._charged) <= MAX_TENANTS + 1


# ---------------------------------------------------------------- cost


class Counted:
    """How many prefixes each plan looked up."""

    def __init__(self, harness):
        self.lookups = []
        self._match = harness.cache.match
        harness.cache.match = self.match

    def match(self, *arguments):
        self.lookups[-1] += 1
        return self._match(*arguments)


@pytest.mark.parametrize("policy", ["lpm", "hrrn", "dfs-weight"])
def test_a_thousand_waiters_cost_a_bounded_number_of_lookups_and_keep_their_order(policy):
    slots = 4
    harness = Harness(policy=policy, pages=512, page_size=4, max_running=slots, max_queued=2000, overlap=False)
    shared = list(range(100, 140))
    harness.submit("warm", shared, max_new=1)
    harness.run()
    counted = Counted(harness)
    for n in range(1000):
        harness.submit(f"cold{n}", [n % 90, n // 90, *range(20)], max_new=3)
    harness.submit("hot", [*shared, 1, 2], max_new=3)
    for _ in range(60):
        counted.lookups.append(0)
        harness.turn()
    # Beside the line: one look at each candidate that is tried.
    assert max(counted.lookups) <= FIRST_LOOKS + SECOND_LOOKS + 2 * slots
    assert harness.scheduler.stats().waiting > 900
    assert "hot" in harness.finishes(), "its turn to be looked up came, although a thousand stood before it"


def test_a_line_that_cannot_move_is_not_sorted():
    harness = Harness(policy="hrrn", max_running=1, overlap=False)
    harness.submit("runs", range(5), max_new=40)
    harness.turn()
    harness.submit("waits", range(50, 60), max_new=4)
    harness.turn()
    counted = Counted(harness)
    counted.lookups.append(0)
    for _ in range(10):
        harness.turn()
    assert counted.lookups == [0]


# ---------------------------------------------------------------- leaders


def test_a_follower_does_not_wait_for_a_slow_leader_for_ever():
    harness = Harness(
        policy="fcfs", pages=600, page_size=4, max_running=4, max_step_tokens=8, max_chunk_tokens=1, overlap=False
    )
    prompt = list(range(3 * FOLLOW_STEPS))
    harness.submit("leader", prompt, max_new=1)
    harness.turn()
    harness.submit("follower", [*prompt, 5], max_new=1)
    for _ in range(FOLLOW_STEPS):
        harness.turn()
        assert harness.scheduler.stats().waiting == 1
    harness.turn()
    assert harness.scheduler.stats().waiting == 0
    harness.run()
    # It took what the leader had cached by then, and computed the rest itself.
    assert FOLLOW_STEPS - 4 <= harness.finishes()["follower"][0].usage.cached_tokens <= FOLLOW_STEPS + 4
