"""Nodes of the radix tree: a run of whole pages, the links around it, and the facts eviction asks for.

Knows: how one node is tied to its neighbours. Refuses to know: counters of the whole tree, the ledger, eviction.
"""

from collections.abc import Iterator
from itertools import accumulate, takewhile

from branchline.base.errors import InvariantBroken
from branchline.base.ids import PageId, StepId
from branchline.cache.fan import Chunk, Fan
from branchline.core.explain import EMPTY_MARK, Mark, extend_mark
from branchline.core.request import Namespace


class Node:
    """A run of pages below ``parent``. Only the cache that made it changes it.

    Children are found by their first page (``children``), and by nearness to a page that diverges (``firsts``).
    """

    __slots__ = (
        "born_ns", "children", "chunks", "dropped", "firsts", "hits", "last_step", "lock_count", "marks", "pages", "parent",
        "priority", "queued", "touched_ns",
    )  # fmt: skip

    def __init__(
        self, parent: "Node | None", chunks: list[Chunk], pages: list[PageId], marks: list[Mark] | None = None
    ) -> None:
        """``marks``: if they are known already."""
        self.parent = parent
        """``None`` at a root only."""
        self.chunks = chunks
        self.pages = pages
        self.marks = marks_after(parent.end_mark if parent else EMPTY_MARK, chunks) if marks is None else marks
        """For each page, the mark of the prefix that ends with it."""
        self.children: dict[Chunk, Node] = {}
        self.firsts = Fan()
        """The keys of ``children``, token by token."""
        self.lock_count = 0
        self.last_step: StepId = 0
        """Plans up to this step may read these pages."""
        self.born_ns = 0
        self.touched_ns = 0
        self.hits = 0
        """Requests that computed it or began with it."""
        self.priority = 0
        """The highest of theirs."""
        self.dropped = False
        """No longer in the tree: whoever still holds it as a path is late."""
        self.queued = False
        """Has an entry in the eviction queue, which alone writes this."""

    @property
    def page_count(self) -> int:
        return len(self.pages)

    @property
    def depth_pages(self) -> int:
        """Pages of the prefix that ends with this node."""
        return self.origin()[1]

    def origin(self) -> "tuple[Root, int]":
        """The root above, and the pages of the prefix that ends with this node."""
        node, depth = self, 0
        while node.parent is not None:
            depth += len(node.pages)
            node = node.parent
        if not isinstance(node, Root):
            raise InvariantBroken("a node hangs in the air")
        return node, depth

    @property
    def end_mark(self) -> Mark:
        """Of the prefix that ends with this node."""
        return self.marks[-1] if self.marks else EMPTY_MARK

    @property
    def is_evictable_leaf(self) -> bool:
        return not (self.lock_count or self.children or self.dropped or self.parent is None)

    def upward(self) -> "Iterator[Node]":
        """This node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def nearest_child(self, rest: Chunk) -> "tuple[Node, int] | None":
        """The child whose first page shares the longest beginning with ``rest``, and how many tokens that is.

        Exact, however many children there are; of several the one that was adopted first.
        """
        first = self.firsts.nearest(rest)
        return None if first is None else (self.children[first], common_tokens(first, rest))

    def adopt(self, child: "Node") -> None:
        child.parent = self
        self.children[child.chunks[0]] = child
        self.firsts.add(child.chunks[0])

    def disown(self, child: "Node") -> None:
        """``child`` leaves the tree for good."""
        del self.children[child.chunks[0]]
        self.firsts.remove(child.chunks[0])
        child.dropped = True

    def split(self, page_count: int) -> "Node":
        """The first ``page_count`` pages become a node of their own, which is returned.

        The lower part stays this object, so that paths that were handed out go on protecting all they did.
        """
        parent = self.parent
        if parent is None:
            raise ValueError("a root has no pages to split")
        upper = Node(parent, self.chunks[:page_count], self.pages[:page_count], self.marks[:page_count])
        upper.lock_count, upper.last_step, upper.touched_ns = self.lock_count, self.last_step, self.touched_ns
        upper.born_ns, upper.hits, upper.priority = self.born_ns, self.hits, self.priority
        parent.children[self.chunks[0]] = upper
        del self.chunks[:page_count], self.pages[:page_count], self.marks[:page_count]
        upper.adopt(self)
        return upper

    def cut_tail(self, page_count: int) -> tuple[list[PageId], tuple[Mark, ...]]:
        """Lose the last ``page_count`` pages; which they were, and their marks."""
        pages, marks = self.pages[-page_count:], tuple(self.marks[-page_count:])
        del self.pages[-page_count:], self.chunks[-page_count:], self.marks[-page_count:]
        return pages, marks


class Root(Node):
    """Where the prefixes of one namespace begin. It holds no page and needs no lock."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, [], [])
        self.namespace = namespace


def marks_after(mark: Mark, chunks: list[Chunk]) -> list[Mark]:
    """The marks of the prefixes that go on from one with ``mark``, page by page."""
    return list(accumulate(chunks, extend_mark, initial=mark))[1:]


def common_tokens(one: Chunk, other: Chunk) -> int:
    """Length of the common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def common_pages(own: list[Chunk], query: list[Chunk], start: int) -> int:
    """How many pages of ``own`` are found in ``query[start:]``, one after the other."""
    count = min(len(own), len(query) - start)
    if own[:count] == query[start : start + count]:
        return count
    return next(page for page in range(count) if own[page] != query[start + page])
