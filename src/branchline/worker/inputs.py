"""From the rows of a plan and the tokens of their slots to the flat arrays of a step.

Knows: shapes and bounds. Refuses to know: what is computed with them.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np

from branchline.base.errors import StepFailed
from branchline.core.plan import PlanRow
from branchline.memory.kv import IntArray
from branchline.ops.batch import Batch
from branchline.worker.slots import Sequence


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
