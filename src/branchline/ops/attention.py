"""Paged causal attention in numpy: which keys meet which queries, and the online softmax over them.

Keys are visited in blocks of positions counted from 0 and always taken whole, with what must not be seen masked: so
the order of the arithmetic of a query depends on its position alone, not on chunking or on the length of its row.
Decode rows go through the blocks together, prompt rows one by one in tiles of queries.

The running maximum and sum are those of Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).

Knows: positions and pages of one step. Refuses to know: projections, rotations, weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchline.memory.kv import FloatArray, IntArray, KvPool
from branchline.ops.batch import Batch
from branchline.ops.graph import PagedAttention

BLOCK_TOKENS = 128
"""Key positions of a block, rounded to whole pages."""
QUERY_TILE = 256
"""Prompt positions handled at once: bounds the scores to ``heads * QUERY_TILE * BLOCK_TOKENS`` numbers."""
ROW_TILE = 16
"""Decode rows handled at once: keeps the gathered keys and values in the processor's cache."""

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Block:
    """Keys ``[index * block, (index + 1) * block)`` for a range of a tile's rows."""

    rows: slice
    pages: IntArray
    """``[rows, pages per block]``"""
    hidden: BoolArray | None
    """``[rows, queries, 1, block]``: keys a query must not see; ``None``: it sees all."""
    stale: BoolArray | None
    """``[rows, block, 1]``: positions never written by the row, whose leftovers may even be NaN; ``None``: none."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries that walk through the blocks together: one each of many rows, or many of one row."""

    tokens: IntArray
    """``[rows * queries]``: their places among the tokens of the step."""
    row_count: int
    blocks: tuple[Block, ...]


def make_tiles(batch: Batch, page_size: int, window: int | None) -> tuple[Tile, ...]:
    """Cut a step into tiles. Depends on no layer: made once per step and window."""
    counts = np.diff(batch.row_offsets)
    decoding = np.flatnonzero(counts == 1)
    # Longest first: then the rows that still have keys in a block are neighbours.
    decoding = decoding[np.argsort(-batch.positions[batch.row_offsets[decoding]], kind="stable")]
    tiles = [
        _make_tile(batch, rows, batch.row_offsets[rows][:, None], page_size, window)
        for rows in np.split(decoding, range(ROW_TILE, len(decoding), ROW_TILE))
        if len(rows)
    ]
    for row in np.flatnonzero(counts > 1):
        first, last = batch.row_offsets[row], batch.row_offsets[row + 1]
        for start in range(first, last, QUERY_TILE):
            tokens = np.arange(start, min(start + QUERY_TILE, last))
            tiles.append(_make_tile(batch, np.array([row]), tokens[None, :], page_size, window))
    return tuple(tiles)


def _make_tile(batch: Batch, rows: IntArray, tokens: IntArray, page_size: int, window: int | None) -> Tile:
    """``rows [r]`` of the batch with their ``tokens [r, queries]``, later positions first."""
    positions = batch.positions[tokens]
    ends = batch.positions[batch.row_offsets[rows + 1] - 1] + 1
    blocks = tuple(_blocks(positions, ends, batch.page_tables[rows], page_size, window))
    return Tile(tokens.ravel(), len(rows), blocks)


def _blocks(positions: IntArray, ends: IntArray, tables: IntArray, page_size: int, window: int | None) -> Iterator[Block]:
    block_pages = max(1, BLOCK_TOKENS // page_size)
    block = block_pages * page_size
    last = positions[:, -1] // block
    first = np.zeros_like(last) if window is None else np.maximum(positions[:, 0] - window + 1, 0) // block
    padding = (int(last.max()) + 1) * block_pages - tables.shape[1]
    tables = np.pad(tables, ((0, 0), (0, max(0, padding))))
    for index in range(int(first.min()), int(last.max()) + 1):
        active = np.flatnonzero((first <= index) & (index <= last))
        if not len(active):
            continue
        rows = slice(int(active[0]), int(active[-1]) + 1)
        keys = np.arange(index * block, (index + 1) * block)
        hidden = keys > positions[rows, :, None]
        if window is not None:
            hidden |= keys <= positions[rows, :, None] - window
        stale = keys >= ends[rows, None]
        yield Block(
            rows,
            tables[rows, index * block_pages : (index + 1) * block_pages],
            hidden[:, :, None, :] if hidden.any() else None,
            stale[:, :, None] if stale.any() else None,
        )


def attend(op: PagedAttention, queries: FloatArray, pool: KvPool, tiles: tuple[Tile, ...]) -> FloatArray:
    """Attention of ``queries [tokens, heads * head_dim]`` over the pages; same shape. Keys must be written already."""
    out = np.empty(queries.shape, np.float32)
    for tile in tiles:
        out[tile.tokens] = _attend_tile(op, queries[tile.tokens], pool, tile)
    return out


def _attend_tile(op: PagedAttention, queries: FloatArray, pool: KvPool, tile: Tile) -> FloatArray:
    rows, group, width = tile.row_count, op.heads // op.kv_heads, op.head_dim
    count = len(tile.tokens) // rows
    shape = (op.kv_heads, rows, count * group)
    # The query heads of a key head stand side by side: K and V are never repeated.
    q = queries.reshape(rows, count, op.kv_heads, group, width).transpose(2, 0, 1, 3, 4).reshape(*shape, width)
    q = q * np.float32(op.scale)
    peak = np.full((*shape, 1), np.finfo(np.float32).min, np.float32)
    total = np.zeros((*shape, 1), np.float32)
    mixed = np.zeros((*shape, width), np.float32)
    for block in tile.blocks:
        at = (slice(None), block.rows)
        keys, values = pool.gather(op.layer, block.pages)
        scores = q[at] @ keys.swapaxes(-1, -2)
        if block.hidden is not None:
            by_group = scores.reshape(*scores.shape[:2], count, group, scores.shape[-1])
            np.copyto(by_group, -np.inf, where=block.hidden)
        if block.stale is not None:
            np.copyto(values, 0, where=block.stale)
        new_peak = np.maximum(peak[at], scores.max(axis=-1, keepdims=True))
        shrink = np.exp(peak[at] - new_peak)
        np.exp(np.subtract(scores, new_peak, out=scores), out=scores)
        total[at] = total[at] * shrink + scores.sum(axis=-1, keepdims=True)
        mixed[at] = mixed[at] * shrink + scores @ values
        peak[at] = new_peak
    mixed /= total
    back = mixed.reshape(op.kv_heads, rows, count, group, width).transpose(1, 2, 0, 3, 4)
    return back.reshape(rows * count, op.heads * width)
