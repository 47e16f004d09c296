"""The native executor: the operator graph in C++ kernels, one call per step without the interpreter's lock.

Weights keep the encoding of the checkpoint; the inputs of grouped weights are rounded to bytes with a scale per 32. Every
position is computed by itself in one fixed order: neither its row, nor its neighbours, nor the number of threads, nor the
instruction set changes a bit of it.

Knows: how a graph becomes a native program. Refuses to know: kernels (``native/``), file formats.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np

from branchline.base.errors import ConfigError, InvariantBroken, require
from branchline.core.plan import PageCopy
from branchline.memory.kernel_kv import KernelKvPool
from branchline.memory.kv import FloatArray
from branchline.ops.batch import Batch, Choices, Outcome, SamplingColumns, Scored
from branchline.ops.graph import (
    Add,
    Embed,
    GatedActivation,
    Graph,
    Logits,
    Norm,
    PagedAttention,
    Rope,
    Value,
    Weight,
)
from branchline.ops.lower import GatedLinear, JoinedLinear, Lowered, ResidualLinear, last_readers, lower, reads
from branchline.ops.packed import Groups, MatrixSource, PackedWeight, VectorSource


@cache
def kernels() -> ModuleType | str:
    """The extension module, or a sentence that says why there is none."""
    try:
        return importlib.import_module("branchline._native")  # by name: the module may not have been built
    except ImportError as error:
        return str(error)


def usable_isas() -> tuple[str, ...]:
    """Instruction sets for which there are kernels here, best first; none if the kernels were not built."""
    module = kernels()
    return () if isinstance(module, str) else tuple(module.isas())


class NativeExecutor:
    """Runs ``graph`` over ``pool``, which it reads and writes in place. Weights are repacked, tensor by tensor.

    Args:
        isa: "auto", or one of :func:`usable_isas`.

    Raises:
        ConfigError: there are no native kernels, or none for ``isa``.
        ModelError: a source has no such weight.
        InvariantBroken: graph and pool do not fit, or the graph does not end with its logits.
    """

    def __init__(
        self,
        graph: Graph,
        matrices: MatrixSource,
        vectors: VectorSource,
        pool: KernelKvPool,
        *,
        threads: int,
        isa: str = "auto",
    ) -> None:
        require((graph.layers, graph.kv_heads, graph.head_dim) == pool.shape, "the KV pool is not made for this graph")
        require(isinstance(graph.ops[-1], Logits), "the last operator of a graph must be Logits")
        module = kernels()
        if isinstance(module, str):
            raise ConfigError(f"there are no native kernels in this installation: {module}")
        if isa != "auto" and isa not in module.isas():
            raise ConfigError(f"there are no native kernels for {isa} here, only for {', '.join(module.isas())}")
        self.vocab_size = graph.vocab_size
        self._pool = pool
        pages = (pool.data, pool.scales, pool.kv_dtype, graph.layers, graph.kv_heads, pool.page_count, pool.page_size)
        program = module.Program(*pages, graph.head_dim, threads, isa)
        assembler = _Assembler(module, program, matrices, vectors)
        self._program = assembler.assemble(graph)
        self.weight_bytes = assembler.packed_bytes
        """Memory of all matrices."""

    @property
    def page_size(self) -> int:
        return self._pool.page_size

    @property
    def page_count(self) -> int:
        return self._pool.page_count

    @property
    def isa(self) -> str:
        """The instruction set that was chosen."""
        isa: str = self._program.isa
        return isa

    def take_op_times(self) -> dict[str, float]:
        """Nanoseconds by kind of operator since the last call. The first call begins to watch, which costs a little."""
        times: dict[str, float] = self._program.take_times()
        return times

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        for copy in copies:
            self._pool.copy(copy.source, copy.target, copy.token_count)

    def prepare(self, batch: Batch, columns: SamplingColumns, scored: Scored) -> Callable[[], Outcome]:
        self._pool.expect(int(batch.page_tables.max()))
        return partial(_run, self._program.prepare(batch, columns, scored))

    def forward(self, batch: Batch) -> FloatArray:
        """Compute a step, write its keys and values; returns what the head reads, ``[tokens, hidden]``: to look inside."""
        hidden: FloatArray = self._program.forward(batch)
        return hidden

    def logits(self, hidden: FloatArray) -> FloatArray:
        """``[n, vocab_size]`` of ``n`` such rows."""
        logits: FloatArray = self._program.logits(hidden)
        return logits


def _run(step: Any) -> Outcome:
    finite, choices, scores = step.run()
    return Outcome(finite, Choices(*choices), Choices(*scores))


class _Assembler:
    """Tells a program its operators. Packs each weight once; values whose time is over give their place to later ones."""

    def __init__(self, module: ModuleType, program: Any, matrices: MatrixSource, vectors: VectorSource) -> None:
        self._module = module
        self._program = program
        self._matrices = matrices
        self._vectors = vectors
        self._packed: dict[Weight, tuple[Any, tuple[int, int]]] = {}
        self._places: dict[Value, tuple[int, int]] = {}
        """Place and width of each living value."""
        self._free: dict[int, list[int]] = {}
        """Free places by width."""
        self._place_count = 0

    @property
    def packed_bytes(self) -> int:
        return sum(matrix.nbytes for matrix, _ in self._packed.values())

    def assemble(self, graph: Graph) -> Any:
        ops = lower(graph)
        last = last_readers(ops)
        for index, op in enumerate(ops):
            self._add(op)
            for value in {value for value in reads(op) if last[value] == index and value in self._places}:
                place, width = self._places.pop(value)
                self._free.setdefault(width, []).append(place)
        return self._program

    def _add(self, op: Lowered) -> None:
        program, place, width = self._program, self._place, self._width
        match op:
            case Embed():
                program.embed(self._new(op.out, self._shape(op.table)[1]), self._matrix(op.table))
            case Norm():
                out = self._new(op.out, width(op.x))
                program.norm(out, place(op.x), self._vector(op.weight), op.width, op.eps)
            case JoinedLinear():
                weights = [self._matrix(part.weight) for part in op.parts]
                biases = [self._vector(part.bias) for part in op.parts]
                outs = [self._new(part.out, self._shape(part.weight)[0]) for part in op.parts]
                program.linear(place(op.x), weights, biases, outs, False)
            case ResidualLinear():
                program.linear(place(op.x), [self._matrix(op.weight)], [self._vector(op.bias)], [place(op.base)], True)
                self._places[op.out] = self._places.pop(op.base)
            case GatedLinear():
                out = self._new(op.out, self._shape(op.gate)[0])
                program.gated_linear(out, place(op.x), self._matrix(op.gate), self._matrix(op.up), op.kind)
            case Rope(spec=spec):
                out = self._new(op.out, width(op.x))
                frequencies, interleaved = list(spec.inverse_frequencies), spec.layout == "interleaved"
                program.rotate(out, place(op.x), spec.head_dim, frequencies, interleaved, spec.magnitude)
            case PagedAttention():
                out, values = self._new(op.out, width(op.q)), (place(op.q), place(op.k), place(op.v))
                shape = (op.layer, op.heads, op.kv_heads, op.head_dim)
                program.attend(out, *values, *shape, op.scale, op.window or 0)
            case GatedActivation():
                program.gate(self._new(op.out, width(op.up)), place(op.gate), place(op.up), op.kind)
            case Add():
                program.add(self._new(op.out, width(op.a)), place(op.a), place(op.b))
            case Logits():
                program.head(place(op.x), self._matrix(op.weight))
            case _:
                raise InvariantBroken(f"{op} was not lowered")

    def _new(self, value: Value, width: int) -> int:
        free = self._free.get(width)
        if free:
            place = free.pop()
        else:
            place, self._place_count = self._place_count, self._place_count + 1
        self._places[value] = place, width
        return place

    def _place(self, value: Value) -> int:
        return self._places[value][0]

    def _width(self, value: Value) -> int:
        return self._places[value][1]

    def _vector(self, name: Weight | None) -> FloatArray | None:
        return None if name is None else np.ascontiguousarray(self._vectors(name), np.float32)

    def _matrix(self, name: Weight) -> object:
        if name not in self._packed:
            weight = self._matrices(name)
            self._packed[name] = _pack(self._module, weight), weight.shape
        return self._packed[name][0]

    def _shape(self, name: Weight) -> tuple[int, int]:
        self._matrix(name)
        return self._packed[name][1]


def _pack(module: ModuleType, weight: PackedWeight) -> object:
    matrix = module.Matrix(weight.encoding, *weight.shape, weight.half, weight.minima, weight.splits)
    for slab in weight.slabs:
        if isinstance(slab, Groups):
            matrix.put_groups(slab.first, slab.codes, slab.scales, slab.minima)
        elif slab.rows.dtype == np.float32:
            matrix.put_numbers(slab.first, slab.rows)
        else:
            matrix.put_bits(slab.first, slab.rows)
    return matrix
