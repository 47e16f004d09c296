"""Prefixes that an operator keeps in the cache for a while, whatever eviction would do: locks with a deadline.

Knows: what is pinned and until when. Refuses to know: why. Pins are a wish, not a promise: they give way when the head of
the line could never run beside them (``release_all``), and they may hold only a limited share of the pages.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from branchline.base.ids import PageId, TokenId
from branchline.core.ports import Path
from branchline.core.request import Namespace
from branchline.sched.kv import KvBooks


@dataclass(frozen=True, slots=True)
class Pin:
    path: Path
    until_ns: int


class Pins:
    def __init__(self, kv: KvBooks, share: float) -> None:
        self._kv = kv
        self._limit_pages = int(share * kv.ledger.page_count)
        self._pins: dict[tuple[PageId, ...], Pin] = {}
        """By the pages of the prefix: no other prefix can have them while they are locked."""
        self._holders: Counter[PageId] = Counter()
        """How many pins hold each page; those that none holds are left out."""

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def page_count(self) -> int:
        return len(self._holders)

    @property
    def paths(self) -> list[Path]:
        """One per lock, for proofs."""
        return [pin.path for pin in self._pins.values()]

    def pin(self, namespace: Namespace, tokens: Sequence[TokenId], until_ns: int, now_ns: int) -> tuple[int, str]:
        """Keep what is cached of ``tokens`` (whole pages) until then; in place of an earlier pin of the same prefix.
        Returns how many tokens are pinned now and, if none, a sentence that says why."""
        cache = self._kv.cache
        pages = cache.match(namespace, tokens, len(tokens)).pages
        if not pages:
            return 0, "Nothing of this prompt is cached (or less than a page): generate from it first."
        self._drop(pages)
        if until_ns <= now_ns:
            return 0, "The pin is removed."
        if len(self._holders.keys() | set(pages)) > self._limit_pages:
            return 0, (
                f"Pins may hold {self._limit_pages} KV pages; {self.page_count} are pinned and this prefix has {len(pages)}."
            )
        # Nothing is new in this insertion: it only cuts the node where the prefix ends, so that no page more is locked.
        path = cache.insert(namespace, tokens[: len(pages) * self._kv.page_size], pages, 0, now_ns).path
        cache.lock(path, now_ns)
        self._pins[pages] = Pin(path, until_ns)
        self._holders.update(pages)
        return len(pages) * self._kv.page_size, ""

    def expire(self, now_ns: int) -> None:
        for pages in [pages for pages, pin in self._pins.items() if pin.until_ns <= now_ns]:
            self._drop(pages)

    def release_all(self) -> bool:
        """Give everything back; False if nothing was pinned."""
        had_pins = bool(self._pins)
        for pages in list(self._pins):
            self._drop(pages)
        return had_pins

    def _drop(self, pages: tuple[PageId, ...]) -> None:
        pin = self._pins.pop(pages, None)
        if pin is not None:
            self._kv.cache.unlock(pin.path, 0)
            self._holders.subtract(pages)
            self._holders = +self._holders
