"""The radix tree: which pages hold the KV of which token prefix, shared between requests.

Knows: tokens, pages, locks, and when each was last used. Refuses to know: bytes, requests, how many pages are wanted.

One root per namespace. A node holds a run of whole pages; its children differ in their first page. Sharing is exact to the
token all the same: where a page diverges, ``match`` names the page with the longest common beginning as a tail to copy.

        root --[a b c d | e f g h]--+--[i j k l]            a query a..h i j X ..  matches two pages, and two tokens of
                                    +--[m n o p | q r s t]  the page [i j k l] as its tail

Three rules make it safe. ``match`` writes nothing. A lock on a node locks its ancestors, so ``lock(v) >= sum of
lock(children)`` and every unlocked page can be reached by dropping leaves. When a node splits, its lower part stays the
same object, so that a path which was handed out goes on protecting everything above it.
"""

from collections import Counter as Tally
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from branchline.base.errors import InvariantBroken, require
from branchline.base.ids import PageId, SeqId, StepId, TokenId
from branchline.cache.check import Counters, check_locks, check_tree
from branchline.cache.eviction import EvictionOrder, EvictionQueue, Lru
from branchline.cache.fan import Chunk
from branchline.cache.node import Node, Root, common_pages, common_tokens
from branchline.cache.outline import outline
from branchline.cache.pages import PageLedger
from branchline.core.explain import TreeNode
from branchline.core.ports import Dropped, Insertion, Match, Path, Tail, Trace
from branchline.core.request import Namespace

NAMESPACES_LOOKED_AT = 32
"""Other namespaces in which a missing page is looked for, to explain a miss."""


class Place(NamedTuple):
    """How far a query can be followed."""

    node: Node
    """Deepest node of which a page matched; the root if none did."""
    used: int
    """Pages of ``node`` that matched."""
    pages: list[PageId]
    """All that matched, from the root on."""

    @property
    def is_inside(self) -> bool:
        """Does it end before the node does?"""
        return self.used < self.node.page_count


class RadixCache:
    """The :class:`~branchline.core.ports.PrefixCache` that shares. Its worst mistakes raise InvariantBroken."""

    def __init__(self, ledger: PageLedger, page_size: int, order: EvictionOrder | None = None) -> None:
        require(page_size > 0, f"a page holds at least one token, not {page_size}")
        self.page_size = page_size
        self._ledger = ledger
        self._queue = EvictionQueue(order or Lru())
        self._roots: dict[Namespace, Root] = {}
        self._page_count = 0
        self._evictable_pages = 0
        self._locked_nodes = 0
        self._version = 0
        self._dropped: list[Dropped] = []

    # ------------------------------------------------------------ questions

    @property
    def page_count(self) -> int:
        return self._page_count

    @property
    def evictable_pages(self) -> int:
        return self._evictable_pages

    @property
    def locked_nodes(self) -> int:
        return self._locked_nodes

    @property
    def version(self) -> int:
        return self._version

    def match(self, namespace: Namespace, tokens: Sequence[TokenId], limit: int) -> Match:
        """Longest cached prefix of ``tokens[:limit]``: O(limit) at the speed of tuple comparison. Writes nothing.

        A match stays true while ``version`` is unchanged or, once its path is locked, until it is unlocked.
        """
        query = tuple(tokens[: max(limit, 0)])
        place = _descend(self._root(namespace), self._chunks(query))
        tail = self._tail(place, query)
        return Match(place.node, tuple(place.pages), tail, self.page_size)

    # ------------------------------------------------------------ locks

    def cut(self, match: Match) -> Path:
        """The path that ends exactly with the whole pages of ``match``; a node that goes on is split there. A lock on the
        path of the match itself would keep the rest of that node as well, and the one who runs alone could starve beside
        pages that nobody uses.

        Raises:
            InvariantBroken: the path was evicted since it was handed out.
        """
        node = _live(match.path)
        surplus = node.depth_pages - len(match.pages)
        while surplus and surplus >= node.page_count and node.parent is not None:  # it was split since
            surplus -= node.page_count
            node = node.parent
        return self._cut_at(Place(node, node.page_count - surplus, list(match.pages)))

    def lock(self, path: Path, now_ns: int) -> None:
        """Protect the nodes of a path, whole, and mark them as used. Roots need no protection.

        Raises:
            InvariantBroken: the path was evicted since it was handed out.
        """
        for node in _live(path).upward():
            if node.lock_count == 0:
                self._evictable_pages -= node.page_count
                self._locked_nodes += 1
            node.lock_count += 1
            node.touched_ns = max(node.touched_ns, now_ns)

    def unlock(self, path: Path, last_step: StepId) -> None:
        """Give one lock back. Plans up to ``last_step`` may still read these pages.

        Raises:
            InvariantBroken: the path is not locked.
        """
        leaf = _live(path)
        require(leaf.parent is None or leaf.lock_count > 0, "a path was unlocked more often than locked")
        for node in leaf.upward():
            node.lock_count -= 1
            node.last_step = max(node.last_step, last_step)
            if node.lock_count == 0:
                self._evictable_pages += node.page_count
                self._locked_nodes -= 1
        self._queue.offer(leaf)

    def use(self, path: Path, priority: int) -> None:
        """A request begins with this path: what eviction orders may count.

        Raises:
            InvariantBroken: the path was evicted since it was handed out.
        """
        for node in _live(path).upward():
            node.hits += 1
            node.priority = max(node.priority, priority)

    def pages_freed_by(self, paths: Sequence[Path]) -> int:
        """Pages that would be evictable if one lock on each of ``paths`` were given back. O(nodes on the paths).

        Raises:
            InvariantBroken: one of them was evicted since it was handed out.
        """
        locks = Tally(node for path in paths for node in _live(path).upward())
        return sum(node.page_count for node, count in locks.items() if node.lock_count == count)

    # ------------------------------------------------------------ growth

    def insert(
        self,
        namespace: Namespace,
        tokens: Sequence[TokenId],
        pages: Sequence[PageId],
        owner: SeqId,
        now_ns: int,
        priority: int = 0,
    ) -> Insertion:
        """Remember the whole pages of ``tokens``. Pages new to the tree pass from ``owner`` to it.

        ``pages[i]`` holds tokens ``[i * page_size, (i + 1) * page_size)``; pages beyond the last whole one are ignored.
        The path returned ends exactly with the last whole page, and is not locked.

        Raises:
            InvariantBroken: a new page is not private to ``owner``, or pages are missing. Nothing has changed then.
        """
        chunks = self._chunks(tuple(tokens))
        require(len(pages) >= len(chunks), f"{len(chunks)} whole pages of tokens came with {len(pages)} pages")
        place = _descend(self._root(namespace), chunks)
        known = len(place.pages)
        fresh = list(pages[known : len(chunks)])
        self._ledger.give_to_tree(owner, fresh)
        node = self._cut_at(place)
        if fresh:
            node = self._grow(node, chunks[known:], fresh)
            node.born_ns, node.hits, node.priority = now_ns, 1, priority
        for touched in node.upward():
            touched.touched_ns = max(touched.touched_ns, now_ns)
        self._queue.offer(node)
        self._version += 1
        duplicates = tuple(mine for mine, ours in zip(pages, place.pages, strict=False) if mine != ours)
        return Insertion(node, (*place.pages, *fresh), duplicates)

    # ------------------------------------------------------------ loss

    def evict(self, page_count: int) -> int:
        """Drop up to ``page_count`` unlocked pages, page by page from the tail of the leaf that is worth least.

        Returns how many were dropped: ``min(page_count, evictable_pages)``.
        """
        dropped = 0
        self._dropped = []
        while dropped < page_count and (leaf := self._queue.pop()) is not None:
            dropped += self._drop_tail(leaf, min(page_count - dropped, leaf.page_count))
        if dropped:
            self._version += 1
        return dropped

    def reset(self) -> int:
        """Drop everything; returns the number of pages dropped.

        Raises:
            InvariantBroken: something is locked. Nothing has changed then.
        """
        require(self._locked_nodes == 0, f"{self._locked_nodes} nodes are locked: the cache cannot be reset")
        self._version += 1
        return self.evict(self._page_count)

    @property
    def dropped(self) -> Sequence[Dropped]:
        """What the last ``evict`` or ``reset`` dropped, in order."""
        return self._dropped

    # ------------------------------------------------------------ explanation

    def trace(self, namespace: Namespace, tokens: Sequence[TokenId], match: Match) -> Trace:
        """Evidence of why ``match``, whose path was cut, did not go further along ``tokens``. O(namespaces looked at)."""
        node, page_count = _live(match.path), len(match.pages)
        is_alone = len(self._roots) == 1 and page_count > 0
        is_elsewhere = not is_alone and self._is_elsewhere(namespace, tokens, page_count + 1)
        return Trace(node.end_mark, page_count > 0 and bool(node.children), is_elsewhere)

    def outline(self, node_count: int) -> tuple[TreeNode, ...]:
        """The top of the tree, breadth first. O(nodes shown and their children)."""
        return outline(self._roots, self.page_size, node_count)

    # ------------------------------------------------------------ proof

    def check(self) -> None:
        """Prove every invariant of the tree, and that the ledger agrees. Raises InvariantBroken. O(everything)."""
        counters = Counters(self._page_count, self._evictable_pages, self._locked_nodes)
        check_tree(self._roots, self.page_size, counters, self._queue, self._ledger)

    def check_locks(self, paths: Sequence[Path]) -> None:
        """Prove that exactly ``paths``, one entry per lock, account for every lock. Raises InvariantBroken."""
        check_locks(self._roots, [_live(path) for path in paths])

    # ------------------------------------------------------------ inner

    def _is_elsewhere(self, namespace: Namespace, tokens: Sequence[TokenId], page_count: int) -> bool:
        """Are the first ``page_count`` pages of ``tokens`` cached in another namespace? Looks at a few only."""
        wanted = self._chunks(tuple(tokens[: page_count * self.page_size]))
        others = islice((root for other, root in self._roots.items() if other != namespace), NAMESPACES_LOOKED_AT)
        return len(wanted) == page_count and any(len(_descend(root, wanted).pages) == page_count for root in others)

    def _root(self, namespace: Namespace) -> Root:
        """The root of ``namespace``, or a new one that is not in the tree yet."""
        root = self._roots.get(namespace)
        return Root(namespace) if root is None else root

    def _chunks(self, tokens: Chunk) -> list[Chunk]:
        size = self.page_size
        return [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)]

    def _tail(self, place: Place, query: Chunk) -> Tail | None:
        """The page after ``place`` that begins like the rest of the query. One page never matches whole here."""
        start = len(place.pages) * self.page_size
        rest = query[start : start + self.page_size]
        if place.is_inside:
            node, page = place.node, place.used
            count = common_tokens(node.chunks[page], rest)
            return Tail(node.pages[page], count, node) if count else None
        nearest = place.node.nearest_child(rest)
        return Tail(nearest[0].pages[0], nearest[1], nearest[0]) if nearest else None

    def _cut_at(self, place: Place) -> Node:
        """The node that ends where ``place`` does."""
        if not place.is_inside:
            return place.node
        if place.node.lock_count:
            self._locked_nodes += 1
        return place.node.split(place.used)

    def _grow(self, parent: Node, chunks: list[Chunk], pages: list[PageId]) -> Node:
        if isinstance(parent, Root):
            self._roots[parent.namespace] = parent
        node = Node(parent, chunks, pages)
        parent.adopt(node)
        self._page_count += len(pages)
        self._evictable_pages += len(pages)
        return node

    def _drop_tail(self, leaf: Node, page_count: int) -> int:
        """The one place where pages leave the tree."""
        root, length = leaf.origin()
        if page_count == leaf.page_count:
            self._unlink(leaf)
        pages, marks = leaf.cut_tail(page_count)
        self._dropped.append(Dropped(root.namespace, marks, length, leaf.touched_ns))
        self._ledger.release_tree(pages, leaf.last_step)
        self._page_count -= page_count
        self._evictable_pages -= page_count
        self._queue.offer(leaf)
        return page_count

    def _unlink(self, leaf: Node) -> None:
        parent = leaf.parent
        if parent is None:
            raise InvariantBroken("a root cannot be evicted")
        parent.disown(leaf)
        if isinstance(parent, Root) and not parent.children:
            del self._roots[parent.namespace]
        self._queue.offer(parent)


def _descend(root: Root, query: list[Chunk]) -> Place:
    node: Node = root
    used, pages = 0, list[PageId]()
    while used == node.page_count and len(pages) < len(query):
        child = node.children.get(query[len(pages)])
        if child is None:
            break
        node = child
        used = common_pages(child.chunks, query, len(pages))
        pages += child.pages[:used]
    return Place(node, used, pages)


def _live(path: Path) -> Node:
    if not isinstance(path, Node) or path.dropped:
        raise InvariantBroken("this path is not, or no longer, in the cache: match again")
    return path
