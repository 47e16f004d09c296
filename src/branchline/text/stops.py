"""Finds stop strings in text that arrives in pieces, and holds back no more than could still become one.

The match is the one a search of the whole text would find: the earliest beginning wins, of equal beginnings the
longest. So the answer does not depend on where the pieces were cut; while a longer or earlier stop may yet replace
one that was found, the characters that follow decide, or the end does.

An automaton after Aho and Corasick ("Efficient string matching: an aid to bibliographic search", CACM 1975) reads
each character once. The depth of its node is the length of the longest end of the text that begins a stop.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop at characters ``[start, end)`` of all the text fed or skipped."""

    stop: str
    start: int
    end: int


class StopMatcher:
    """One request's search. Once a match has been returned it is over."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._node = _automaton(stops)
        self._include_stop = include_stop
        self._position = 0
        """Characters fed or skipped."""
        self._held = ""
        """The last of them: not yet given back."""
        self._best: StopMatch | None = None
        """Found, but something better may still begin no later."""

    def skip(self, char_count: int) -> None:
        """So much text went by unsearched. Only before anything was fed."""
        self._position += char_count

    def feed(self, text: str) -> tuple[str, StopMatch | None]:
        """Text that is safe to show, and the match as soon as it is certain. Linear in ``text``."""
        known = self._held + text
        first = self._position - len(self._held)
        for char in text:
            self._node = _step(self._node, char)
            self._position += 1
            self._consider(self._node.found)
            if self._best is not None and self._position - self._node.open_depth > self._best.start:
                return self._end(known, first, self._best)
        safe = len(known) - self._node.depth
        self._held = known[safe:]
        return known[:safe], None

    def finish(self) -> tuple[str, StopMatch | None]:
        """No more text comes: what had been held back, and the match that nothing can replace any more."""
        held, self._held = self._held, ""
        if self._best is None:
            return held, None
        return self._end(held, self._position - len(held), self._best)

    def _consider(self, stop: str | None) -> None:
        """Every later find ends later, so one that begins no later than the best is earlier or longer."""
        if stop is not None and (self._best is None or self._position - len(stop) <= self._best.start):
            self._best = StopMatch(stop, self._position - len(stop), self._position)

    def _end(self, known: str, first: int, match: StopMatch) -> tuple[str, StopMatch]:
        cut = match.end if self._include_stop else match.start
        self._held = ""
        return known[: cut - first], match


class _Node:
    """The text read so far ends with the ``depth`` characters on the way here, and with no longer beginning of a stop."""

    __slots__ = ("depth", "fallback", "found", "next", "open_depth")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.next: dict[str, _Node] = {}
        self.fallback: _Node = self
        self.found: str | None = None
        """The longest stop that ends here."""
        self.open_depth = 0
        """Length of the longest unfinished stop."""


def _automaton(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.next.setdefault(char, _Node(node.depth + 1))
        node.found = stop
    queue = deque((root, char, child) for char, child in root.next.items())
    while queue:
        parent, char, child = queue.popleft()
        child.fallback = root if parent is root else _step(parent.fallback, char)
        child.found = child.found or child.fallback.found
        child.open_depth = child.depth if child.next else child.fallback.open_depth
        queue.extend((child, char, grandchild) for char, grandchild in child.next.items())
    return root


def _step(node: _Node, char: str) -> _Node:
    while char not in node.next and node.depth:
        node = node.fallback
    return node.next.get(char, node)
