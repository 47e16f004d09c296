"""The waiting line, in arrival order; retracted sequences stand before everyone who has not run yet.

Knows: membership and arrival order. Refuses to know: who goes first (``policy``) and who fits (``admission``).
"""

from collections.abc import Iterator

from branchline.base.errors import require
from branchline.base.ids import SeqId
from branchline.sched.lifecycle import Seq


class WaitingQueue:
    def __init__(self) -> None:
        self._requeued: dict[SeqId, Seq] = {}
        self._arrived: dict[SeqId, Seq] = {}
        self._prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._requeued) + len(self._arrived)

    def __iter__(self) -> Iterator[Seq]:
        """Requeued work first (oldest arrival first), then arrivals."""
        yield from sorted(self._requeued.values(), key=lambda seq: seq.seq)
        yield from self._arrived.values()

    @property
    def prompt_tokens(self) -> int:
        """Of the arrivals; retracted work is not counted."""
        return self._prompt_tokens

    def push(self, seq: Seq) -> None:
        self._arrived[seq.seq] = seq
        self._prompt_tokens += seq.prompt_count

    def push_front(self, seq: Seq) -> None:
        """Take back a retracted sequence. No limit applies to it."""
        self._requeued[seq.seq] = seq

    def remove(self, seq: Seq) -> None:
        found = self._requeued.pop(seq.seq, None)
        if found is None:
            found = self._arrived.pop(seq.seq, None)
            self._prompt_tokens -= seq.prompt_count
        require(found is seq, "only a waiting sequence can leave the queue")
