"""The cache that remembers nothing: every request computes its whole prompt and keeps its own pages.

Knows: how to say no in the words of the port. Refuses to know: tokens.
"""

from collections.abc import Sequence

from branchline.base.errors import require
from branchline.base.ids import PageId, SeqId, StepId, TokenId
from branchline.core.explain import EMPTY_MARK, TreeNode
from branchline.core.ports import Dropped, Insertion, Ledger, Match, Path, Trace
from branchline.core.request import Namespace


class Nowhere:
    """The only path there is. Locking it protects nothing, since nothing is held."""


_NOWHERE = Nowhere()


class NullCache:
    """The :class:`~branchline.core.ports.PrefixCache` without sharing. Its version never changes: no match ever does."""

    def __init__(self, ledger: Ledger, page_size: int) -> None:
        require(page_size > 0, f"a page holds at least one token, not {page_size}")
        self.page_size = page_size
        self._ledger = ledger

    @property
    def page_count(self) -> int:
        return 0

    @property
    def evictable_pages(self) -> int:
        return 0

    @property
    def locked_nodes(self) -> int:
        return 0

    @property
    def version(self) -> int:
        return 0

    def match(self, namespace: Namespace, tokens: Sequence[TokenId], limit: int) -> Match:
        return Match(_NOWHERE, (), None, self.page_size)

    def cut(self, match: Match) -> Path:
        return match.path

    def lock(self, path: Path, now_ns: int) -> None:
        pass

    def unlock(self, path: Path, last_step: StepId) -> None:
        pass

    def use(self, path: Path, priority: int) -> None:
        pass

    def pages_freed_by(self, paths: Sequence[Path]) -> int:
        return 0

    def insert(
        self,
        namespace: Namespace,
        tokens: Sequence[TokenId],
        pages: Sequence[PageId],
        owner: SeqId,
        now_ns: int,
        priority: int = 0,
    ) -> Insertion:
        """Takes no page: all of them stay ``owner``'s, none is a duplicate."""
        return Insertion(_NOWHERE, (), ())

    def evict(self, page_count: int) -> int:
        return 0

    def reset(self) -> int:
        return 0

    @property
    def dropped(self) -> Sequence[Dropped]:
        return ()

    def trace(self, namespace: Namespace, tokens: Sequence[TokenId], match: Match) -> Trace:
        return Trace(EMPTY_MARK, continues=False, is_elsewhere=False)

    def outline(self, node_count: int) -> tuple[TreeNode, ...]:
        return ()

    def check_locks(self, paths: Sequence[Path]) -> None:
        """Nothing is held, so nothing is locked."""

    def check(self) -> None:
        """Raises InvariantBroken: somebody gave pages to a tree that does not exist."""
        require(self._ledger.tree_pages == 0, f"{self._ledger.tree_pages} pages belong to a tree that does not exist")
