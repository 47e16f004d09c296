"""The proof that a radix tree is sound: everything that is counted or indexed is computed once more from the nodes.

Knows: what must be true between operations. Refuses to know: how operations keep it true.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from branchline.base.errors import require
from branchline.cache.eviction import EvictionQueue
from branchline.cache.node import Node, Root, marks_after
from branchline.cache.pages import PageKind, PageLedger
from branchline.core.explain import EMPTY_MARK
from branchline.core.request import Namespace


@dataclass(frozen=True, slots=True)
class Counters:
    """What the tree claims to hold."""

    page_count: int
    evictable_pages: int
    locked_nodes: int


def check_tree(
    roots: Mapping[Namespace, Root], page_size: int, counters: Counters, queue: EvictionQueue, ledger: PageLedger
) -> None:
    """Raises InvariantBroken. Linear in tokens; no recursion, however deep the tree."""
    for namespace, root in roots.items():
        _check_root(namespace, root)
    nodes = [node for root in roots.values() for node in _below(root)]
    for node in nodes:
        _check_node(node, page_size)
    _check_counters(nodes, counters)
    _check_pages(nodes, ledger)
    queue.check(nodes)


def check_locks(roots: Mapping[Namespace, Root], held: Sequence[Node]) -> None:
    """Each node is locked once for every path in ``held`` that leads through it. Raises InvariantBroken."""
    counts = Counter(id(node) for leaf in held for node in leaf.upward())
    for root in roots.values():
        for node in _below(root):
            found, expected = node.lock_count, counts[id(node)]
            require(found == expected, f"{found} locks on a node that {expected} paths lead through")


def _below(root: Root) -> Iterator[Node]:
    """Every node but the root, parents first."""
    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children.values())


def _check_root(namespace: Namespace, root: Root) -> None:
    require(root.namespace == namespace, "a root stands under another namespace")
    require(root.parent is None and not root.pages and not root.chunks, "a root holds pages or has a parent")
    require(root.lock_count == 0 and not root.queued and not root.dropped, "a root is locked, queued or dropped")
    require(bool(root.children), "an empty root was kept")
    _check_links(root)


def _check_node(node: Node, page_size: int) -> None:
    require(bool(node.pages), "a node without pages was kept")
    require(len(node.chunks) == len(node.pages), "a node has more keys than pages, or fewer")
    before = node.parent.end_mark if node.parent else EMPTY_MARK
    require(node.marks == marks_after(before, node.chunks), "a page does not carry the mark of its prefix")
    require(all(len(chunk) == page_size for chunk in node.chunks), "a key is not a whole page")
    require(not node.dropped, "a dropped node is still in the tree")
    require(node.lock_count >= sum(child.lock_count for child in node.children.values()), "a lock is missing on a path")
    require(all(node.last_step >= child.last_step for child in node.children.values()), "a path forgot its last reader")
    require(all(node.touched_ns >= child.touched_ns for child in node.children.values()), "a path is older than its end")
    _check_links(node)


def _check_links(node: Node) -> None:
    require(sorted(node.firsts) == sorted(node.children), "the two indexes of the children differ")
    node.firsts.check()
    for first, child in node.children.items():
        require(child.parent is node, "a child does not know its parent")
        require(first == child.chunks[0], "a child is not indexed by its first page")


def _check_counters(nodes: list[Node], counters: Counters) -> None:
    pages = sum(node.page_count for node in nodes)
    evictable = sum(node.page_count for node in nodes if not node.lock_count)
    locked = sum(1 for node in nodes if node.lock_count)
    require(counters == Counters(pages, evictable, locked), f"{counters}, but {pages}, {evictable}, {locked} were found")


def _check_pages(nodes: list[Node], ledger: PageLedger) -> None:
    pages = [page for node in nodes for page in node.pages]
    require(len(set(pages)) == len(pages), "a page is in the tree twice")
    require(len(pages) == ledger.tree_pages, f"the tree holds {len(pages)} pages, the ledger says {ledger.tree_pages}")
    require(all(ledger.state_of(page).kind is PageKind.TREE for page in pages), "the ledger gave a page of the tree away")
