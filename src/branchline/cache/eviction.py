"""Which cached prefix goes first, when pages are needed.

Knows: orders (a key per node) and a queue of the leaves that may go. Refuses to know: the tree's counters, the ledger.

A new order is one class with one method. It says how much a node is worth; the least worth is dropped first. Its key may
only grow during the life of a node: the queue holds each leaf once, under the key it had when it was put there, and looks
at the present key when the leaf comes up. A key that fell would be noticed late.
"""

import heapq
import itertools
from collections.abc import Callable
from typing import Protocol, TypeAlias

from branchline.base.errors import require
from branchline.cache.node import Node

Worth: TypeAlias = tuple[int, ...]
"""Compared like any tuple; smaller goes first. Equal ones go in the order in which they became evictable."""


class NodeFacts(Protocol):
    """What an order may ask about a node."""

    @property
    def touched_ns(self) -> int:
        """When it was last inserted or locked."""

    @property
    def born_ns(self) -> int:
        """When its content was first inserted."""

    @property
    def hits(self) -> int:
        """Requests that computed it or began with it."""

    @property
    def priority(self) -> int:
        """The highest of theirs."""

    @property
    def page_count(self) -> int: ...


class EvictionOrder(Protocol):
    def worth(self, node: NodeFacts) -> Worth:
        """How much is lost with this node. Must not fall during its life."""


class Lru:
    """Least recently used first."""

    def worth(self, node: NodeFacts) -> Worth:
        return (node.touched_ns,)


class Lfu:
    """Least frequently used first, in requests; of equals the least recently used."""

    def worth(self, node: NodeFacts) -> Worth:
        return (node.hits, node.touched_ns)


class Slru:
    """Segmented: what only one request has used goes before everything that was used again; least recently used first
    within each segment. A flood of prompts that never come back cannot wash out what is shared. (Nothing is demoted, as
    in SGLang's ``slru``; the classic one bounds the second segment.)"""

    def worth(self, node: NodeFacts) -> Worth:
        return (int(node.hits > 1), node.touched_ns)


class Fifo:
    """First in, first out: use does not count."""

    def worth(self, node: NodeFacts) -> Worth:
        return (node.born_ns,)


class ByPriority:
    """What only requests of low priority have used goes first; of equals the least recently used."""

    def worth(self, node: NodeFacts) -> Worth:
        return (node.priority, node.touched_ns)


EVICTION_ORDERS: dict[str, Callable[[], EvictionOrder]] = {
    "lru": Lru,
    "lfu": Lfu,
    "slru": Slru,
    "fifo": Fifo,
    "priority": ByPriority,
}
"""The one door for eviction orders. ``base.config.EVICTION_NAMES`` lists the same names."""


class EvictionQueue:
    """Unlocked leaves by worth. Lazy: an entry is corrected or forgotten when it comes up, never searched for.

    A node has one entry at most, so the heap is never longer than the tree has nodes. An entry is pushed again at most
    once for each time its key grew, so ``pop`` is O(log nodes) amortised.
    """

    def __init__(self, order: EvictionOrder) -> None:
        self._order = order
        self._heap: list[tuple[Worth, int, Node]] = []
        self._numbers = itertools.count()

    def offer(self, node: Node) -> None:
        """Take note of ``node`` if it is an unlocked leaf."""
        if node.is_evictable_leaf and not node.queued:
            self._push(node)

    def pop(self) -> Node | None:
        """The unlocked leaf that is worth least; ``None`` if there is none. It is out of the queue afterwards."""
        while self._heap:
            worth, _, node = heapq.heappop(self._heap)
            node.queued = False
            if not node.is_evictable_leaf:
                continue
            if self._order.worth(node) > worth:
                self._push(node)
                continue
            return node
        return None

    def check(self, nodes: list[Node]) -> None:
        """Every unlocked leaf among all ``nodes`` of the tree has one entry, not above its present worth."""
        queued = {id(node): worth for worth, _, node in self._heap}
        require(len(queued) == len(self._heap), "a node is twice in the eviction queue")
        require(all(node.queued for _, _, node in self._heap), "a node does not know that it is queued")
        for node in nodes:
            require(node.queued == (id(node) in queued), "a node believes wrongly that it is queued")
            if node.is_evictable_leaf:
                require(node.queued, "an unlocked leaf is missing from the eviction queue")
                require(queued[id(node)] <= self._order.worth(node), "the worth of a node fell")

    def _push(self, node: Node) -> None:
        node.queued = True
        heapq.heappush(self._heap, (self._order.worth(node), next(self._numbers), node))
