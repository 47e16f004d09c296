"""The ledger and the prefix cache, used together: pages are taken, shared and let go here and nowhere else.

Knows: which pages a sequence holds and when they may be reused. Refuses to know: why one is taken or let go.
"""

from collections.abc import Sequence

from branchline.base.errors import require
from branchline.base.ids import PageId
from branchline.core.ports import Ledger, Match, PrefixCache
from branchline.sched.lifecycle import Seq
from branchline.sched.notes import Notes


class KvBooks:
    def __init__(self, ledger: Ledger, cache: PrefixCache, notes: Notes) -> None:
        self.ledger = ledger
        self.cache = cache
        self._notes = notes
        self.page_size = cache.page_size
        self.evicted_pages = 0

    def pages_for(self, token_count: int) -> int:
        return -(-token_count // self.page_size)

    @property
    def available_pages(self) -> int:
        """Free now, or free as soon as unlocked content is dropped."""
        return self.ledger.free_pages + self.cache.evictable_pages

    def match(self, seq: Seq) -> Match:
        return self.cache.match(seq.spec.namespace, seq.tokens, seq.match_limit)

    def pages_freed_by(self, sequences: Sequence[Seq]) -> int:
        """Pages that running sequences would make available if all of them left."""
        paths = [seq.path for seq in sequences if seq.path is not None]
        return sum(len(seq.private_pages) for seq in sequences) + self.cache.pages_freed_by(paths)

    def take(self, seq: Seq, count: int) -> tuple[PageId, ...] | None:
        """All of ``count`` pages, dropping unlocked content if it must; or none, and then some may have been dropped."""
        shortage = count - self.ledger.free_pages
        if shortage > self.cache.evictable_pages:
            return None
        if shortage > 0:
            self.evicted_pages += self.cache.evict(shortage)
            self._notes.dropped(seq.spec.request_id, self.cache.dropped)
        return self.ledger.reserve(seq.seq, count)

    def flush(self) -> None:
        """Empty the cache. Nothing may run."""
        self.cache.reset()
        self._notes.dropped("", self.cache.dropped)

    def share(self, seq: Seq, now_ns: int) -> None:
        """Give the whole committed pages of a running sequence to the cache, so that others hit them at once."""
        count = seq.computed // self.page_size
        if count <= seq.tree_pages:
            return
        tokens = seq.tokens[: count * self.page_size]
        insertion = self.cache.insert(seq.spec.namespace, tokens, seq.page_table[:count], seq.seq, now_ns, seq.spec.priority)
        if not insertion.pages:
            return
        self.cache.lock(insertion.path, now_ns)
        if seq.path is not None:
            self.cache.unlock(seq.path, seq.last_step)
        self.ledger.release(seq.seq, insertion.duplicates, seq.last_step)
        seq.share(insertion)

    def let_go(self, seq: Seq, now_ns: int, *, keep: bool) -> int:
        """A running sequence leaves its slot: its whole pages become evictable content (if ``keep``), the rest is
        released. Returns the number of pages it no longer holds."""
        if keep:
            self.share(seq, now_ns)
        self.ledger.release(seq.seq, seq.private_pages, seq.last_step)
        require(seq.path is not None, "a running sequence holds a path")
        if seq.path is not None:
            self.cache.unlock(seq.path, seq.last_step)
        return len(seq.page_table)
