"""What a worker remembers of each sequence: its known tokens and how to choose the next one.

Knows: tokens, sampling parameters, identity. Refuses to know: plans as a whole, arrays of a step, how a choice is made.
"""

from collections.abc import Iterable

import numpy as np

from branchline.base.errors import StepFailed
from branchline.base.ids import Slot, TokenId
from branchline.core.plan import PlanRow, SlotOpen
from branchline.memory.kv import IntArray

NONE: IntArray = np.zeros(0, np.intp)
"""No tokens."""


class Sequence:
    """The tenant of a slot. Tokens only grow; the runner alone appends."""

    def __init__(self, opening: SlotOpen, *, vocab_size: int, token_limit: int) -> None:
        """``vocab_size``: ids that have an embedding; ``token_limit``: ids that can be drawn."""
        self.seq = opening.seq
        self.epoch = opening.epoch
        self.prompt_count = opening.prompt_count
        self.sampling = opening.sampling
        self.seed = opening.seed
        # Ids that can never be drawn need no mask and no bias.
        self.stop_ids = np.array([token for token in opening.stop_ids if token < token_limit], np.intp)
        bias = [(token, value) for token, value in opening.sampling.logit_bias if token < token_limit]
        self.bias_ids = np.array([token for token, _ in bias], np.intp)
        self.bias_values = np.array([value for _, value in bias], np.float32)
        params = opening.sampling
        self.is_penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        self.failure: str | None = None
        """Why nothing more can be computed for this sequence; safe to show."""
        self._buffer: IntArray = np.array(opening.tokens, np.intp)
        self._count = len(self._buffer)
        if self._count and not 0 <= self._buffer.min() <= self._buffer.max() < vocab_size:
            self.fail(f"A token id is outside 0 to {vocab_size - 1}.")

    @property
    def tokens(self) -> IntArray:
        """Known tokens: prompt, then output. A view: do not keep it."""
        return self._buffer[: self._count]

    @property
    def known_count(self) -> int:
        return self._count

    @property
    def generated_count(self) -> int:
        return self._count - self.prompt_count

    @property
    def forbidden_ids(self) -> IntArray:
        """Ids that the next token must not be: under ``min_tokens`` the output may not end yet."""
        return self.stop_ids if self.generated_count < self.sampling.min_tokens else NONE

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

    def find(self, row: PlanRow) -> Sequence:
        """The sequence that a row belongs to.

        Raises:
            StepFailed: the slot has another tenant, or the row starts from tokens that nobody knows.
        """
        sequence = self._sequences.get(row.slot)
        if sequence is None or (sequence.seq, sequence.epoch) != (row.seq, row.epoch):
            raise StepFailed(f"slot {row.slot} is not open for sequence {row.seq}, epoch {row.epoch}")
        if sequence.failure is None and not _fits(row, sequence):
            known = sequence.known_count
            raise StepFailed(f"slot {row.slot}: positions {row.start} to {row.end} do not suit {known} known tokens")
        return sequence

    def fail(self, rows: Iterable[PlanRow], message: str) -> None:
        """The step of these rows was lost. Slots that have changed hands since are left alone."""
        for row in rows:
            sequence = self._sequences.get(row.slot)
            if sequence is not None and (sequence.seq, sequence.epoch) == (row.seq, row.epoch):
                sequence.fail(message)


def _fits(row: PlanRow, sequence: Sequence) -> bool:
    if row.start < 0 or row.count < 1:
        return False
    return row.end == sequence.known_count if row.sample else row.end <= sequence.known_count
