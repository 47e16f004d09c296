"""The reference executor: the operator graph in float32 numpy with a threaded BLAS.

It is the oracle of every later executor, and the engine itself where there are no native kernels.

On exactness: everything but the matrix products depends on a row alone. BLAS libraries choose their kernels by the
number of rows, so a position computed alone, in a batch or in another chunk may differ in its last bits (about 1e-5 in
the logits of a small model). Greedy tokens are the same across chunking, batching and caching up to ties of that size.

Knows: how each operator is computed. Refuses to know: sequences, how a token is chosen (``ops.sample``), file formats.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, assert_never

import numpy as np

from branchline.base.errors import InvariantBroken, require
from branchline.core.plan import PageCopy
from branchline.memory.kv import FloatArray, KvPool
from branchline.ops.attention import Tile, attend, make_tiles
from branchline.ops.batch import Batch, Choices, Outcome, SamplingColumns, Scored
from branchline.ops.graph import (
    Add,
    Embed,
    GatedActivation,
    Graph,
    Linear,
    Logits,
    Norm,
    Op,
    PagedAttention,
    Rope,
    RopeSpec,
    Value,
    Weight,
)
from branchline.ops.sample import choose, gather, score_row

WeightSource: TypeAlias = Callable[[Weight], FloatArray]
"""Gives a tensor ``[out, in]`` or ``[width]`` by name."""
SLAB_ROWS = 128
SCORED_ROWS = 32
"""Rows to be scored whose logits exist at the same time."""
Values: TypeAlias = dict[Value, FloatArray]


@dataclass(frozen=True, slots=True)
class JoinedLinear:
    """Neighbouring ``Linear`` operators of one input (q, k and v; gate and up), computed as one product."""

    x: Value
    outs: tuple[Value, ...]
    edges: tuple[int, ...]
    """Columns of ``outs[i]``: ``[edges[i], edges[i + 1])``."""
    weight: FloatArray
    """``[in, sum of outs]``"""
    bias: FloatArray | None


class ReferenceExecutor:
    """Runs ``graph`` over ``pool``. Weights are copied: their source may close its files afterwards.

    Matrices are kept transposed, ``[in, out]``: that is what BLAS reads fastest for few rows.

    Raises:
        ModelError: the source has no such weight.
        InvariantBroken: graph and pool do not fit, or the graph does not end with its logits.
    """

    def __init__(self, graph: Graph, weights: WeightSource, pool: KvPool) -> None:
        require((graph.layers, graph.kv_heads, graph.head_dim) == pool.shape, "the KV pool is not made for this graph")
        head = graph.ops[-1]
        if not isinstance(head, Logits):
            raise InvariantBroken("the last operator of a graph must be Logits")
        self.vocab_size = graph.vocab_size
        self._pool = pool
        self._head = head
        self._ops: list[Op | JoinedLinear] = [
            _join(run, weights) if isinstance(run, list) else run for run in _runs(graph.ops[:-1])
        ]
        shared = {name for op in graph.ops if not isinstance(op, Linear) for name in _weights_of(op)}
        self._weights = {name: _transposed(weights(name)) for name in graph.weights if name in shared}

    @property
    def page_size(self) -> int:
        return self._pool.page_size

    @property
    def page_count(self) -> int:
        return self._pool.page_count

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        for copy in copies:
            self._pool.copy(copy.source, copy.target, copy.token_count)

    def prepare(self, batch: Batch, columns: SamplingColumns, scored: Scored) -> Callable[[], Outcome]:
        return partial(self._compute, batch, columns, scored)

    def _compute(self, batch: Batch, columns: SamplingColumns, scored: Scored) -> Outcome:
        hidden = self.forward(batch)
        finite = np.logical_and.reduceat(np.isfinite(hidden).all(axis=1), batch.row_offsets[:-1])
        last = hidden[batch.row_offsets[columns.row + 1] - 1]
        choices = choose(self.logits(last)[:, : columns.token_limit], columns)
        return Outcome(finite, choices, self._score(hidden[scored.place], scored, columns.token_limit))

    def forward(self, batch: Batch) -> FloatArray:
        """Compute a step, write its keys and values; returns what the head reads, ``[tokens, hidden]``."""
        step = _Step(batch, self.page_size)
        values: Values = {}
        # Numbers of one row that overflow must not disturb its neighbours; the sampler reports them.
        with np.errstate(over="ignore", invalid="ignore"):
            for op in self._ops:
                self._run(op, values, step)
        return values[self._head.x]

    def logits(self, hidden: FloatArray) -> FloatArray:
        """``[n, vocab_size]`` of ``n`` rows."""
        with np.errstate(over="ignore", invalid="ignore"):
            return hidden @ self._weights[self._head.weight]

    def _score(self, hidden: FloatArray, scored: Scored, token_limit: int) -> Choices:
        slabs = (self.logits(hidden[start : start + SCORED_ROWS]) for start in range(0, len(hidden), SCORED_ROWS))
        rows = (logits[:token_limit] for slab in slabs for logits in slab)
        return gather(score_row(*of) for of in zip(rows, scored.token.tolist(), scored.top.tolist(), strict=True))

    def _run(self, op: Op | JoinedLinear, values: Values, step: "_Step") -> None:
        match op:
            case Embed():
                values[op.out] = np.ascontiguousarray(self._weights[op.table].take(step.batch.tokens, axis=1).T)
            case Norm():
                values[op.out] = _norm(values[op.x], self._weights[op.weight], op)
            case JoinedLinear():
                values.update(_linear(op, values[op.x]))
            case Rope():
                values[op.out] = _rotate(values[op.x], op.spec, *step.turns(op.spec))
            case PagedAttention():
                values[op.out] = self._attention(op, values, step)
            case GatedActivation():
                values[op.out] = _gate(values[op.gate], op.kind) * values[op.up]
            case Add():
                values[op.out] = values[op.a] + values[op.b]
            case Linear() | Logits():
                raise InvariantBroken(f"{op} was not prepared at construction")
            case _:
                assert_never(op)

    def _attention(self, op: PagedAttention, values: Values, step: "_Step") -> FloatArray:
        heads = (len(step.places), op.kv_heads, op.head_dim)
        self._pool.write(op.layer, step.places, values[op.k].reshape(heads), values[op.v].reshape(heads))
        return attend(op, values[op.q], self._pool, step.tiles(op.window))


class _Step:
    """What all layers of one step share: places in the pool, tiles of attention, angles."""

    def __init__(self, batch: Batch, page_size: int) -> None:
        self.batch = batch
        self._page_size = page_size
        self._tiles: dict[int | None, tuple[Tile, ...]] = {}
        self._turns: dict[RopeSpec, tuple[FloatArray, FloatArray]] = {}
        row_of_token = np.repeat(np.arange(batch.row_count), np.diff(batch.row_offsets))
        pages = batch.page_tables[row_of_token, batch.positions // page_size]
        self.places = pages * page_size + batch.positions % page_size
        """``[tokens]``: where the pool keeps each position."""

    def tiles(self, window: int | None) -> tuple[Tile, ...]:
        if window not in self._tiles:
            self._tiles[window] = make_tiles(self.batch, self._page_size, window)
        return self._tiles[window]

    def turns(self, spec: RopeSpec) -> tuple[FloatArray, FloatArray]:
        """Cosine and sine ``[tokens, 1, rotary_dim / 2]``; angles in float64, for positions may be large."""
        if spec not in self._turns:
            angles = self.batch.positions[:, None, None] * np.array(spec.inverse_frequencies, np.float64)
            cos, sin = np.cos(angles) * spec.magnitude, np.sin(angles) * spec.magnitude
            self._turns[spec] = cos.astype(np.float32), sin.astype(np.float32)
        return self._turns[spec]


# ---------------------------------------------------------------- weights


def _transposed(weight: FloatArray) -> FloatArray:
    """An own, contiguous float32 copy; matrices become ``[in, out]``."""
    out = np.empty(weight.shape[::-1], np.float32)
    _transpose_into(out, weight)
    return out


def _transpose_into(out: FloatArray, weight: FloatArray) -> None:
    """In slabs that fit a processor's cache: several times faster than at one go."""
    for start in range(0, len(weight), SLAB_ROWS):
        out[..., start : start + SLAB_ROWS] = weight[start : start + SLAB_ROWS].T


def _weights_of(op: Op) -> Iterator[Weight]:
    for field in ("table", "weight", "bias"):
        name = getattr(op, field, None)
        if name is not None:
            yield name


def _runs(ops: Sequence[Op]) -> Iterator[Op | list[Linear]]:
    """The operators in order, with neighbouring linears that may be joined gathered in lists."""
    run: list[Linear] = []
    for op in ops:
        if run and not (isinstance(op, Linear) and _may_follow(run[-1], op)):
            yield run
            run = []
        if isinstance(op, Linear):
            run.append(op)
        else:
            yield op
    if run:
        yield run


def _may_follow(before: Linear, op: Linear) -> bool:
    return op.x == before.x != before.out and (op.bias is None) == (before.bias is None)


def _join(parts: list[Linear], weights: WeightSource) -> JoinedLinear:
    matrices = [weights(part.weight) for part in parts]
    biases = [_transposed(weights(part.bias)) for part in parts if part.bias is not None]
    edges = (0, *np.cumsum([len(matrix) for matrix in matrices]).tolist())
    weight = np.empty((matrices[0].shape[1], edges[-1]), np.float32)
    for matrix, start, end in zip(matrices, edges[:-1], edges[1:], strict=True):
        _transpose_into(weight[:, start:end], matrix)
    bias = np.concatenate(biases) if biases else None
    return JoinedLinear(parts[0].x, tuple(part.out for part in parts), edges, weight, bias)


# ---------------------------------------------------------------- operators


def _norm(x: FloatArray, weight: FloatArray, op: Norm) -> FloatArray:
    groups = x.reshape(len(x), -1, op.width)
    mean_square = np.square(groups).mean(axis=-1, keepdims=True)
    scaled: FloatArray = groups * (1 / np.sqrt(mean_square + np.float32(op.eps)))
    scaled *= weight
    return scaled.reshape(x.shape)


def _linear(op: JoinedLinear, x: FloatArray) -> Iterator[tuple[Value, FloatArray]]:
    product = x @ op.weight
    if op.bias is not None:
        product += op.bias
    for out, start, end in zip(op.outs, op.edges[:-1], op.edges[1:], strict=True):
        yield out, product[:, start:end]


def _rotate(x: FloatArray, spec: RopeSpec, cos: FloatArray, sin: FloatArray) -> FloatArray:
    heads = x.reshape(len(x), -1, spec.head_dim)
    half = len(spec.inverse_frequencies)
    first, second = slice(0, half), slice(half, 2 * half)
    if spec.layout == "interleaved":
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = heads[..., first], heads[..., second]
    out = np.empty(heads.shape, np.float32)
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    out[..., 2 * half :] = heads[..., 2 * half :]
    return out.reshape(x.shape)


def _gate(x: FloatArray, kind: Literal["silu", "gelu_tanh"]) -> FloatArray:
    out: FloatArray
    if kind == "silu":
        out = np.exp(-x)
        out += 1
        return np.divide(x, out, out=out)
    out = np.tanh(np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x * x * x))
    out += 1
    out *= np.float32(0.5) * x
    return out
