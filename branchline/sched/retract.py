"""Whom to take off the slots when memory runs short.

Knows: what it costs to compute a victim again. Refuses to know: how it is done (`Roster`, `KvBooks`).
"""

from collections.abc import Iterable

from branchline.base.ids import StepId
from branchline.sched.lifecycle import Seq


def choose_victim(running: Iterable[Seq], page_size: int, step: StepId) -> Seq | None:
    """The cheapest to compute again per page it frees; at equal cost the one that arrived last.

    The oldest arrival is never chosen: it always comes to its end, so that retraction cannot go round in circles.
    Nor is one that has a row in the plan ``step`` already: its pages would come back too late to help.
    ``None`` if there is no one else.
    """
    candidates = [seq for seq in sorted(running, key=lambda seq: seq.seq)[1:] if seq.last_step < step]
    return min(candidates, key=lambda seq: (recompute_tokens_per_page(seq, page_size), -seq.seq), default=None)


def recompute_tokens_per_page(seq: Seq, page_size: int) -> float:
    """Computed tokens that only this sequence holds, for each page that only it holds. Pages reserved for a prompt
    that is not computed yet are free of cost; a sequence that holds nothing of its own is the last to be chosen."""
    own_pages = len(seq.private_pages)
    own_tokens = max(0, seq.computed - seq.tree_pages * page_size)
    return own_tokens / own_pages if own_pages else float("inf")
