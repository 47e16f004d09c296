"""Shares of the engine. Tenants that have work waiting get tokens in proportion to their weights, whatever they send.

Knows: tokens charged to each tenant. Refuses to know: time, requests per second, who the tenants are.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from branchline.sched.lifecycle import Seq
from branchline.sched.policies.port import OrderPolicy, PassFacts

MAX_TENANTS = 1024
"""Counters kept; beyond it those who owe least and have nothing waiting are forgotten."""


class Fair(OrderPolicy):
    """The tenant with the least charged work per weight goes first; within a tenant, arrival order. Charged are uncached
    prompt tokens (once, at first admission: what a retraction makes us compute again is not the tenant's doing) and
    generated tokens. Nothing is kept back for the absent, so an idle share goes to the others; who comes back after
    idling starts level with those who are waiting and gets no credit. This is the virtual token counter of Sheng et
    al., "Fairness in Serving Large Language Models" (OSDI 2024), charging what the cache did not spare.

    Starvation bound: let d = the longest uncached prompt + all that ``max_running`` requests of one tenant may still
    generate, divided by the smallest weight. Over any time in which two tenants both have work waiting, what they are
    charged per weight differs by at most 2 d. So a request waits for its own tenant's line before it, and for as much
    work per weight, plus 2 d, of each other tenant. To this comes what is admitted while it follows a leader
    (``admission.FOLLOW_STEPS`` steps at most).
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """``weights`` of tenants; 1 for everyone else."""
        self._weights = dict(weights)
        self._charged: dict[str, float] = {}
        self._last = ""
        """Tenant that was admitted last."""

    def order(self, line: Iterable[Seq], facts: PassFacts) -> Iterator[Seq]:
        lines: dict[str, deque[Seq]] = {}
        for seq in line:
            if seq.retractions:
                yield seq
            else:
                lines.setdefault(seq.spec.payer, deque()).append(seq)
        # An entry is pushed again after its sequence was tried: by then an admission has been charged.
        heap = [(self.charged(tenant), own[0].seq, tenant) for tenant, own in lines.items()]
        heapq.heapify(heap)
        while heap:
            _, _, tenant = heapq.heappop(heap)
            yield lines[tenant].popleft()
            if lines[tenant]:
                heapq.heappush(heap, (self.charged(tenant), lines[tenant][0].seq, tenant))

    def charged(self, tenant: str) -> float:
        """Work per weight: the virtual time of a tenant, in tokens."""
        return self._charged.get(tenant, 0.0)

    def note_arrived(self, seq: Seq, line: Iterable[Seq]) -> None:
        tenant = seq.spec.payer
        waiting = {other.spec.payer: None for other in line if other is not seq}  # a dict: it has an order
        if tenant not in waiting:
            self._forget(waiting)
            level = min(map(self.charged, waiting), default=self.charged(self._last))
            self._charged[tenant] = max(self.charged(tenant), level)

    def note_admitted(self, seq: Seq, uncached_tokens: int) -> None:
        self._last = seq.spec.payer
        if not seq.retractions:
            self._charge(seq, uncached_tokens)

    def note_generated(self, seq: Seq) -> None:
        self._charge(seq, 1)

    def _charge(self, seq: Seq, tokens: int) -> None:
        tenant = seq.spec.payer
        self._charged[tenant] = self.charged(tenant) + tokens / self._weights.get(tenant, 1.0)

    def _forget(self, waiting: Mapping[str, None]) -> None:
        if len(self._charged) <= MAX_TENANTS:
            return
        absent = [tenant for tenant in self._charged if tenant not in waiting and tenant != self._last]
        for tenant in sorted(absent, key=self.charged)[: MAX_TENANTS // 2]:
            del self._charged[tenant]
