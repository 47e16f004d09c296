"""Who is here: the waiting line, the running sequences in order of admission, and their slots.

Knows: membership, and that it changes together with the state of a sequence. Refuses to know: pages and reasons.
"""

import heapq
from collections.abc import Sequence

from branchline.base.errors import require
from branchline.base.ids import PageId, RequestId, SeqId
from branchline.core.ports import Path
from branchline.core.request import RequestSpec
from branchline.sched.lifecycle import Seq, State
from branchline.sched.queue import WaitingQueue


class Roster:
    def __init__(self, slot_count: int) -> None:
        self.slot_count = slot_count
        self.waiting = WaitingQueue()
        self.running: dict[SeqId, Seq] = {}
        self._by_request: dict[RequestId, Seq] = {}
        self._free_slots = list(range(slot_count))
        self._next_seq: SeqId = 1

    def __len__(self) -> int:
        return len(self._by_request)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def slots_used(self) -> int:
        return self.slot_count - len(self._free_slots)

    def find(self, request_id: RequestId) -> Seq | None:
        return self._by_request.get(request_id)

    def everyone(self) -> list[Seq]:
        return list(self._by_request.values())

    def arrive(self, spec: RequestSpec, now_ns: int) -> Seq:
        require(spec.request_id not in self._by_request, "a live request id arrived twice")
        seq = Seq(self._next_seq, spec, now_ns)
        self._next_seq += 1
        self._by_request[spec.request_id] = seq
        self.waiting.push(seq)
        return seq

    def admit(
        self, seq: Seq, path: Path, shared: Sequence[PageId], private: Sequence[PageId], cached_tokens: int, now_ns: int
    ) -> None:
        self.waiting.remove(seq)
        seq.admit(heapq.heappop(self._free_slots), path, shared, private, cached_tokens, now_ns)
        self.running[seq.seq] = seq

    def retract(self, seq: Seq, now_ns: int) -> None:
        self._vacate(seq)
        seq.retract(now_ns)
        self.waiting.push_front(seq)

    def finish(self, seq: Seq) -> None:
        """A sequence goes for good. Its pages must have been let go before."""
        if seq.state is State.WAITING:
            self.waiting.remove(seq)
        else:
            self._vacate(seq)
        seq.finish()
        del self._by_request[seq.spec.request_id]

    def _vacate(self, seq: Seq) -> None:
        # The slot may be taken over at once: workers execute plans in order, so the rows of steps in flight
        # come before the SlotOpen of the next tenant.
        del self.running[seq.seq]
        if seq.slot is not None:
            heapq.heappush(self._free_slots, seq.slot)

    def check(self) -> None:
        slots = [seq.slot for seq in self.running.values()]
        require(None not in slots, "every running sequence has a slot")
        require(sorted([*self._free_slots, *(s for s in slots if s is not None)]) == list(range(self.slot_count)),
                "every slot is free or belongs to one running sequence")  # fmt: skip
        require(len(self._by_request) == len(self.waiting) + len(self.running), "everyone waits or runs")
        require(all(seq.state is State.WAITING for seq in self.waiting), "the queue holds waiting sequences only")
        require(all(seq.state is State.RUNNING for seq in self.running.values()), "running sequences are RUNNING")
