"""The first pages of a node's children, token by token: which of them begins most like a page that diverges?

Tokens are compared for equality only, never for size, and ties go to the page that was added first. So a tree over secret
names of tokens makes the same choices as the tree over the tokens themselves: a journal need not hold any text to be
replayed exactly.

    (a b c d) (a b x y) (q r s t)      {a: {b: {c: (a b c d), x: (a b x y)}}, q: (q r s t)}

Knows: pages of tokens. Refuses to know: nodes.
"""

from collections.abc import Iterator
from typing import TypeAlias

from branchline.base.errors import InvariantBroken, require
from branchline.base.ids import TokenId

Chunk: TypeAlias = tuple[TokenId, ...]
"""The tokens of one whole page."""

Branch: TypeAlias = "dict[TokenId, Branch | Chunk]"
"""A page stands at the first token that it shares with no other."""


class Fan:
    """A set of pages of one length. All verbs take a step per token at most, however many pages there are."""

    __slots__ = ("_top",)

    def __init__(self) -> None:
        self._top: Branch = {}

    def __iter__(self) -> Iterator[Chunk]:
        waiting = [self._top]
        while waiting:
            for entry in waiting.pop().values():
                if isinstance(entry, tuple):
                    yield entry
                else:
                    waiting.append(entry)

    def nearest(self, rest: Chunk) -> Chunk | None:
        """The page that shares the longest beginning with ``rest``, the oldest of several; ``None`` if none does."""
        branch = self._top
        for token in rest:
            entry = branch.get(token)
            if isinstance(entry, tuple):
                return entry
            if entry is None:
                break
            branch = entry
        return None if branch is self._top else _oldest(branch)

    def add(self, page: Chunk) -> None:
        """Raises InvariantBroken: it is here already."""
        branch, depth = self._top, 0
        while isinstance(entry := branch.get(page[depth]), dict):
            branch, depth = entry, depth + 1
        require(entry != page, "a page stands among the children already")
        while entry is not None:  # shared so far: both go deeper until they part
            branch[page[depth]] = branch = {entry[depth + 1]: entry}
            depth += 1
            if page[depth] != entry[depth]:
                break
        branch[page[depth]] = page

    def remove(self, page: Chunk) -> None:
        """Raises InvariantBroken: it is not here."""
        branch, above = self._top, list[Branch]()
        while isinstance(entry := branch.get(page[len(above)]), dict):
            above.append(branch)
            branch = entry
        require(entry == page, "a page is missing among the children")
        del branch[page[len(above)]]
        while above and len(branch) == 1:  # what is left alone moves up to where it parts from the others
            (alone,) = branch.values()
            if not isinstance(alone, tuple):
                return
            branch = above.pop()
            branch[page[len(above)]] = alone

    def check(self) -> None:
        """Every page stands where it is looked for, and no deeper. Raises InvariantBroken."""
        waiting: list[tuple[Branch, Chunk]] = [(self._top, ())]
        while waiting:
            branch, prefix = waiting.pop()
            for token, entry in branch.items():
                if isinstance(entry, dict):
                    waiting.append((entry, (*prefix, token)))
                elif entry[: len(prefix) + 1] != (*prefix, token):
                    raise InvariantBroken("a page stands where it does not belong")
            alone = len(branch) == 1 and isinstance(next(iter(branch.values())), tuple)
            require(branch is self._top or (bool(branch) and not alone), "a page stands deeper than it must")


def _oldest(branch: Branch) -> Chunk:
    entry: Branch | Chunk = branch
    while isinstance(entry, dict):
        entry = next(iter(entry.values()))
    return entry
