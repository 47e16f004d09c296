"""Who is tried first: one door, many orders.

    policies.port         what a policy is told and what it is asked
    policies.plain        fcfs, lof, random, priority: the cache does not matter
    policies.cache_aware  lpm, dfs-weight, hrrn
    policies.fair         shares of the engine per tenant

Knows: names. Refuses to know: memory, budgets, time.
"""

from collections.abc import Callable

from branchline.base.config import EngineConfig
from branchline.sched.policies.cache_aware import DfsWeight, Hrrn, LongestPrefix
from branchline.sched.policies.fair import Fair
from branchline.sched.policies.plain import Fcfs, LongestOutput, Priority, Random
from branchline.sched.policies.port import OrderPolicy, PassFacts

__all__ = ["POLICIES", "OrderPolicy", "PassFacts"]

POLICIES: dict[str, Callable[[EngineConfig], OrderPolicy]] = {
    "fcfs": lambda config: Fcfs(),
    "lpm": lambda config: LongestPrefix(),
    "hrrn": lambda config: Hrrn(config.overtake_tokens),
    "dfs-weight": lambda config: DfsWeight(),
    "lof": lambda config: LongestOutput(),
    "random": lambda config: Random(config.policy_seed),
    "priority": lambda config: Priority(config.preemption_gap),
    "fair": lambda config: Fair(dict(config.tenant_weights)),
}
"""The one door for policies: a name and a way to make it. ``base.config.POLICY_NAMES`` lists the same names."""
