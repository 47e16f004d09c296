"""A bounded picture of the tree for people: hashes, lengths, locks and times, never a token.

Knows: which nodes to show when not all can be. Refuses to know: who asks.
"""

from collections.abc import Mapping
from itertools import islice
from zlib import crc32

from branchline.cache.node import Node, Root
from branchline.core.explain import TreeNode, show_mark
from branchline.core.request import Namespace

MAX_DEPTH = 32
"""Nodes deeper than this are only counted."""


def outline(roots: Mapping[Namespace, Root], page_size: int, node_count: int) -> tuple[TreeNode, ...]:
    """Breadth first, most recently used first, until ``node_count`` nodes are shown."""
    shown: dict[int, list[Node]] = {}
    """For each node that is shown, the children that are."""
    level: list[Node] = [*islice(roots.values(), node_count)]
    order: list[Node] = []
    for depth in range(MAX_DEPTH + 1):
        order += level
        below: list[Node] = []
        for node in level:
            room = node_count - len(order) - len(below) if depth < MAX_DEPTH else 0
            shown[id(node)] = sorted(node.children.values(), key=lambda child: -child.touched_ns)[: max(0, room)]
            below += shown[id(node)]
        level = below
    return _build(order, shown, page_size)


def namespace_hash(namespace: Namespace) -> str:
    """Tells namespaces apart without naming a tenant or a salt."""
    return f"{crc32(repr((namespace.model, namespace.adapter, namespace.tenant, namespace.salt)).encode()):08x}"


def _build(order: list[Node], shown: Mapping[int, list[Node]], page_size: int) -> tuple[TreeNode, ...]:
    """Children before parents: ``order`` is breadth first."""
    built: dict[int, TreeNode] = {}
    for node in order[::-1]:
        children = shown[id(node)]
        name = namespace_hash(node.namespace) if isinstance(node, Root) else show_mark(node.end_mark)
        built[id(node)] = TreeNode(
            prefix=name,
            tokens=node.page_count * page_size,
            locks=node.lock_count,
            last_used_at_ns=node.touched_ns,
            children=tuple(built[id(child)] for child in children),
            omitted=len(node.children) - len(children),
        )
    return tuple(built[id(node)] for node in order if isinstance(node, Root))
