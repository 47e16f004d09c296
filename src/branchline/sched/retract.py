"""Whom to take off the slots: when memory runs short, or for the sake of somebody more important.

Knows: what it costs to compute a victim again. Refuses to know: how it is done (`Roster`, `KvBooks`).
"""

from collections.abc import Callable, Iterable

from branchline.base.ids import StepId
from branchline.sched.lifecycle import Seq


def equal(seq: Seq) -> int:
    """The precedence of those who know no difference."""
    return 0


def choose_victim(
    running: Iterable[Seq], page_size: int, step: StepId, precedence: Callable[[Seq], int] = equal
) -> Seq | None:
    """Of lowest precedence the cheapest to compute again per page it frees; at equal cost the one that arrived last.

    The oldest arrival of the highest precedence is never chosen: it always comes to its end, so that retraction cannot
    go round in circles. Nor is one that has a row in the plan ``step`` already: its pages would come back too late to
    help. ``None`` if there is no one else.
    """
    others = sorted(running, key=lambda seq: (-precedence(seq), seq.seq))[1:]
    candidates = [seq for seq in others if seq.last_step < step]
    return min(
        candidates,
        key=lambda seq: (precedence(seq), recompute_tokens_per_page(seq, page_size), -seq.seq),
        default=None,
    )


def recompute_tokens_per_page(seq: Seq, page_size: int) -> float:
    """Computed tokens that only this sequence holds, for each page that only it holds. Pages reserved for a prompt
    that is not computed yet are free of cost; a sequence that holds nothing of its own is the last to be chosen."""
    own_pages = len(seq.private_pages)
    own_tokens = max(0, seq.computed - seq.tree_pages * page_size)
    return own_tokens / own_pages if own_pages else float("inf")


def fewest_victims(candidates: list[Seq], is_enough: Callable[[list[Seq]], bool]) -> list[Seq]:
    """The shortest beginning of ``candidates`` that is enough; nobody if all of them together are not."""
    for count in range(1, len(candidates) + 1):
        if is_enough(candidates[:count]):
            return candidates[:count]
    return []
