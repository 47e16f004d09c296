"""What a worker remembers of each sequence: its tokens and how to choose the next one.

    [0, known)          tokens whose value is here
    [known, expected)   tokens that launched steps will sample: a place, a source, and zero until the step is collected

Only the thread that launches and collects steps comes here. Knows: tokens, sampling parameters, identity.
Refuses to know: plans as a whole, arrays of a step, how a choice is made.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from branchline.base.errors import StepFailed
from branchline.base.ids import PageId, Slot, TokenId
from branchline.core.plan import PlanRow, SlotOpen
from branchline.memory.kv import IntArray
from branchline.ops.batch import Outcome

NONE: IntArray = np.zeros(0, np.intp)
"""No tokens."""
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
COUNTS = ("top_k", "logprobs", "prompt_count")
"""Sampling columns that stay the same while a sequence runs."""


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was computed."""

    outcome: Outcome
    duration_ns: int


@dataclass(frozen=True, slots=True)
class Source:
    """Where a token will come from."""

    step: Future[Done]
    index: int
    """Among the choices of that step."""


class Sequence:
    """The tenant of a slot. Tokens only grow; the runner alone adds them."""

    def __init__(self, opening: SlotOpen, *, vocab_size: int, token_limit: int, page_count: int) -> None:
        """``vocab_size``: ids that have an embedding; ``token_limit``: ids that can be drawn."""
        self.seq = opening.seq
        self.epoch = opening.epoch
        self.prompt_count = opening.prompt_count
        params = opening.sampling
        self.sampling = params
        self.numbers: tuple[float, ...] = tuple(getattr(params, name) for name in NUMBERS)
        self.counts = params.top_k, -1 if params.logprobs is None else params.logprobs, opening.prompt_count
        self.seed = opening.seed
        # Ids that can never be drawn need no mask and no bias.
        self._stop_ids = np.array([token for token in opening.stop_ids if token < token_limit], np.intp)
        bias = [(token, value) for token, value in params.logit_bias if token < token_limit]
        self.bias_ids = np.array([token for token, _ in bias], np.intp)
        self.bias_values = np.array([value for _, value in bias], np.float32)
        self.is_penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        self.failure: str | None = None
        """Why nothing more can be computed for this sequence; safe to show."""
        self._buffer: IntArray = np.array(opening.tokens, np.intp)
        self._known = len(self._buffer)
        self._sources: deque[Source] = deque()
        self._page_count = page_count
        self._pages: tuple[PageId, ...] = ()
        self._page_array = NONE
        if self._known and not 0 <= self._buffer.min() <= self._buffer.max() < vocab_size:
            self.fail(f"A token id is outside 0 to {vocab_size - 1}.")

    @property
    def expected(self) -> int:
        """Tokens that will be known once every launched step is collected."""
        return self._known + len(self._sources)

    def tokens(self, start: int, end: int) -> IntArray:
        """Of these positions. Zeros where they are not known yet, and if the sequence has failed: what is computed from
        them counts for nothing."""
        return self._buffer[start:end] if self.failure is None else np.zeros(end - start, np.intp)

    def sources(self, start: int, end: int) -> Iterator[tuple[int, Source]]:
        """Of those of these positions that are not known yet."""
        for position in range(max(start, self._known), end if self.failure is None else start):
            yield position, self._sources[position - self._known]

    def forbidden_ids(self, position: int) -> IntArray:
        """Ids that the token at ``position`` must not be: under ``min_tokens`` the output may not end yet."""
        return self._stop_ids if position - self.prompt_count < self.sampling.min_tokens else NONE

    def page_array(self, pages: tuple[PageId, ...]) -> IntArray:
        """The same as an array, which is made only when the scheduler has made another tuple.

        Raises:
            StepFailed: there is no such page.
        """
        if pages is not self._pages:
            if pages and not 0 <= min(pages) <= max(pages) < self._page_count:
                raise StepFailed(f"a page table names a page outside 0 to {self._page_count - 1}")
            self._pages, self._page_array = pages, np.array(pages, np.intp)
        return self._page_array

    def expect(self, source: Source) -> None:
        """One more token will be sampled."""
        count = self.expected
        if count == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.zeros(max(64, count), np.intp)])
        self._sources.append(source)

    def learn(self, token: TokenId) -> None:
        """The first of the expected tokens is there."""
        self._sources.popleft()
        self._buffer[self._known] = token
        self._known += 1

    def fail(self, message: str) -> None:
        """Nothing more is computed for this sequence. The first reason stays."""
        self.failure = self.failure or message


class SlotTable:
    """Slots by number. An opening replaces whatever was there."""

    def __init__(self, *, vocab_size: int, token_limit: int, page_count: int) -> None:
        self._vocab_size = vocab_size
        self._token_limit = token_limit
        self._page_count = page_count
        self._sequences: dict[Slot, Sequence] = {}

    def open(self, opening: SlotOpen) -> None:
        self._sequences[opening.slot] = Sequence(
            opening, vocab_size=self._vocab_size, token_limit=self._token_limit, page_count=self._page_count
        )

    def find(self, row: PlanRow) -> Sequence:
        """The sequence that a row belongs to.

        Raises:
            StepFailed: the slot has another tenant, or the row starts from tokens that nobody will know.
        """
        sequence = self._tenant(row)
        if sequence is None:
            raise StepFailed(f"slot {row.slot} is not open for sequence {row.seq}, epoch {row.epoch}")
        if sequence.failure is None and not _fits(row, sequence):
            expected = sequence.expected
            raise StepFailed(f"slot {row.slot}: positions {row.start} to {row.end} do not suit {expected} known tokens")
        return sequence

    def fail(self, rows: Iterable[PlanRow], message: str) -> None:
        """The step of these rows cannot be launched. Slots that have other tenants are left alone."""
        for row in rows:
            sequence = self._tenant(row)
            if sequence is not None:
                sequence.fail(message)

    def _tenant(self, row: PlanRow) -> Sequence | None:
        sequence = self._sequences.get(row.slot)
        return sequence if sequence is not None and (sequence.seq, sequence.epoch) == (row.seq, row.epoch) else None


def _fits(row: PlanRow, sequence: Sequence) -> bool:
    if row.start < 0 or row.count < 1:
        return False
    return row.end == sequence.expected if row.sample else row.end <= sequence.expected
