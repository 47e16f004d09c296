"""What one step shall do: a value, complete at birth, decided by the scheduler and obeyed by the worker.

A worker keeps the known tokens of each slot (given by :class:`SlotOpen`, extended by its own sampling), therefore a
row is only numbers. The token a decode row starts with may not be known to the scheduler yet: the worker sampled it
in the step before. That is the whole future map of the overlap loop.

    row r computes positions [start, start + count) of its slot, reads KV [0, start) through `pages`,
    writes KV [start, start + count), and samples the token of position start + count if `sample`.
"""

import msgspec

from branchline.base.ids import Epoch, PageId, SeqId, Slot, StepId, TokenId
from branchline.core.request import SamplingParams


class SlotOpen(msgspec.Struct, frozen=True, array_like=True):
    """A sequence enters a slot: everything the worker must know about it until it leaves.

    A slot is simply taken over by the next ``SlotOpen`` with the same number; there is no close.
    """

    slot: Slot
    seq: SeqId
    epoch: Epoch
    tokens: tuple[TokenId, ...]
    """Prompt and, after a retraction, the output tokens kept so far."""
    prompt_count: int
    """How many of ``tokens`` are prompt: penalties and ``min_tokens`` count from here."""
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[TokenId, ...]
    """Masked while fewer than ``sampling.min_tokens`` tokens were generated."""


class PlanRow(msgspec.Struct, frozen=True, array_like=True):
    slot: Slot
    seq: SeqId
    epoch: Epoch
    start: int
    """First position to compute; KV of all positions before it lies in ``pages``."""
    count: int
    """Positions to compute, at least 1."""
    sample: bool
    """Sample the token that follows the last position."""
    pages: tuple[PageId, ...]
    """Page table: page ``i`` holds positions ``[i * page_size, (i + 1) * page_size)``. Covers at least ``start + count``."""
    prompt_logprobs_from: int | None = None
    """Report log probabilities of the prompt tokens at positions ``[this, start + count]`` known to the slot."""

    @property
    def end(self) -> int:
        return self.start + self.count


class PageCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy the first ``token_count`` positions of a page, before the rows run. Makes sharing exact to the token."""

    source: PageId
    target: PageId
    token_count: int


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    step: StepId
    rows: tuple[PlanRow, ...]
    """At least one; no two of the same slot."""
    opens: tuple[SlotOpen, ...] = ()
    copies: tuple[PageCopy, ...] = ()

    @property
    def token_count(self) -> int:
        return sum(row.count for row in self.rows)
