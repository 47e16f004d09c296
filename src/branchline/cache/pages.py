"""The page ledger: each KV page has exactly one owner at any time.

Knows: page numbers, owners and the step up to which plans may still read a page. Refuses to know: tokens, prefixes,
bytes.

                       reserve                     give_to_tree
        free ----------------------> private(owner) ------------> tree
         ^ ^                              | release                 | release_tree
         | +------- last_step settled ----+-------------------------+
         |                                | last_step not settled   |
         +---- settle(step) ------ retired(until) <-----------------+

Every verb checks first and changes afterwards, so that a refused call leaves no trace. The order of reuse is
deterministic: a stack, so that pages that were used last (and are still warm) come back first.
"""

import enum
import heapq
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from branchline.base.errors import InvariantBroken, require
from branchline.base.ids import PageId, SeqId, StepId

_NO_PAGES: AbstractSet[PageId] = frozenset()


class PageKind(enum.Enum):
    FREE = "free"
    PRIVATE = "private"
    TREE = "tree"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True)
class PageState:
    """Where one page is in its life."""

    kind: PageKind
    owner: SeqId | None = None
    """Of a private page."""
    until: StepId | None = None
    """Of a retired page: it becomes free when this step is settled."""


_FREE = PageState(PageKind.FREE)
_TREE = PageState(PageKind.TREE)


class PageLedger:
    """The :class:`~branchline.core.ports.Ledger`. A verb costs O(pages it names), ``settle`` O(pages it frees)."""

    def __init__(self, page_count: int) -> None:
        require(page_count > 0, f"a ledger needs at least one page, not {page_count}")
        self._states = [_FREE] * page_count
        self._free: list[PageId] = list(range(page_count - 1, -1, -1))
        self._private: dict[SeqId, set[PageId]] = {}
        self._private_count = 0
        self._tree_count = 0
        self._retired: dict[StepId, list[PageId]] = {}
        self._retired_count = 0
        self._retired_steps: list[StepId] = []
        """Heap of the keys of ``_retired``."""
        self._settled: StepId = 0

    # ------------------------------------------------------------ questions

    @property
    def page_count(self) -> int:
        return len(self._states)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def private_pages(self) -> int:
        return self._private_count

    @property
    def tree_pages(self) -> int:
        return self._tree_count

    @property
    def retired_pages(self) -> int:
        return self._retired_count

    @property
    def settled_step(self) -> StepId:
        """Every plan up to this one has been committed; 0 before the first."""
        return self._settled

    def state_of(self, page: PageId) -> PageState:
        """Raises InvariantBroken: there is no such page."""
        require(0 <= page < len(self._states), f"there is no page {page}")
        return self._states[page]

    def pages_of(self, owner: SeqId) -> frozenset[PageId]:
        """Private pages of ``owner``: linear in their number."""
        return frozenset(self._private.get(owner, _NO_PAGES))

    # ------------------------------------------------------------ verbs

    def reserve(self, owner: SeqId, count: int) -> tuple[PageId, ...] | None:
        """``count`` free pages become private to ``owner``; ``None`` and no change if there are not so many."""
        require(count >= 0, f"{count} pages cannot be reserved")
        if count > len(self._free):
            return None
        if count == 0:
            return ()
        pages = tuple(reversed(self._free[-count:]))
        del self._free[-count:]
        self._mark(pages, PageState(PageKind.PRIVATE, owner=owner))
        self._private.setdefault(owner, set()).update(pages)
        self._private_count += count
        return pages

    def give_to_tree(self, owner: SeqId, pages: Sequence[PageId]) -> None:
        """Private pages of ``owner`` become the tree's.

        Raises:
            InvariantBroken: one of them is not private to ``owner``, or is named twice. Nothing has changed then.
        """
        self._take_private(owner, pages)
        self._mark(pages, _TREE)
        self._tree_count += len(pages)

    def release(self, owner: SeqId, pages: Sequence[PageId], last_step: StepId) -> None:
        """Private pages of ``owner`` become free, once every plan up to ``last_step`` has been committed.

        Raises:
            InvariantBroken: one of them is not private to ``owner``, or is named twice. Nothing has changed then.
        """
        self._take_private(owner, pages)
        self._retire(pages, last_step)

    def release_tree(self, pages: Sequence[PageId], last_step: StepId) -> None:
        """Pages of the tree become free, once every plan up to ``last_step`` has been committed.

        Raises:
            InvariantBroken: one of them is not the tree's, or is named twice. Nothing has changed then.
        """
        strangers = [page for page in pages if self.state_of(page).kind is not PageKind.TREE]
        require(not strangers and len(set(pages)) == len(pages), f"not pages of the tree, or named twice: {list(pages)}")
        self._tree_count -= len(pages)
        self._retire(pages, last_step)

    def settle(self, step: StepId) -> None:
        """Every plan up to ``step`` has been committed: pages retired until then become free."""
        self._settled = max(self._settled, step)
        while self._retired_steps and self._retired_steps[0] <= self._settled:
            pages = self._retired.pop(heapq.heappop(self._retired_steps))
            self._retired_count -= len(pages)
            self._make_free(pages)

    # ------------------------------------------------------------ proof

    def check(self) -> None:
        """Recompute everything from the list of states. Raises InvariantBroken."""
        kinds = Counter(state.kind for state in self._states)
        counted = (len(self._free), self._private_count, self._tree_count, self._retired_count)
        require(counted == tuple(kinds[kind] for kind in PageKind), f"counters {counted} do not fit the states {kinds}")
        require(len(set(self._free)) == len(self._free), "a page is free twice")
        require(all(self._states[page] is _FREE for page in self._free), "a page in the free list is not free")
        self._check_private()
        self._check_retired()

    def _check_private(self) -> None:
        require(all(self._private.values()), "an owner without pages is remembered")
        require(sum(map(len, self._private.values())) == self._private_count, "private pages are counted wrongly")
        for owner, pages in self._private.items():
            for page in pages:
                state = self._states[page]
                require(state.kind is PageKind.PRIVATE and state.owner == owner, f"page {page} does not belong to {owner}")

    def _check_retired(self) -> None:
        require(sorted(self._retired_steps) == sorted(self._retired), "the queue of retired steps has gaps or repeats")
        named = [page for pages in self._retired.values() for page in pages]
        require(len(named) == len(set(named)) == self._retired_count, "a page is retired twice")
        for step, pages in self._retired.items():
            require(step > self._settled, f"pages retired until step {step} were forgotten")
            for page in pages:
                state = self._states[page]
                require(state.kind is PageKind.RETIRED and state.until == step, f"page {page} does not wait for {step}")

    # ------------------------------------------------------------ inner

    def _take_private(self, owner: SeqId, pages: Sequence[PageId]) -> None:
        owned = self._private.get(owner, set())
        named = set(pages)
        if len(named) != len(pages) or not named <= owned:
            raise InvariantBroken(f"not private to {owner}, or named twice: {sorted(named - owned) or list(pages)}")
        owned -= named
        self._private_count -= len(named)
        if not owned:
            self._private.pop(owner, None)

    def _retire(self, pages: Sequence[PageId], last_step: StepId) -> None:
        if last_step <= self._settled:
            self._make_free(pages)
            return
        if not pages:
            return
        if last_step not in self._retired:
            self._retired[last_step] = []
            heapq.heappush(self._retired_steps, last_step)
        self._retired[last_step].extend(pages)
        self._retired_count += len(pages)
        self._mark(pages, PageState(PageKind.RETIRED, until=last_step))

    def _make_free(self, pages: Sequence[PageId]) -> None:
        self._mark(pages, _FREE)
        self._free.extend(reversed(pages))

    def _mark(self, pages: Sequence[PageId], state: PageState) -> None:
        for page in pages:
            self._states[page] = state
