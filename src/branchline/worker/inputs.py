"""From the rows of a plan and the tenants of their slots to the flat arrays of a step.

Arrays are made while the step before computes: complete but for the tokens that it samples. `fill` writes those.

Knows: shapes and bounds. Refuses to know: what is computed with them, what becomes of it.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from branchline.base.errors import StepFailed
from branchline.core.plan import PlanRow
from branchline.memory.kv import IntArray
from branchline.ops.batch import Batch, Ragged, SamplingColumns, Scored
from branchline.worker.slots import COUNTS, NONE, NUMBERS, Sequence


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of a step of at least one row; ``sequences[i]`` is the tenant of ``rows[i]``."""

    rows: SequenceOf[PlanRow]
    sequences: SequenceOf[Sequence]
    batch: Batch
    columns: SamplingColumns
    scored: Scored

    def fill(self) -> None:
        """Write the tokens into their places, once all of them are known."""
        tenants = list(zip(self.rows, self.sequences, strict=True))
        np.concatenate([of.known(row.start, row.end) for row, of in tenants], out=self.batch.tokens)
        if len(self.columns.known.values):
            known = [of.known(0, row.end) for row, of in tenants if row.sample and of.is_penalised]
            np.concatenate(known, out=self.columns.known.values)


def make_inputs(
    rows: SequenceOf[PlanRow], sequences: SequenceOf[Sequence], *, page_size: int, page_count: int, token_limit: int
) -> Inputs:
    """Raises StepFailed if a page table is too short or names a page that does not exist."""
    batch = _make_batch(rows, _page_tables(rows, sequences, page_size, page_count))
    return Inputs(
        rows, sequences, batch, make_columns(rows, sequences, token_limit), _make_scored(rows, sequences, batch.row_offsets)
    )


def _make_batch(rows: SequenceOf[PlanRow], page_tables: IntArray) -> Batch:
    starts, counts = np.array([(row.start, row.count) for row in rows], np.intp).T
    offsets = np.zeros(len(rows) + 1, np.intp)
    np.cumsum(counts, out=offsets[1:])
    positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
    return Batch(np.empty_like(positions), positions, offsets, page_tables)


def _page_tables(rows: SequenceOf[PlanRow], sequences: SequenceOf[Sequence], page_size: int, page_count: int) -> IntArray:
    needed = [-(-row.end // page_size) for row in rows]
    tables = np.zeros((len(rows), max(needed)), np.intp)
    for table, row, of, count in zip(tables, rows, sequences, needed, strict=True):
        if len(row.pages) < count:
            raise StepFailed(f"slot {row.slot}: {len(row.pages)} pages cannot hold {row.end} positions")
        table[:count] = of.page_array(row.pages)[:count]
    if tables.min() < 0 or tables.max() >= page_count:
        raise StepFailed(f"a page table names a page outside 0 to {page_count - 1}")
    return tables


def make_columns(rows: SequenceOf[PlanRow], sequences: SequenceOf[Sequence], token_limit: int) -> SamplingColumns:
    """How the token after each row that samples is chosen. Known tokens of rows with penalties are still to be filled in."""
    sampled = [index for index, row in enumerate(rows) if row.sample]
    ends, some = [rows[index].end for index in sampled], [sequences[index] for index in sampled]
    known = np.cumsum([0, *(end if of.is_penalised else 0 for end, of in zip(ends, some, strict=True))])
    return SamplingColumns(
        token_limit=token_limit,
        row=np.array(sampled, np.intp),
        **_columns(NUMBERS, [of.numbers for of in some], np.float64),
        **_columns(COUNTS, [of.counts for of in some], np.int64),
        seed=np.array([of.seed for of in some], np.uint64),
        position=np.array(ends, np.int64),
        known=Ragged(known, np.empty(known[-1], np.int64)),
        bias_ids=Ragged.of([of.bias_ids for of in some], np.int64),
        bias_values=Ragged.of([of.bias_values for of in some], np.float32),
        forbidden=Ragged.of([of.forbidden_ids(end) for end, of in zip(ends, some, strict=True)], np.int64),
        mask=Ragged.of([NONE] * len(some), np.uint32),
    )


def _columns(names: SequenceOf[str], rows: SequenceOf[SequenceOf[float]], dtype: npt.DTypeLike) -> dict[str, Any]:
    table = np.array(rows, dtype).reshape(-1, len(names))
    return dict(zip(names, table.T.copy(), strict=True))


def scored_positions(row: PlanRow, sequence: Sequence) -> range:
    """Prompt tokens whose log probability this row tells: position ``p`` tells about token ``p + 1``."""
    if row.prompt_logprobs_from is None:
        return range(0)
    return range(max(row.prompt_logprobs_from, row.start + 1), min(row.end + 1, sequence.prompt_count))


def _make_scored(rows: SequenceOf[PlanRow], sequences: SequenceOf[Sequence], offsets: IntArray) -> Scored:
    places, tokens, tops = [NONE], [NONE], [NONE]
    for row, of, offset in zip(rows, sequences, offsets.tolist(), strict=False):
        if told := scored_positions(row, of):
            places.append(np.arange(told.start, told.stop) - 1 - row.start + offset)
            tokens.append(of.known(told.start, told.stop))
            tops.append(np.full(len(told), of.sampling.prompt_logprobs or 0))
    return Scored(np.concatenate(places), np.concatenate(tokens), np.concatenate(tops))
