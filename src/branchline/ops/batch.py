"""What an executor is given and what it promises: the port between ``worker`` and the rival executors.

Knows: flat arrays of one step. Refuses to know: sequences, plans, how anything is computed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from branchline.base.ids import TokenId
from branchline.core.plan import PageCopy
from branchline.core.result import TokenLogprobs
from branchline.memory.kv import IntArray

DoubleArray: TypeAlias = npt.NDArray[np.float64]

NOT_FINITE, NOTHING_LEFT, NO_LOGPROB = -1, -2, -3
"""In place of a token: the logits are not finite; every token is forbidden; the given token is none of the usable ids."""


@dataclass(frozen=True, slots=True)
class Batch:
    """All positions of a step, row after row. Prompt chunks and decode rows mix freely."""

    tokens: IntArray
    """``[tokens]``"""
    positions: IntArray
    """``[tokens]``: position of each token in its sequence; consecutive within a row."""
    row_offsets: IntArray
    """``[rows + 1]``: row ``r`` owns tokens ``[row_offsets[r], row_offsets[r + 1])``, at least one."""
    page_tables: IntArray
    """``[rows, longest]``: pages of each row from position 0 on. Behind a row's last page any page may stand."""

    @property
    def row_count(self) -> int:
        return len(self.row_offsets) - 1


@dataclass(frozen=True, slots=True)
class Ragged:
    """A column with any number of values in each row."""

    offsets: IntArray
    """``[rows + 1]``: row ``r`` owns values ``[offsets[r], offsets[r + 1])``."""
    values: npt.NDArray[Any]

    @classmethod
    def of(cls, rows: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> Self:
        if not any(map(len, rows)):  # most columns of most steps
            return cls(np.zeros(len(rows) + 1, np.intp), np.zeros(0, dtype))
        return cls(np.cumsum([0, *map(len, rows)]), np.concatenate(rows).astype(dtype, copy=False))

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """How the next token of each row is chosen. All columns ``[rows]``; what they mean: ``core.request.SamplingParams``."""

    token_limit: int
    """Usable ids: ``0 <= token < token_limit``."""
    row: IntArray
    """Of the batch: after its last position comes the new token."""
    temperature: DoubleArray
    top_k: IntArray
    top_p: DoubleArray
    min_p: DoubleArray
    repetition_penalty: DoubleArray
    presence_penalty: DoubleArray
    frequency_penalty: DoubleArray
    seed: npt.NDArray[np.uint64]
    position: IntArray
    """Of the new token: with the seed the key of the only random number."""
    logprobs: IntArray
    """As many of the most likely tokens are reported with the chosen one; -1: none, not even that."""
    prompt_count: IntArray
    """So many of the known tokens are prompt."""
    known: Ragged
    """int: tokens of prompt and output, of rows with a penalty; no others are looked at."""
    bias_ids: Ragged
    """int: usable ids; one may occur more than once."""
    bias_values: Ragged
    """float32, one for each of ``bias_ids``."""
    forbidden: Ragged
    """int: usable ids that must not be chosen."""
    mask: Ragged
    """uint32 words: bit ``i`` of word ``w`` allows token ``32 w + i``. Nothing in a row allows everything."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens whose log probability is asked for. All columns ``[n]``."""

    place: IntArray
    """Among the tokens of the batch: after this position the given token comes."""
    token: IntArray
    top: IntArray
    """As many of the most likely tokens are reported with it."""


class Choice(msgspec.Struct, frozen=True):
    """Of one row."""

    token: TokenId
    """Or one of the negative numbers above."""
    logprobs: TokenLogprobs | None = None
    """Under the raw logits, if they were asked for."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What became of each row of columns."""

    tokens: IntArray
    """``[rows]``, or one of the negative numbers above."""
    logprobs: DoubleArray
    """``[rows]``: log probability of the token under the raw logits; NaN where it was not asked for."""
    top_tokens: IntArray
    """``[rows, widest]``: the most likely tokens, most likely first, of equals the lower id; -1 behind the last."""
    top_logprobs: DoubleArray
    """``[rows, widest]``"""

    def __iter__(self) -> Iterator[Choice]:
        for row, (token, logprob) in enumerate(zip(self.tokens.tolist(), self.logprobs.tolist(), strict=True)):
            yield Choice(token) if math.isnan(logprob) else self[row]

    def __getitem__(self, row: int) -> Choice:
        token, logprob = int(self.tokens[row]), float(self.logprobs[row])
        if math.isnan(logprob):
            return Choice(token)
        tokens = self.top_tokens[row]
        count = int((tokens >= 0).sum())
        top = zip(tokens[:count].tolist(), self.top_logprobs[row, :count].tolist(), strict=True)
        return Choice(token, TokenLogprobs(token, logprob, tuple(top)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step."""

    finite: npt.NDArray[np.bool_]
    """``[rows]`` of the batch: everything that was computed for it is a number."""
    choices: Choices
    """For each row of the sampling columns."""
    scores: Choices
    """For each scored token."""


class Executor(Protocol):
    """Runs an operator graph over its own KV memory. Not thread safe: one step at a time."""

    @property
    def page_size(self) -> int: ...

    @property
    def page_count(self) -> int: ...

    @property
    def vocab_size(self) -> int:
        """Width of the logits; token ids at or above it cannot be embedded."""

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy beginnings of pages, in order."""

    def prepare(self, batch: Batch, columns: SamplingColumns, scored: Scored) -> Callable[[], Outcome]:
        """A whole step, to be called once: compute the batch, write its keys and values, choose tokens, score tokens. A row
        that fails says so and disturbs no other.

        Preparing may be done while another step runs. Arrays are contiguous, integers have 64 bits. Until the step is called
        tokens may be written into them, in the batch and among the known ones.

        ``ops.sample`` has the formulas. Executors agree in them but for the last bits of weights: where a random number or a
        cut-off (``top_p``, ``min_p``) falls between two neighbouring float64 numbers they may choose differently.
        """
