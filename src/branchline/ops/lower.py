"""From a graph to what a fused executor runs: linears of one input joined, gates and residual sums taken into them.

Knows: who writes and who reads a value. Refuses to know: kernels, widths.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from branchline.ops.graph import Add, GatedActivation, Graph, Linear, Op, Value, Weight

READS = ("x", "q", "k", "v", "gate", "up", "a", "b")
"""Fields of operators that name values they read; of a :class:`GatedLinear` some name weights."""


@dataclass(frozen=True, slots=True)
class JoinedLinear:
    """Neighbouring linears of one input, each with an output of its own."""

    x: Value
    parts: tuple[Linear, ...]

    @property
    def reads(self) -> tuple[Value, ...]:
        return (self.x,)


@dataclass(frozen=True, slots=True)
class ResidualLinear:
    """``out = base + (x @ weight.T (+ bias))``; nobody reads ``base`` afterwards, so ``out`` may take its place."""

    out: Value
    base: Value
    x: Value
    weight: Weight
    bias: Weight | None

    @property
    def reads(self) -> tuple[Value, ...]:
        return (self.base, self.x)


@dataclass(frozen=True, slots=True)
class GatedLinear:
    """``out = f(x @ gate.T) * (x @ up.T)``"""

    out: Value
    x: Value
    gate: Weight
    up: Weight
    kind: Literal["silu", "gelu_tanh"]

    @property
    def reads(self) -> tuple[Value, ...]:
        return (self.x,)


Lowered: TypeAlias = Op | JoinedLinear | ResidualLinear | GatedLinear


def lower(graph: Graph) -> tuple[Lowered, ...]:
    """Operators that compute the same as ``graph.ops``, in order. Each value is written once; no ``Linear`` is left."""
    return tuple(_fused(tuple(_written_once(graph.ops))))


def reads(op: Lowered) -> tuple[Value, ...]:
    """The values that an operator reads."""
    if isinstance(op, JoinedLinear | ResidualLinear | GatedLinear):
        return op.reads
    return tuple(getattr(op, field) for field in READS if hasattr(op, field))


def last_readers(ops: Sequence[Lowered]) -> dict[Value, int]:
    """Index of the operator that reads a value last."""
    return {value: index for index, op in enumerate(ops) for value in reads(op)}


def _written_once(ops: Sequence[Op]) -> Iterator[Op]:
    """The same operators with a new name for each value written."""
    names: dict[Value, Value] = {}
    for index, op in enumerate(ops):
        changes: dict[str, Any] = {field: names[getattr(op, field)] for field in READS if hasattr(op, field)}
        names[op.out] = f"{op.out}.{index}"
        yield dataclasses.replace(op, out=names[op.out], **changes)


def _fused(ops: Sequence[Op]) -> Iterator[Lowered]:
    last = last_readers(ops)
    at = 0
    while at < len(ops):
        op = ops[at]
        if not isinstance(op, Linear):
            yield op
            at += 1
        elif (gated := _gated(ops, at, last)) is not None:
            yield gated
            at += 3
        elif (residual := _residual(ops, at, last)) is not None:
            yield residual
            at += 2
        else:
            joined = _joined(ops, at)
            yield joined
            at += len(joined.parts)


def _gated(ops: Sequence[Op], at: int, last: dict[Value, int]) -> GatedLinear | None:
    match ops[at : at + 3]:
        case [Linear(bias=None) as a, Linear(bias=None) as b, GatedActivation() as gate] if a.x == b.x:
            weights = {a.out: a.weight, b.out: b.weight}
            if set(weights) == {gate.gate, gate.up} and all(last[out] == at + 2 for out in weights):
                return GatedLinear(gate.out, a.x, weights[gate.gate], weights[gate.up], gate.kind)
    return None


def _residual(ops: Sequence[Op], at: int, last: dict[Value, int]) -> ResidualLinear | None:
    match ops[at : at + 2]:
        case [Linear() as linear, Add() as add] if linear.out in (add.a, add.b):
            base = add.b if add.a == linear.out else add.a
            if base not in (linear.x, linear.out) and last[base] == last[linear.out] == at + 1:
                return ResidualLinear(add.out, base, linear.x, linear.weight, linear.bias)
    return None


def _joined(ops: Sequence[Op], at: int) -> JoinedLinear:
    parts: list[Linear] = []
    for op in ops[at:]:
        if not isinstance(op, Linear) or (parts and op.x != parts[0].x):
            break
        parts.append(op)
    return JoinedLinear(parts[0].x, tuple(parts))
