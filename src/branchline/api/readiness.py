"""Is the engine making progress? Judged from its last heartbeat alone: asking never enqueues work.

Knows: ages and counters. Refuses to know: HTTP.
"""

from dataclasses import dataclass

from branchline.base.clock import NS_PER_S, Clock
from branchline.wire.client import TextClient

HEARTBEAT_LIMIT_S = 3.0


@dataclass(frozen=True, slots=True)
class Readiness:
    is_ready: bool
    reason: str
    """``ready``, or the first thing that is wrong; one of a fixed set."""
    steps: int = 0
    running: int = 0
    waiting: int = 0
    is_paused: bool = False

    def as_json(self) -> dict[str, object]:
        return {
            "ready": self.is_ready,
            "reason": self.reason,
            "steps": self.steps,
            "running": self.running,
            "waiting": self.waiting,
            "paused": self.is_paused,
        }


def judge(client: TextClient, clock: Clock, *, step_timeout_s: float, is_draining: bool) -> Readiness:
    """The verdict now. A long step is fine until ``step_timeout_s``: a busy engine is a ready engine."""
    heartbeat, arrived_ns = client.latest, client.latest_ns
    if client.is_dead:
        return Readiness(False, "engine_gone")
    if heartbeat is None or arrived_ns is None:
        return Readiness(False, "starting")
    stats = heartbeat.stats
    age_ns = clock.now_ns() - arrived_ns
    step_ns = 0 if stats.step_started_ns is None else heartbeat.clock_ns - stats.step_started_ns + age_ns
    if age_ns > HEARTBEAT_LIMIT_S * NS_PER_S:
        reason = "no_heartbeat"
    elif step_ns > step_timeout_s * NS_PER_S:
        reason = "step_stuck"
    elif is_draining or stats.draining:
        reason = "draining"
    else:
        reason = "ready"
    return Readiness(reason == "ready", reason, stats.steps, stats.running, stats.waiting, stats.paused)
