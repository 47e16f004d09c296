"""What an executor is given and what it promises: the port between ``worker`` and the rival executors.

Knows: flat arrays of one step. Refuses to know: sequences, sampling, plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from branchline.core.plan import PageCopy
from branchline.memory.kv import FloatArray, IntArray


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

    def forward(self, batch: Batch) -> FloatArray:
        """Compute a step, write its keys and values; returns what the head needs, ``[tokens, hidden]``."""

    def logits(self, hidden: FloatArray) -> FloatArray:
        """Logits ``[n, vocab_size]`` of ``n`` of those rows. A fresh array: the caller may write into it."""

    def greedy(self, hidden: FloatArray, token_limit: int) -> IntArray:
        """For each of ``n`` of those rows the most likely token below ``token_limit``, of equals the lowest.

        The same token as the largest of :meth:`logits`, without making them. -1: one of them is not finite.
        """
