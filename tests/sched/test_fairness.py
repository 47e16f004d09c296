"""Policy ``fair``: shares of tenants, measured in tokens that the engine really computed (reliability I22)."""

from collections import Counter

import pytest

from branchline.core.events import Admitted, Planned
from tests.support.harness import Harness

LENGTH, NEW, SLOTS = 20, 8, 6
SLACK = LENGTH + SLOTS * NEW
"""The bound d of ``Fair`` in here: the longest uncached prompt, and what the requests of one tenant may still generate."""


class Meter:
    """Tokens computed per tenant, step by step."""

    def __init__(self) -> None:
        self.tenant_of: dict[int, str] = {}
        self.steps: list[Counter] = []

    def watch(self, harness: Harness) -> None:
        self.roster = harness.scheduler._roster

    def notice(self, event) -> None:
        if isinstance(event, Admitted):
            seq = self.roster.find(event.request_id)
            self.tenant_of[seq.seq] = seq.spec.payer
        elif isinstance(event, Planned):
            step = Counter()
            for row in event.plan.rows:
                step[self.tenant_of[row.seq]] += row.count
            self.steps.append(step)

    def total(self, start: int = 0, end: int | None = None) -> Counter:
        return sum(self.steps[start:end], Counter())


def make(policy="fair", **settings):
    meter = Meter()
    harness = Harness(
        [meter], policy=policy, pages=200, page_size=4, max_running=SLOTS, max_step_tokens=24, max_queued=5000,
        vocabulary=997, check_every=20, **settings,
    )  # fmt: skip
    meter.watch(harness)
    return harness, meter


def submit(harness, user, count, length=LENGTH, new=NEW):
    for _ in range(count):
        number = len(harness.specs)
        harness.submit(f"{user}{number}", [number % 900, number // 900, *range(length - 2)], max_new=new, user=user)


def worst_lag(meter, weights, steps):
    """Over all windows, by how much the share of a backlogged tenant fell behind what its weight promises."""
    whole = sum(weights.values())
    lags = []
    for tenant, weight in weights.items():
        behind = worst = 0.0  # the largest sum over any run of steps (Kadane)
        for step in meter.steps[:steps]:
            behind = max(0.0, behind + weight / whole * sum(step.values()) - step[tenant])
            worst = max(worst, behind)
        lags.append(worst)
    return max(lags)


@pytest.mark.parametrize(("policy", "lags"), [("fair", False), ("fcfs", True)])
def test_ten_times_the_work_gets_no_more_than_its_share(policy, lags):
    """I22: in every window of steps in which both have work waiting, each gets half, but for a constant."""
    harness, meter = make(policy)
    for _ in range(40):
        submit(harness, "greedy", 10)
        submit(harness, "modest", 1)
    while any(seq.spec.user == "modest" for seq in harness.scheduler._roster.waiting) or not meter.steps:
        harness.turn()
    both = len(meter.steps)
    assert both > 80
    assert (worst_lag(meter, {"greedy": 1.0, "modest": 1.0}, both) > 2 * SLACK) is lags
    share = meter.total(0, both)["modest"] / meter.total(0, both).total()
    assert (share > 0.42) is not lags


def test_weights_divide_the_engine():
    weights = {"a": 1.0, "b": 2.0, "c": 3.0}
    harness, meter = make(tenant_weights=tuple(weights.items()))
    for user in weights:
        submit(harness, user, 200)
    for _ in range(300):
        harness.turn()
    assert all(any(seq.spec.user == user for seq in harness.scheduler._roster.waiting) for user in weights)
    assert worst_lag(meter, weights, 300) <= 2 * SLACK * max(weights.values())
    total = meter.total()
    for user, weight in weights.items():
        assert total[user] / total.total() == pytest.approx(weight / 6, abs=0.02)


def test_an_idle_share_is_used_by_others():
    steps = []
    for policy in ("fair", "fcfs"):
        harness, meter = make(policy)
        submit(harness, "alone", 60)
        harness.run()
        steps.append(len(meter.steps))
    assert steps[0] == steps[1]


def test_who_comes_back_gets_no_credit_for_having_been_away():
    harness, meter = make()
    submit(harness, "steady", 300)
    submit(harness, "moody", 1)
    for _ in range(150):
        harness.turn()
    assert meter.total()["moody"] < SLACK
    back = len(meter.steps)
    submit(harness, "moody", 100)
    for _ in range(60):
        harness.turn()
    window = meter.total(back, back + 60)
    assert min(window["steady"], window["moody"]) >= window.total() / 2 - 2 * SLACK


def test_uncached_tokens_are_what_is_paid_for():
    """Equal shares of computed tokens: whoever hits the cache gets more requests served for the same price."""
    harness, meter = make()
    shared = list(range(500, 564))
    harness.submit("warm", shared, max_new=1)
    harness.run()
    start = len(meter.steps)
    for number in range(150):
        harness.submit(f"hit{number}", [*shared, number], max_new=4, user="hit")
        harness.submit(f"miss{number}", [number, *range(63)], max_new=4, user="miss")
    for _ in range(100):
        harness.turn()
    waiting = Counter(seq.spec.user for seq in harness.scheduler._roster.waiting)
    total, served = meter.total(start), {user: 150 - waiting[user] for user in ("hit", "miss")}
    assert min(waiting["hit"], waiting["miss"]) > 0
    assert min(total["hit"], total["miss"]) >= total.total() / 2 - 2 * (64 + SLOTS * 4)
    assert served["hit"] > 3 * served["miss"]
