"""From the rows of a plan and the tenants of their slots to the flat arrays of a step.

Knows: shapes and bounds. Refuses to know: what is computed with them.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from branchline.base.errors import StepFailed
from branchline.core.plan import PlanRow
from branchline.memory.kv import IntArray
from branchline.ops.batch import Batch, Ragged, SamplingColumns
from branchline.worker.slots import NONE, Sequence


def make_batch(rows: SequenceOf[PlanRow], sequences: SequenceOf[Sequence], *, page_size: int, page_count: int) -> Batch:
    """Arrays for at least one row; ``sequences[i]`` is the tenant of ``rows[i]`` and knows all its tokens.

    Raises:
        StepFailed: a page table is too short or names a page that does not exist.
    """
    counts = [row.count for row in rows]
    return Batch(
        tokens=np.concatenate([of.tokens[row.start : row.end] for row, of in zip(rows, sequences, strict=True)]),
        positions=np.concatenate([np.arange(row.start, row.end) for row in rows]),
        row_offsets=np.cumsum([0, *counts]),
        page_tables=_page_tables(rows, page_size, page_count),
    )


def make_columns(sequences: SequenceOf[Sequence], *, token_limit: int) -> SamplingColumns:
    """How the next token of each sequence is chosen."""
    params = [of.sampling for of in sequences]

    def column(name: str) -> npt.NDArray[np.float64]:
        return np.array([getattr(of, name) for of in params], np.float64)

    return SamplingColumns(
        token_limit=token_limit,
        temperature=column("temperature"),
        top_k=np.array([of.top_k for of in params], np.int64),
        top_p=column("top_p"),
        min_p=column("min_p"),
        repetition_penalty=column("repetition_penalty"),
        presence_penalty=column("presence_penalty"),
        frequency_penalty=column("frequency_penalty"),
        seed=np.array([of.seed for of in sequences], np.uint64),
        position=np.array([of.known_count for of in sequences], np.int64),
        logprobs=np.array([-1 if of.logprobs is None else of.logprobs for of in params], np.int64),
        prompt_count=np.array([of.prompt_count for of in sequences], np.int64),
        known=Ragged.of([of.tokens if of.is_penalised else NONE for of in sequences], np.int64),
        bias_ids=Ragged.of([of.bias_ids for of in sequences], np.int64),
        bias_values=Ragged.of([of.bias_values for of in sequences], np.float32),
        forbidden=Ragged.of([of.forbidden_ids for of in sequences], np.int64),
        mask=Ragged.of([NONE] * len(sequences), np.uint32),
    )


def _page_tables(rows: SequenceOf[PlanRow], page_size: int, page_count: int) -> IntArray:
    needed = [-(-row.end // page_size) for row in rows]
    tables = np.zeros((len(rows), max(needed)), np.intp)
    for table, row, count in zip(tables, rows, needed, strict=True):
        if len(row.pages) < count:
            raise StepFailed(f"slot {row.slot}: {len(row.pages)} pages cannot hold {row.end} positions")
        table[:count] = row.pages[:count]
    if tables.min() < 0 or tables.max() >= page_count:
        raise StepFailed(f"a page table names a page outside 0 to {page_count - 1}")
    return tables
