"""When will a waiting request start? A rough simulation of rows, pages and prompt tokens, in steps.

Every running request is taken to use all its tokens, so the answer errs on the late side; requests yet to come are left
out, so under policies that let them pass it may err on the early one.

Knows: numbers. Refuses to know: sequences and time.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenure:
    """A running request, as far as it stands in the way of others."""

    remaining_tokens: int
    """Steps until it ends, at most."""
    pages: int
    """What is available once it has ended: pages, and pages that were kept for its output."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A waiting request, as far as it needs room."""

    uncached_tokens: int
    output_tokens: int
    pages: int
    """For its tokens and for the part of its output that memory is kept for."""


@dataclass(frozen=True, slots=True)
class Room:
    rows: int
    """Free now."""
    pages: int
    """Free now, beyond what is kept for running requests."""
    prefill_tokens: int
    """Tokens of running prompts still to be computed."""
    prefill_per_step: int
    """Budget that a step leaves to prompts, at least 1."""


def forecast(room: Room, running: Iterable[Tenure], line: Iterable[Wish]) -> list[int]:
    """Steps until each of ``line`` is admitted, in order. Whoever is alone gets everything, so everyone is some time."""
    ends = [(tenure.remaining_tokens, tenure.pages) for tenure in running]
    heapq.heapify(ends)
    rows, pages, step = room.rows, room.pages, 0
    prompts_done = room.prefill_tokens / room.prefill_per_step
    starts: list[int] = []
    for wish in line:
        while ends and (rows < 1 or pages < wish.pages):
            end, freed = heapq.heappop(ends)
            step, rows, pages = max(step, end), rows + 1, pages + freed
        step = max(step, int(prompts_done))
        prompts_done = max(prompts_done, step) + wish.uncached_tokens / room.prefill_per_step
        starts.append(step)
        rows, pages = rows - 1, pages - wish.pages
        heapq.heappush(ends, (int(prompts_done) + wish.output_tokens, wish.pages))
    return starts
