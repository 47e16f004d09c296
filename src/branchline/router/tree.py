"""An approximate radix tree: which replicas have seen which prefix. It forgets what was used least recently.

Works on any sequence that can be sliced and compared: tokens in a tuple, characters in a string. Knows: keys and who saw
them. Refuses to know: load, caches, time (its only clock counts its own calls).
"""

import heapq
import itertools
from collections.abc import Container, Sequence
from typing import Any, TypeAlias

from branchline.base.errors import require

Replica: TypeAlias = int
Key: TypeAlias = Sequence[Any]


class _Node:
    __slots__ = ("children", "label", "parent", "seen", "used")

    def __init__(self, parent: "_Node | None", label: Key) -> None:
        self.parent = parent
        self.label = label
        self.children: dict[Any, _Node] = {}
        """By the first element of their label."""
        self.seen: dict[Replica, int] = {}
        """When each replica saw this prefix last, in calls of the tree."""
        self.used = 0

    def seen_last_by(self, candidates: Container[Replica]) -> Replica | None:
        return max((replica for replica in self.seen if replica in candidates), key=self.seen.__getitem__, default=None)


class PrefixTree:
    """``match`` writes nothing. Both verbs cost O(length of the key) at the speed of slice comparison."""

    def __init__(self, max_size: int) -> None:
        """``max_size``: elements kept at most, after each insertion."""
        self._root = _Node(None, ())
        self._max_size = max_size
        self._calls = 0
        self._numbers = itertools.count()
        self._heap: list[tuple[int, int, _Node]] = []
        """Leaves by the time of their last use when they were put there; corrected when they come up."""
        self.size = 0
        """Elements of all labels together."""

    def match(self, key: Key, candidates: Container[Replica]) -> tuple[int, Replica | None]:
        """The longest prefix of ``key`` that any of ``candidates`` has seen, and who saw it last."""
        node, matched = self._root, 0
        best: tuple[int, Replica | None] = (0, None)
        while (child := node.children.get(key[matched]) if matched < len(key) else None) is not None:
            common = _common(child.label, key, matched)
            matched += common
            replica = child.seen_last_by(candidates)
            if replica is not None:
                best = matched, replica
            if common < len(child.label):
                break
            node = child
        return best

    def insert(self, key: Key, replica: Replica) -> None:
        """``replica`` has seen ``key``, and so all its prefixes."""
        self._calls += 1
        node, done = self._root, 0
        while done < len(key):
            child = node.children.get(key[done])
            child = self._grow(node, key[done:]) if child is None else self._cut(child, _common(child.label, key, done))
            child.seen[replica] = child.used = self._calls
            done += len(child.label)
            node = child
        while self.size > self._max_size and self._drop_oldest():
            pass

    def forget(self, replica: Replica) -> None:
        """This replica has seen nothing."""
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            node.seen.pop(replica, None)
            nodes.extend(node.children.values())

    def check(self) -> None:
        """Recompute everything. Raises InvariantBroken."""
        size, nodes = 0, [self._root]
        while nodes:
            node = nodes.pop()
            size += len(node.label)
            for first, child in node.children.items():
                require(child.parent is node and child.label[0] == first, "a child does not hang where it is looked for")
                require(child.used <= node.used or node is self._root, "a child was used after its parent")
                nodes.append(child)
        require(size == self.size, f"the tree holds {size} elements and says {self.size}")

    # ------------------------------------------------------------ inner

    def _grow(self, parent: _Node, label: Key) -> _Node:
        node = _Node(parent, label)
        parent.children[label[0]] = node
        self.size += len(label)
        self._offer(node)
        return node

    def _cut(self, node: _Node, length: int) -> _Node:
        """The node that ends after ``length`` elements of this label: this one or a new one above it."""
        if length == len(node.label) or node.parent is None:
            return node
        upper = _Node(node.parent, node.label[:length])
        upper.seen, upper.used = dict(node.seen), node.used
        node.parent.children[upper.label[0]] = upper
        node.parent, node.label = upper, node.label[length:]
        upper.children[node.label[0]] = node
        return upper

    def _offer(self, node: _Node) -> None:
        heapq.heappush(self._heap, (node.used or self._calls, next(self._numbers), node))

    def _drop_oldest(self) -> bool:
        """Drop the leaf that was used least recently. False if there is none."""
        while self._heap:
            used, _, leaf = heapq.heappop(self._heap)
            if leaf.children or leaf.parent is None:
                continue
            if leaf.used > used:
                self._offer(leaf)
                continue
            parent = leaf.parent
            del parent.children[leaf.label[0]]
            self.size -= len(leaf.label)
            leaf.parent = None
            if not parent.children and parent is not self._root:
                self._offer(parent)
            return True
        return False


def _common(label: Key, key: Key, start: int) -> int:
    """How many elements of ``label`` are found in ``key[start:]``, by bisection over slices."""
    low, high = 0, min(len(label), len(key) - start)
    if label[:high] == key[start : start + high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if label[low:middle] == key[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low
