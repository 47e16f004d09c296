"""From the rows of a plan and the tenants of their slots to the flat arrays of a step.

Arrays are made while the step before computes: complete but for the tokens that it samples. A `Relay` fetches those.

Knows: shapes and bounds. Refuses to know: what is computed with them, what becomes of it.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from branchline.base.errors import StepFailed
from branchline.core.plan import PlanRow
from branchline.memory.kv import IntArray
from branchline.ops.batch import Batch, Ragged, SamplingColumns, Scored
from branchline.worker.slots import COUNTS, NONE, NUMBERS, Done, Sequence

Tenant: TypeAlias = tuple[PlanRow, Sequence]
"""A row and the tenant of its slot."""
NOTHING_SCORED = Scored(NONE, NONE, NONE)


@dataclass(frozen=True, slots=True)
class Relay:
    """Takes tokens that an earlier step sampled to their places in a later one."""

    source: Future[Done]
    indices: IntArray
    """Among the choices of the source."""
    target: IntArray
    places: IntArray

    def fetch(self) -> None:
        """The source is done by now. A choice that failed, or was lost with its step, leaves zero: what is computed from it
        counts for nothing."""
        if self.source.exception() is None:
            self.target[self.places] = np.maximum(self.source.result().outcome.choices.tokens[self.indices], 0)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of one step. What the relays have not fetched yet is zero in ``batch.tokens`` and ``columns.known``."""

    batch: Batch
    columns: SamplingColumns
    scored: Scored
    relays: tuple[Relay, ...]


def make_inputs(tenants: SequenceOf[Tenant], *, page_size: int, token_limit: int) -> Inputs:
    """For at least one row.

    Raises:
        StepFailed: a page table is too short.
    """
    batch = _make_batch(tenants, _page_tables(tenants, page_size))
    sampled = [index for index, (row, _) in enumerate(tenants) if row.sample]
    sampling = [tenants[index] for index in sampled]
    columns = _make_columns(sampled, sampling, token_limit)
    rows = zip(batch.row_offsets.tolist(), tenants, strict=False)
    penalised = ((at, of) for at, of in zip(columns.known.offsets.tolist(), sampling, strict=False) if of[1].is_penalised)
    relays = (
        *_relays(batch.tokens, ((at, of, row.start, row.end) for at, (row, of) in rows)),
        *_relays(columns.known.values, ((at, of, 0, row.end) for at, (row, of) in penalised)),
    )
    return Inputs(batch, columns, _make_scored(tenants, batch.row_offsets), relays)


def _make_batch(tenants: SequenceOf[Tenant], page_tables: IntArray) -> Batch:
    starts, counts = np.array([(row.start, row.count) for row, _ in tenants], np.intp).T
    offsets = np.zeros(len(tenants) + 1, np.intp)
    counts.cumsum(out=offsets[1:])
    tokens = np.concatenate([of.tokens(row.start, row.end) for row, of in tenants])
    return Batch(tokens, np.arange(len(tokens)) + (starts - offsets[:-1]).repeat(counts), offsets, page_tables)


def _page_tables(tenants: SequenceOf[Tenant], page_size: int) -> IntArray:
    needed = [-(-row.end // page_size) for row, _ in tenants]
    tables = np.zeros((len(tenants), max(needed)), np.intp)
    for table, (row, of), count in zip(tables, tenants, needed, strict=True):
        if len(row.pages) < count:
            raise StepFailed(f"slot {row.slot}: {len(row.pages)} pages cannot hold {row.end} positions")
        table[:count] = of.page_array(row.pages)[:count]
    return tables


def _make_columns(rows: SequenceOf[int], tenants: SequenceOf[Tenant], token_limit: int) -> SamplingColumns:
    """How the token after each of ``rows`` of the batch is chosen."""
    sequences = [of for _, of in tenants]
    return SamplingColumns(
        token_limit=token_limit,
        row=np.array(rows, np.int64),
        **_named(NUMBERS, [of.numbers for of in sequences], np.float64),
        **_named(COUNTS, [of.counts for of in sequences], np.int64),
        seed=np.array([of.seed for of in sequences], np.uint64),
        position=np.array([row.end for row, _ in tenants], np.int64),
        known=Ragged.of([of.tokens(0, row.end) if of.is_penalised else NONE for row, of in tenants], np.int64),
        bias_ids=Ragged.of([of.bias_ids for of in sequences], np.int64),
        bias_values=Ragged.of([of.bias_values for of in sequences], np.float32),
        forbidden=Ragged.of([of.forbidden_ids(row.end) for row, of in tenants], np.int64),
        mask=Ragged.of([NONE] * len(tenants), np.uint32),
    )


def _named(names: SequenceOf[str], rows: SequenceOf[SequenceOf[float]], dtype: npt.DTypeLike) -> dict[str, Any]:
    table = np.array(rows, dtype).reshape(-1, len(names))
    return dict(zip(names, table.T.copy(), strict=True))


def _relays(target: IntArray, spans: Iterable[tuple[int, Sequence, int, int]]) -> list[Relay]:
    """``spans``: place of the first, sequence, first and end of positions."""
    found: dict[Future[Done], tuple[list[int], list[int]]] = {}
    for place, of, start, end in spans:
        for position, source in of.sources(start, end):
            indices, places = found.setdefault(source.step, ([], []))
            indices.append(source.index)
            places.append(place + position - start)
    return [Relay(step, np.array(indices), target, np.array(places)) for step, (indices, places) in found.items()]


def scored_positions(row: PlanRow, sequence: Sequence) -> range:
    """Prompt tokens whose log probability this row tells: position ``p`` tells about token ``p + 1``."""
    if row.prompt_logprobs_from is None:
        return range(0)
    return range(max(row.prompt_logprobs_from, row.start + 1), min(row.end + 1, sequence.prompt_count))


def _make_scored(tenants: SequenceOf[Tenant], offsets: IntArray) -> Scored:
    if all(row.prompt_logprobs_from is None for row, _ in tenants):
        return NOTHING_SCORED
    places, tokens, tops = [NONE], [NONE], [NONE]
    for (row, of), offset in zip(tenants, offsets.tolist(), strict=False):
        if told := scored_positions(row, of):
            places.append(np.arange(told.start, told.stop) - 1 - row.start + offset)
            tokens.append(of.tokens(told.start, told.stop))
            tops.append(np.full(len(told), of.sampling.prompt_logprobs or 0))
    return Scored(np.concatenate(places), np.concatenate(tokens), np.concatenate(tops))
