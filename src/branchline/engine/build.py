"""The composition root: the one place that knows concrete parts. It reads top-down: look at the model and the machine,
derive what the configuration leaves open, make the parts, hand them to the loop.
"""

import dataclasses
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from branchline.base.clock import NS_PER_S, Clock
from branchline.base.config import EngineConfig
from branchline.base.errors import ConfigError, InvariantBroken
from branchline.base.machine import Machine
from branchline.core.ports import Observer, Worker
from branchline.core.stats import EngineStats
from branchline.engine.answers import Answers
from branchline.engine.books import make_books
from branchline.engine.loading import Loading
from branchline.engine.loop import Loop
from branchline.engine.ports import Inbox, Outbox
from branchline.memory import kernel_kv, kv
from branchline.memory.kernel_kv import KernelKvPool
from branchline.memory.kv import FloatArray, KvPool
from branchline.models.checkpoint import Checkpoint
from branchline.models.registry import build_graph
from branchline.models.repack import can_round, repack, to_floats
from branchline.models.shapes import weight_shapes
from branchline.models.source import open_checkpoint
from branchline.observe.stories import Stories
from branchline.ops.batch import Executor
from branchline.ops.graph import Graph
from branchline.ops.native import NativeExecutor, usable_isas
from branchline.ops.packed import PackedWeight
from branchline.ops.reference import ReferenceExecutor
from branchline.sched.scheduler import Scheduler
from branchline.sim.record import NoRecorder, Recorder, open_recorder
from branchline.wire.messages import ModelFacts
from branchline.worker.runner import LocalWorker

IDLE_NS = NS_PER_S // 4
"""Longest sleep of an idle loop: how soon it notices that it shall stop."""
HOW_TO_BUILD = "Install a C++20 compiler (g++ 11 or clang 14, or later) and install branchline again."
KV_SHARE = 0.25
"""Share of the available memory that KV pages may take unless `pages` says otherwise."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of, for those who want to look inside (tests, `doctor`)."""

    config: EngineConfig
    facts: ModelFacts
    scheduler: Scheduler
    worker: Worker
    recorder: Recorder | NoRecorder


class Engine:
    """A loop that runs until it is told to stop. One thread runs it; any thread may stop it or ask for its stats."""

    def __init__(self, parts: Parts, loop: Loop) -> None:
        self.parts = parts
        self._loop = loop
        self._stopping = threading.Event()
        self._photograph = loop.stats()

    @property
    def facts(self) -> ModelFacts:
        return self.parts.facts

    def run(self) -> None:
        """Serve until :meth:`stop`. Then the steps in flight are finished and everyone left is told.

        Raises:
            InvariantBroken: the books do not add up; everyone has been told, nothing can be trusted any more.
        """
        try:
            while not self._stopping.is_set():
                if not self._loop.turn():
                    self._loop.idle(IDLE_NS)
                self._photograph = self._loop.stats()
            self._loop.finish_steps()
            self._loop.abandon("The server is shutting down.")
        except InvariantBroken:
            self._loop.abandon("The engine failed.")
            raise

    def stop(self) -> None:
        """From any thread or signal handler; idempotent."""
        self._stopping.set()

    def stats(self) -> EngineStats:
        """A photograph of the last turn. From any thread, also while a step hangs."""
        recorder = self.parts.recorder
        return msgspec.structs.replace(
            self._photograph, step_started_ns=self._loop.step_started_ns,
            journal_bytes=recorder.bytes_written, journal_lost=recorder.lost_records,
        )  # fmt: skip

    def close(self) -> None:
        self.parts.worker.close()


def build_engine(
    config: EngineConfig,
    *,
    cache_dir: str,
    inbox: Inbox,
    outbox: Outbox,
    clock: Clock,
    observers: Sequence[Observer] = (),
    checkpoint: Checkpoint | None = None,
) -> Engine:
    """Make an engine. ``checkpoint`` saves opening ``config.model`` once more.

    Raises:
        ModelError: the model cannot be found, read or run.
        ConfigError: the settings contradict each other, the model or the machine.
    """
    checkpoint = checkpoint or open_checkpoint(config.model, cache_dir, announce)
    graph = build_graph(checkpoint.config, checkpoint.names)
    config = derive(config, checkpoint, graph, Machine.look())
    facts = _facts(config, checkpoint)
    recorder = open_recorder(config, facts)
    doors = recorder.doors(clock, inbox, _make_worker(config, checkpoint, graph, clock))
    ledger, cache = make_books(config)
    stories = Stories()
    scheduler = Scheduler(config, ledger, cache, (stories, *observers))
    loop = Loop(scheduler, doors.worker, doors.inbox, outbox, doors.clock, config.depth, Answers(scheduler, stories))
    return Engine(Parts(config, facts, scheduler, doors.worker, recorder), loop)


def derive(config: EngineConfig, checkpoint: Checkpoint, graph: Graph, machine: Machine) -> EngineConfig:
    """Fill in what the configuration leaves to the model and the machine.

    Raises:
        ConfigError: the model's context is shorter than asked for, or there is no memory for even one page.
    """
    trained = checkpoint.config.context_length
    context = config.context_length or trained
    if context > trained:
        raise ConfigError(f"context_length {context} is more than the model's {trained}")
    executor, isa = choose_executor(config, usable_isas())
    config = dataclasses.replace(
        config, context_length=context, threads=config.threads or machine.cpus, executor=executor, isa=isa,
        kv_dtype=choose_kv_dtype(config.kv_dtype, executor),
    )  # fmt: skip
    pages = config.pages or default_pages(config, graph, context, machine)
    if pages < 1:
        raise ConfigError("there is not enough memory for the KV cache; set `pages` to try all the same")
    return dataclasses.replace(config, pages=pages)


def choose_executor(config: EngineConfig, usable: Sequence[str]) -> tuple[str, str]:
    """Name of the executor and its instruction set, given those that native kernels can use here, best first.

    Raises:
        ConfigError: what was asked for is not to be had here.
    """
    if config.executor == "reference" or (config.executor == "auto" and not usable and config.isa == "auto"):
        return "reference", "auto"
    if not usable:
        raise ConfigError(f"this installation has no native kernels. {HOW_TO_BUILD}")
    if config.isa not in ("auto", *usable):
        raise ConfigError(f"there are no native kernels for {config.isa} here, only for {', '.join(usable)}")
    return "native", usable[0] if config.isa == "auto" else config.isa


def choose_kv_dtype(asked: str, executor: str) -> str:
    """Raises ConfigError if the executor keeps no such numbers."""
    if executor == "native":
        return "bf16" if asked == "auto" else asked
    if asked not in ("auto", "f32"):
        raise ConfigError(f"the reference executor keeps keys and values as f32, not as {asked}")
    return "f32"


def default_pages(config: EngineConfig, graph: Graph, context: int, machine: Machine) -> int:
    """A quarter of the available memory, but not more than every row could ever use."""
    most_useful = config.max_running * -(-context // config.page_size)
    return min(most_useful, int(machine.available_bytes * KV_SHARE) // bytes_per_page(config, graph))


def bytes_per_page(config: EngineConfig, graph: Graph) -> int:
    """Memory of one KV page, all layers, under a configuration that is derived."""
    shape = {**graph.kv_shape, "page_size": config.page_size}
    if config.executor == "native":
        return kernel_kv.bytes_per_page(**shape, kv_dtype=config.kv_dtype)
    return kv.bytes_per_page(**shape)


def announce(sentence: str) -> None:
    """Something slow begins: tell the person at the terminal."""
    print(f"branchline: {sentence}", file=sys.stderr, flush=True)


def _make_worker(config: EngineConfig, checkpoint: Checkpoint, graph: Graph, clock: Clock) -> Worker:
    matrices = (shape for shape in weight_shapes(checkpoint.config).values() if len(shape) == 2)
    with Loading(sum(out * width for out, width in matrices), clock) as loading:
        executor = _make_executor(config, checkpoint, graph, loading)
    token_limit = checkpoint.tokenizer.usable_ids
    return LocalWorker(executor, token_limit=token_limit, threads=config.threads or 1, clock=clock)


def _make_executor(config: EngineConfig, checkpoint: Checkpoint, graph: Graph, loading: Loading) -> Executor:
    def matrix(name: str) -> PackedWeight:
        return loading.watch(repack(checkpoint.tensor(name), config.quantize))

    def floats(name: str) -> FloatArray:
        return to_floats(checkpoint.tensor(name), config.quantize)

    if config.quantize and not any(can_round(checkpoint.tensor(name)) for name in checkpoint.names):
        announce(f"quantize {config.quantize} changes nothing: no weights are F32, F16 or BF16 in whole groups of 32.")
    shape = {**graph.kv_shape, "page_size": config.page_size, "page_count": config.pages or 0}
    if config.executor == "native":
        pool = KernelKvPool(**shape, kv_dtype=config.kv_dtype)
        return NativeExecutor(graph, matrix, floats, pool, threads=config.threads or 1, isa=config.isa)
    if not usable_isas():
        announce(f"computing with the slow reference executor: this installation has no native kernels. {HOW_TO_BUILD}")
    return ReferenceExecutor(graph, floats, KvPool(**shape))


def _facts(config: EngineConfig, checkpoint: Checkpoint) -> ModelFacts:
    context, pages = config.context_length or 0, config.pages or 0
    executor = f"native ({config.isa})" if config.executor == "native" else "reference (numpy, float32)"
    return ModelFacts(
        name=checkpoint.config.name,
        digest=f"{checkpoint.digest}-{config.quantize}" if config.quantize else checkpoint.digest,  # their KV differs
        vocab_size=checkpoint.tokenizer.usable_ids,
        context_length=context,
        max_prompt_tokens=min(context, pages * config.page_size) - 1,
        executor=f"{executor}, {config.quantize} weights" if config.quantize else executor,
    )
