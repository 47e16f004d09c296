"""What the native executor promises beyond the common suite (``test_reference``): bits that depend on a position alone,
closeness to the reference on real weights, refusals."""

import dataclasses
import itertools
import sys
import threading
import time

import numpy as np
import pytest

from branchline.base.errors import ConfigError, InvariantBroken
from branchline.memory.kernel_kv import KernelKvPool
from branchline.models.quants import dequantize
from branchline.models.random import RandomCheckpoint, tiny_config
from branchline.models.registry import build_graph
from branchline.models.repack import repack
from branchline.ops import native as face
from branchline.ops.batch import Batch
from branchline.ops.graph import Add, Embed, GatedActivation, Graph, Linear, Logits, Norm
from branchline.ops.lower import GatedLinear, JoinedLinear, ResidualLinear, lower
from branchline.ops.native import NativeExecutor
from tests.support.columns import columns, scored
from tests.support.executors import NATIVE, executor_with_pool, make_batch, make_executor, make_pool

needs_kernels = pytest.mark.skipif(not NATIVE, reason="the native kernels were not built")
PAGE = 16


def rows_batch(*rows):
    """Rows of (tokens, start, first page); each owns the pages from there on."""
    return make_batch(
        [(tokens, start, range(page, page - (-(start + len(tokens)) // PAGE))) for tokens, start, page in rows]
    )


def rows_alone(tokens):
    """Every token at the beginning of a row of its own."""
    return rows_batch(*(([token], 0, page) for page, token in enumerate(tokens)))


@pytest.fixture(scope="module")
def text_tokens():
    return np.random.default_rng(0).integers(100, 30_000, 150).tolist()


@pytest.fixture(scope="module")
def real(default_checkpoint):
    return executor_with_pool(NATIVE[0], default_checkpoint, page_size=PAGE, page_count=64)


# ---------------------------------------------------------------- bits


@needs_kernels
def test_bits_do_not_depend_on_chunks_or_neighbours(real, text_tokens):
    whole = real.forward(rows_batch((text_tokens, 0, 0)))
    cuts = [0, 1, 2, 17, 64, 65, 148, 149, 150]
    parts = [real.forward(rows_batch((text_tokens[a:b], a, 20))) for a, b in itertools.pairwise(cuts)]
    assert (np.concatenate(parts) == whole).all()
    real.forward(rows_batch((text_tokens[:100], 0, 40)))
    mixed = real.forward(rows_batch((text_tokens[::-1], 0, 20), (text_tokens[100:], 100, 40), ([7], 0, 60)))
    assert (mixed[150:200] == whole[100:]).all()


@needs_kernels
def test_bits_do_not_depend_on_threads(default_checkpoint, real, text_tokens):
    batch = rows_batch((text_tokens[:40], 0, 0), (text_tokens[40:41], 0, 10))
    expected = real.forward(batch)
    for threads in (1, 3):
        other = executor_with_pool(NATIVE[0], default_checkpoint, page_size=PAGE, page_count=64, threads=threads)
        assert (other.forward(batch) == expected).all()
        assert (other.logits(expected[-2:]) == real.logits(expected[-2:])).all()


@needs_kernels
@pytest.mark.parametrize("name", NATIVE)
def test_bits_do_not_depend_on_the_instruction_set(name, default_checkpoint, real, text_tokens):
    other = executor_with_pool(name, default_checkpoint, page_size=PAGE, page_count=64)
    batch = rows_batch((text_tokens[:70], 0, 0))
    hidden = other.forward(batch)
    assert (hidden == real.forward(batch)).all()
    for wish in ({}, {"temperature": 0.8, "top_p": 0.95, "logprobs": 3}):
        batch, how = rows_alone(text_tokens[:60]), columns(60, 49_152, **wish)
        found, expected = (of.prepare(batch, how, scored())().choices for of in (other, real))
        assert (found.tokens == expected.tokens).all()
        assert (found.top_logprobs == expected.top_logprobs).all()


@needs_kernels
def test_greedy_is_the_largest_logit_below_the_limit(real, text_tokens):
    batch = rows_alone(text_tokens[:30])
    logits = real.logits(real.forward(batch))
    for limit in (1, 7, 1000, 1024, 1025, 49_151, 49_152):
        found = real.prepare(batch, columns(30, limit), scored())().choices
        assert found.tokens.tolist() == logits[:, :limit].argmax(axis=1).tolist()


# ---------------------------------------------------------------- closeness


@needs_kernels
def test_distributions_are_close_to_those_of_the_reference(default_checkpoint, real, text_tokens):
    """Rounding inputs to bytes is all that differs. (On real text the mean is under 0.005, see docs/performance.md.)"""
    reference = executor_with_pool("reference", default_checkpoint, page_size=PAGE, page_count=64)
    batch = rows_batch((text_tokens, 0, 0))
    expected, found = (_log_softmax(of.logits(of.forward(batch))) for of in (reference, real))
    divergence = (np.exp(expected) * (expected - found)).sum(axis=1)
    assert divergence.mean() < 0.01
    assert divergence.min() > -1e-6


def _log_softmax(logits):
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


# ---------------------------------------------------------------- lowering


def test_lowering_joins_gates_and_sums():
    llama = RandomCheckpoint(tiny_config("llama"))
    kinds = [type(op).__name__ for op in lower(build_graph(llama.config, llama.names))]
    layer = [
        "Norm",
        "JoinedLinear",
        "Rope",
        "Rope",
        "PagedAttention",
        "ResidualLinear",
        "Norm",
        "GatedLinear",
        "ResidualLinear",
    ]
    assert kinds == ["Embed", *layer, *layer, "Norm", "Logits"]


def test_lowering_leaves_alone_what_is_read_again():
    ops = (
        Embed("x", "e"),
        Linear("a", "x", "wa"),
        Linear("b", "x", "wb"),
        GatedActivation("g", "a", "b"),
        Add("y", "a", "g"),  # reads a gate once more: no GatedLinear
        Linear("h", "y", "wh"),
        Add("z", "y", "h"),
        Add("z", "z", "y"),  # reads the base once more: no ResidualLinear
        Logits("l", "z", "e"),
    )
    lowered = lower(Graph(ops, layers=1, kv_heads=1, head_dim=1, vocab_size=1))
    assert not any(isinstance(op, GatedLinear | ResidualLinear) for op in lowered)
    assert sum(isinstance(op, JoinedLinear) for op in lowered) == 2


@needs_kernels
def test_a_graph_that_cannot_be_fused_computes_the_same():
    """Gate and up the other way round, a residual that is read again, a value overwritten by its own linear."""
    llama = RandomCheckpoint(tiny_config("llama"), seed=4)
    blk = "blk.0"
    ops = (
        Embed("x", "token_embd.weight"),
        Norm("h", "x", f"{blk}.attn_norm.weight", 32, 1e-5),
        Linear("up", "h", f"{blk}.ffn_up.weight"),
        Linear("gate", "h", f"{blk}.ffn_gate.weight"),
        GatedActivation("h", "gate", "up"),
        Add("up", "up", "gate"),
        Add("h", "h", "up"),
        Linear("h", "h", f"{blk}.ffn_down.weight"),
        Add("y", "x", "h"),
        Linear("y", "y", f"{blk}.attn_q.weight"),
        Add("x", "x", "y"),
        Logits("l", "x", "token_embd.weight"),
    )
    graph = dataclasses.replace(build_graph(llama.config, llama.names), ops=ops)
    batch = rows_batch(([1, 2, 3], 0, 0))
    found = []
    for name in ("reference", *NATIVE):
        pool = make_pool(name, layers=2, kv_heads=2, head_dim=8, page_size=PAGE, page_count=4)
        found.append(make_executor(name, graph, llama, pool).forward(batch))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- refusals


@needs_kernels
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": np.array([1, 264])}, "token id"),
        ({"tokens": np.array([-1, 2])}, "token id"),
        ({"positions": np.array([0, 2])}, "consecutive"),
        ({"positions": np.array([-1, 0])}, "page table"),
        ({"positions": np.array([63, 64])}, "too short"),
        ({"page_tables": np.array([[4, 0, 0, 0]])}, "names no page"),
        ({"page_tables": np.array([[-1, 0, 0, 0]])}, "names no page"),
        ({"row_offsets": np.array([0, 1])}, "cover"),
        ({"row_offsets": np.array([0, 2, 2])}, "fit each other"),
    ],
)
def test_steps_that_would_leave_memory_are_refused(change, words):
    executor = executor_with_pool(NATIVE[0], RandomCheckpoint(tiny_config("llama")), page_size=PAGE, page_count=4)
    good = Batch(np.array([1, 2]), np.array([0, 1]), np.array([0, 2]), np.array([[0, 1, 2, 3]]))
    expected, bad = executor.forward(good), dataclasses.replace(good, **change)
    with pytest.raises(ValueError, match=words):
        executor.forward(bad)
    with pytest.raises(ValueError, match=words):
        executor.prepare(bad, columns(1, 264), scored())()
    assert (executor.forward(good) == expected).all()


@needs_kernels
@pytest.mark.parametrize("tokens", [np.array([1, 2], np.int32), np.array([1, 0, 2])[::2]], ids=str)
def test_arrays_that_would_have_to_be_copied_are_refused(tokens):
    """A token that is written later would not be seen."""
    executor = executor_with_pool(NATIVE[0], RandomCheckpoint(tiny_config("llama")), page_size=PAGE, page_count=4)
    with pytest.raises(TypeError, match="tokens is not of the right type"):
        executor.prepare(Batch(tokens, np.array([0, 1]), np.array([0, 2]), np.array([[0]])), columns(1, 264), scored())


@needs_kernels
@pytest.mark.parametrize(
    ("how", "asked", "words"),
    [
        (columns(2, 264), scored(), "no such row"),
        (dataclasses.replace(columns(1, 264), row=np.array([-1])), scored(), "no such row"),
        (columns(1, 265), scored(), "no such ids"),
        (columns(0, 0), scored(), "no such ids"),
        (columns(1, 264), scored([2], [5], [0]), "no such position"),
        (columns(1, 264), scored([-1], [5], [0]), "no such position"),
        (columns(1, 264), scored([1], [5], [-1]), "fewer than no"),
        (columns(1, 264), scored([0, 1], [5], [0]), "equally long"),
    ],
    ids=str,
)
def test_questions_that_would_leave_memory_are_refused(how, asked, words):
    executor = executor_with_pool(NATIVE[0], RandomCheckpoint(tiny_config("llama")), page_size=PAGE, page_count=4)
    batch = Batch(np.array([1, 2]), np.array([0, 1]), np.array([0, 2]), np.array([[0]]))
    with pytest.raises(ValueError, match=words):
        executor.prepare(batch, how, asked)()
    assert executor.prepare(batch, columns(1, 264), scored([0, 1], [5, 6], [0, 3]))().finite.tolist() == [True]


def test_without_kernels_the_executor_says_why(monkeypatch):
    monkeypatch.setattr(face, "kernels", lambda: "No module named 'branchline._native'")
    assert face.usable_isas() == ()
    with pytest.raises(ConfigError, match="no native kernels in this installation"):
        executor_with_pool("native-avx2", RandomCheckpoint(tiny_config("llama")), page_size=4, page_count=4)


@needs_kernels
def test_instruction_sets_of_other_processors_are_refused():
    with pytest.raises(ConfigError, match="no native kernels for amx"):
        executor_with_pool("native-amx", RandomCheckpoint(tiny_config("llama")), page_size=4, page_count=4)


@needs_kernels
def test_graph_and_pool_must_fit():
    llama = RandomCheckpoint(tiny_config("llama"))
    pool = KernelKvPool(layers=1, kv_heads=1, head_dim=8, page_size=4, page_count=4, kv_dtype="bf16")
    with pytest.raises(InvariantBroken, match="not made for this graph"):
        NativeExecutor(
            build_graph(llama.config, llama.names), lambda name: repack(llama.tensor(name)),
            lambda name: dequantize(llama.tensor(name)), pool, threads=1,
        )  # fmt: skip


@needs_kernels
def test_other_python_threads_run_while_a_step_does(real, text_tokens):
    """Nobody is ever forced to give up the interpreter's lock here, so the other thread gets on only if the step does."""
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0.0001)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = counted[0]
        for _ in range(3):
            real.forward(rows_batch((text_tokens, 0, 0)))
        after = counted[0]
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert after - before >= 3
