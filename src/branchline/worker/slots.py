"""What a worker remembers of each sequence: its known tokens and how to choose the next one.

Two threads meet here. The one that launches opens slots and counts the tokens that launched rows will sample; the one that
computes appends those tokens and notes failures.

Knows: tokens, sampling parameters, identity. Refuses to know: plans as a whole, arrays of a step, how a choice is made.
"""

from collections.abc import Iterable

import numpy as np

from branchline.base.errors import StepFailed
from branchline.base.ids import PageId, Slot, TokenId
from branchline.core.plan import PlanRow, SlotOpen
from branchline.memory.kv import IntArray

NONE: IntArray = np.zeros(0, np.intp)
"""No tokens."""
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
COUNTS = ("top_k", "logprobs", "prompt_count")
"""Sampling columns that stay the same while a sequence runs."""


class Sequence:
    """The tenant of a slot. Tokens only grow; the runner alone appends."""

    def __init__(self, opening: SlotOpen, *, vocab_size: int, token_limit: int) -> None:
        """``vocab_size``: ids that have an embedding; ``token_limit``: ids that can be drawn."""
        self.seq = opening.seq
        self.epoch = opening.epoch
        self.prompt_count = opening.prompt_count
        self.expected = len(opening.tokens)
        """Tokens that will be known once every launched row has been computed."""
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
        self._count = len(self._buffer)
        self._pages: tuple[PageId, ...] = ()
        self._page_array = NONE
        if self._count and not 0 <= self._buffer.min() <= self._buffer.max() < vocab_size:
            self.fail(f"A token id is outside 0 to {vocab_size - 1}.")

    def known(self, start: int, end: int) -> IntArray:
        """Tokens of these positions, or zeros if the sequence has failed: what is computed from them counts for nothing."""
        return self._buffer[start:end] if self.failure is None else np.zeros(end - start, np.intp)

    def forbidden_ids(self, position: int) -> IntArray:
        """Ids that the token at ``position`` must not be: under ``min_tokens`` the output may not end yet."""
        return self._stop_ids if position - self.prompt_count < self.sampling.min_tokens else NONE

    def page_array(self, pages: tuple[PageId, ...]) -> IntArray:
        """The same as an array, which is made only when the scheduler has made another tuple."""
        if pages is not self._pages:
            self._pages, self._page_array = pages, np.array(pages, np.intp)
        return self._page_array

    def append(self, token: TokenId) -> None:
        if self._count == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.zeros(max(64, self._count), np.intp)])
        self._buffer[self._count] = token
        self._count += 1

    def fail(self, message: str) -> None:
        """Nothing more is computed for this sequence. The first reason stays."""
        self.failure = self.failure or message


class SlotTable:
    """Slots by number. An opening replaces whatever was there."""

    def __init__(self, *, vocab_size: int, token_limit: int) -> None:
        self._vocab_size = vocab_size
        self._token_limit = token_limit
        self._sequences: dict[Slot, Sequence] = {}

    def open(self, opening: SlotOpen) -> None:
        self._sequences[opening.slot] = Sequence(opening, vocab_size=self._vocab_size, token_limit=self._token_limit)

    def launch(self, row: PlanRow) -> Sequence:
        """The sequence that a row belongs to; if the row samples, one more token is expected of it.

        Raises:
            StepFailed: the slot has another tenant, or the row starts from tokens that nobody will know.
        """
        sequence = self._tenant(row)
        if sequence is None:
            raise StepFailed(f"slot {row.slot} is not open for sequence {row.seq}, epoch {row.epoch}")
        if sequence.failure is None and not _fits(row, sequence):
            expected = sequence.expected
            raise StepFailed(f"slot {row.slot}: positions {row.start} to {row.end} do not suit {expected} known tokens")
        sequence.expected += row.sample
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
