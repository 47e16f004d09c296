"""The doors of the core: what the scheduler and the loop need from outside, as protocols.

Each has several rivals behind it and one test-suite that tries them all. Knows: signatures and promises.
Refuses to know: arrays, sockets, files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from branchline.base.ids import PageId, SeqId, StepId, TokenId
from branchline.core.events import Event
from branchline.core.explain import Mark, TreeNode
from branchline.core.plan import StepPlan
from branchline.core.request import Namespace
from branchline.core.result import StepResult


class Ticket(Protocol):
    """Stands for a launched plan; only the worker that gave it understands it."""

    @property
    def step(self) -> StepId: ...


class Worker(Protocol):
    """Executes plans in the order in which they were launched."""

    def launch(self, plan: StepPlan) -> Ticket:
        """Start a step and return at once. The plan is not kept longer than the step."""

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step. Tickets are collected in launch order.

        Raises:
            StepFailed: the step as a whole failed. Rows of later steps are unaffected, but for those of the same
                sequences: they get an error of their own.
        """

    def close(self) -> None:
        """Let go of threads and memory. Idempotent."""


class Observer(Protocol):
    def notice(self, event: Event) -> None:
        """Must be quick and must not raise."""


class Path(Protocol):
    """A place in a prefix cache, handed out by ``match`` and ``insert``. Opaque: hold it, lock it, give it back."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The common beginning of a page that diverges: copy it, then compute the rest."""

    page: PageId
    token_count: int
    """``1 <= token_count < page_size``."""
    path: Path


@dataclass(frozen=True, slots=True)
class Match:
    """Longest cached prefix, whole pages first."""

    path: Path
    """Deepest node of which at least one page matched; the root if none did."""
    pages: tuple[PageId, ...]
    tail: Tail | None
    page_size: int

    @property
    def page_tokens(self) -> int:
        return len(self.pages) * self.page_size

    @property
    def token_count(self) -> int:
        """Tokens that need not be computed."""
        return self.page_tokens + (self.tail.token_count if self.tail else 0)


@dataclass(frozen=True, slots=True)
class Insertion:
    path: Path
    """Node that ends the inserted pages; the root if there was no whole page."""
    pages: tuple[PageId, ...]
    """The cache's own pages for the inserted prefix: use these from now on."""
    duplicates: tuple[PageId, ...]
    """Pages of the owner whose content the cache had already: still the owner's, to be released by it."""


class Trace(msgspec.Struct, frozen=True, gc=False):
    """What a cache knows about the place where a match ended."""

    mark: Mark
    """Of the whole pages that matched."""
    continues: bool
    """Something else goes on from there."""
    is_elsewhere: bool
    """One page more is cached in another namespace."""


class Dropped(msgspec.Struct, frozen=True, gc=False):
    """Pages from the end of one cached prefix that were evicted together."""

    namespace: Namespace
    marks: tuple[Mark, ...]
    """Of the prefixes that ended with these pages, shortest first."""
    length_pages: int
    """Of the longest of these prefixes."""
    touched_ns: int
    """When it was last used."""


class PrefixCache(Protocol):
    """Which pages hold the KV of which token prefix. Integers only; the bytes live in ``memory``.

    ``match`` never changes anything. Locks are by path: a lock on a node protects it and all its ancestors.
    """

    page_size: int

    def match(self, namespace: Namespace, tokens: Sequence[TokenId], limit: int) -> Match:
        """Longest cached prefix of ``tokens[:limit]``. Read-only: no split, no time stamp."""

    def cut(self, match: Match) -> Path:
        """The path that ends exactly with the whole pages of ``match``: whoever locks it protects no page that it does
        not use. What is cached, and what matches, stays as it is."""

    def lock(self, path: Path, now_ns: int) -> None:
        """Protect a path from eviction and mark it as used."""

    def unlock(self, path: Path, last_step: StepId) -> None:
        """Give one lock back. Plans up to ``last_step`` may still read these pages."""

    def use(self, path: Path, priority: int) -> None:
        """A request of this priority begins with this path: what eviction orders may count."""

    def pages_freed_by(self, paths: Sequence[Path]) -> int:
        """Pages that would be evictable if one lock on each of ``paths`` were given back."""

    def insert(
        self,
        namespace: Namespace,
        tokens: Sequence[TokenId],
        pages: Sequence[PageId],
        owner: SeqId,
        now_ns: int,
        priority: int = 0,
    ) -> Insertion:
        """Remember the whole pages of ``tokens``. Pages new to the cache pass from ``owner`` to the cache; they have
        been used once, by a request of this ``priority``."""

    def evict(self, page_count: int) -> int:
        """Drop unlocked pages, least worth keeping first. Returns how many were dropped (at most ``page_count``);
        dropped pages become free at once, or when the last plan that reads them is committed."""

    def reset(self) -> int:
        """Drop everything; returns the number of pages dropped. Only legal while nothing is locked."""

    @property
    def dropped(self) -> Sequence[Dropped]:
        """What the last ``evict`` or ``reset`` dropped, in order."""

    def trace(self, namespace: Namespace, tokens: Sequence[TokenId], match: Match) -> Trace:
        """Evidence of why ``match`` did not go further along ``tokens``; its path must have been cut. Read-only, O(1)."""

    def outline(self, node_count: int) -> tuple[TreeNode, ...]:
        """The top of the cache, a root per namespace, about ``node_count`` nodes in all. For people: not cheap."""

    @property
    def page_count(self) -> int: ...

    @property
    def evictable_pages(self) -> int: ...

    @property
    def locked_nodes(self) -> int: ...

    @property
    def version(self) -> int:
        """Grows with every insert, eviction and reset: a match may be kept while it is unchanged."""

    def check(self) -> None:
        """Prove every invariant of the structure. Raises InvariantBroken."""

    def check_locks(self, paths: Sequence[Path]) -> None:
        """Prove that whoever holds ``paths`` (one entry per lock), and nobody else, locks anything here.
        Raises InvariantBroken."""


class Ledger(Protocol):
    """Who owns each page. Reservations are all or nothing, so that using a page can never fail."""

    @property
    def page_count(self) -> int: ...
    @property
    def free_pages(self) -> int: ...
    @property
    def private_pages(self) -> int: ...
    @property
    def tree_pages(self) -> int: ...
    @property
    def retired_pages(self) -> int: ...

    def reserve(self, owner: SeqId, count: int) -> tuple[PageId, ...] | None:
        """``count`` free pages become private to ``owner``; ``None`` and no change if there are not so many."""

    def give_to_tree(self, owner: SeqId, pages: Sequence[PageId]) -> None:
        """Private pages of ``owner`` become the tree's."""

    def release(self, owner: SeqId, pages: Sequence[PageId], last_step: StepId) -> None:
        """Private pages of ``owner`` become free, once every plan up to ``last_step`` has been committed."""

    def release_tree(self, pages: Sequence[PageId], last_step: StepId) -> None:
        """The same for pages of the tree."""

    def settle(self, step: StepId) -> None:
        """Every plan up to ``step`` has been committed."""

    def pages_of(self, owner: SeqId) -> frozenset[PageId]:
        """Private pages of ``owner`` (an audit question: linear in their number)."""

    def check(self) -> None: ...
