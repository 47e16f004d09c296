"""All executors against an implementation without pages, batches or tricks: one token after another, the
whole attention matrix, float64."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from branchline.base.errors import InvariantBroken
from branchline.core.plan import PageCopy
from branchline.memory.kv import KvPool
from branchline.models.config import RopeConfig
from branchline.models.quants import dequantize
from branchline.models.random import RandomCheckpoint, tiny_config
from branchline.models.registry import build_graph
from branchline.ops.batch import NOT_FINITE
from branchline.ops.graph import GatedActivation, Graph
from branchline.ops.reference import ReferenceExecutor
from tests.support.columns import columns, scored
from tests.support.executors import EXECUTORS, make_batch, make_executor, make_pool

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


# ---------------------------------------------------------------- the dumb twin


class Dense:
    """The transformer of the papers, from the configuration alone: it never sees the operator graph."""

    def __init__(self, checkpoint: RandomCheckpoint) -> None:
        self.config = checkpoint.config
        self.weights = {name: dequantize(checkpoint.tensor(name)).astype(np.float64) for name in checkpoint.names}

    def logits(self, tokens: list[int]) -> np.ndarray:
        config, w = self.config, self.weights
        x = np.stack([w["token_embd.weight"][token] for token in tokens])
        for layer in range(config.layers):
            part = {name.split(".", 2)[2]: value for name, value in w.items() if name.startswith(f"blk.{layer}.")}
            x = x + self.attention(part, self.norm(x, part["attn_norm.weight"]))
            h = self.norm(x, part["ffn_norm.weight"])
            gate, up = h @ part["ffn_gate.weight"].T, h @ part["ffn_up.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ part["ffn_down.weight"].T
        head = w["token_embd.weight" if config.tied_embeddings else "output.weight"]
        return self.norm(x, w["output_norm.weight"]) @ head.T

    def norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return np.stack([row / math.sqrt(np.mean(row**2) + self.config.norm_eps) * weight for row in x])

    def attention(self, part: dict, h: np.ndarray) -> np.ndarray:
        config, count = self.config, len(h)
        q, k, v = (self.heads(part, h, name) for name in "qkv")
        out = np.zeros((count, config.heads, config.head_dim))
        for head in range(config.heads):
            shared = head // (config.heads // config.kv_heads)
            for here in range(count):
                first = 0 if config.sliding_window is None else max(0, here - config.sliding_window + 1)
                scores = np.array([q[here, head] @ k[there, shared] for there in range(first, here + 1)])
                weights = np.exp(scores / math.sqrt(config.head_dim))
                out[here, head] = weights @ v[first : here + 1, shared] / weights.sum()
        return out.reshape(count, -1) @ part["attn_output.weight"].T

    def heads(self, part: dict, h: np.ndarray, name: str) -> np.ndarray:
        flat = h @ part[f"attn_{name}.weight"].T + part.get(f"attn_{name}.bias", 0)
        heads = flat.reshape(len(h), -1, self.config.head_dim)
        if name == "v":
            return heads
        if self.config.qk_norm:
            heads = np.stack([self.norm(row, part[f"attn_{name}_norm.weight"]) for row in heads])
        return np.stack([[self.rotate(head, position) for head in row] for position, row in enumerate(heads)])

    def rotate(self, head: np.ndarray, position: int) -> np.ndarray:
        rope, out = self.config.rope, head.copy()
        for i in range(rope.rotary_dim // 2):
            pair = (2 * i, 2 * i + 1) if rope.layout == "interleaved" else (i, i + rope.rotary_dim // 2)
            angle = position * rope.theta ** (-2 * i / rope.rotary_dim)
            a, b = head[list(pair)]
            out[list(pair)] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
        return out


# ---------------------------------------------------------------- driving the executor


class Bench:
    """An executor with page tables handed out in shuffled order."""

    def __init__(
        self,
        kind: str,
        checkpoint: RandomCheckpoint,
        page_size: int,
        page_count: int = 256,
        seed: int = 0,
        graph: Graph | None = None,
    ) -> None:
        graph = graph or build_graph(checkpoint.config, checkpoint.names)
        self.pool = make_pool(kind, **graph.kv_shape, page_size=page_size, page_count=page_count)
        self.executor = make_executor(kind, graph, checkpoint, self.pool)
        self.free = list(np.random.default_rng(seed).permutation(page_count))

    def pages(self, token_count: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-token_count // self.pool.page_size))]

    def run(self, *rows: tuple[list[int], int, list[int]]) -> list[np.ndarray]:
        """Rows of (new tokens, start, pages); logits of all their positions."""
        batch = make_batch(rows)
        hidden = self.executor.forward(batch)
        logits = self.executor.logits(hidden)
        assert logits.dtype == np.float32
        parts, last = np.split(logits, batch.row_offsets[1:-1]), logits[batch.row_offsets[1:] - 1]
        outcome = self.executor.prepare(batch, columns(len(rows), 100), scored())()
        assert outcome.finite.tolist() == [bool(np.isfinite(part).all()) for part in parts]
        best = np.where(np.isfinite(last).all(axis=1), last[:, :100].argmax(axis=1), NOT_FINITE)
        assert outcome.choices.tokens.tolist() == best.tolist()
        return parts

    def run_in_chunks(self, tokens: list[int], cuts: list[int]) -> np.ndarray:
        pages, edges = self.pages(len(tokens)), [0, *cuts, len(tokens)]
        parts = [self.run((tokens[a:b], a, pages))[0] for a, b in itertools.pairwise(edges)]
        return np.concatenate(parts)


def prompt(length: int, seed: int, vocab_size: int = 264) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


def assert_same(logits: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(logits - expected).max() < 1e-4
    assert (logits.argmax(axis=-1) == expected.argmax(axis=-1)).all()


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request):
    return RandomCheckpoint(tiny_config(request.param), seed=7)


@pytest.fixture(params=EXECUTORS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def dense(checkpoint):
    return Dense(checkpoint)


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_whole_prompt_equals_dense(kind, checkpoint, dense, page_size):
    tokens = prompt(45, seed=1)
    assert_same(Bench(kind, checkpoint, page_size).run_in_chunks(tokens, []), dense.logits(tokens))


@pytest.mark.parametrize("cuts", [[1], [16, 32], [7, 8, 9, 40], list(range(1, 45))])
def test_chunks_equal_dense(kind, checkpoint, dense, cuts):
    tokens = prompt(45, seed=2)
    assert_same(Bench(kind, checkpoint, 3).run_in_chunks(tokens, cuts), dense.logits(tokens))


def test_odd_sizes_equal_dense(kind):
    config = tiny_config("llama", hidden=30, heads=9, kv_heads=3, head_dim=10, ffn=37, vocab_size=101, layers=3)
    rope = RopeConfig(rotary_dim=6, layout="half")
    odd = RandomCheckpoint(dataclasses.replace(config, rope=rope), seed=3)
    tokens = prompt(29, seed=4, vocab_size=101)
    assert_same(Bench(kind, odd, 5).run_in_chunks(tokens, [13, 14]), Dense(odd).logits(tokens))


def test_mixed_batch_equals_each_row_alone(kind, checkpoint, dense):
    bench = Bench(kind, checkpoint, 3)
    sequences = [prompt(length, seed=10 + length) for length in (1, 2, 9, 30, 31, 60)]
    expected = [dense.logits(tokens) for tokens in sequences]
    pages = [bench.pages(len(tokens)) for tokens in sequences]
    starts = [0, 1, 4, 29, 0, 59]
    for tokens, start, table in zip(sequences, starts, pages, strict=True):
        if start:
            bench.run((tokens[:start], 0, table))
    rows = [(tokens[start:], start, table) for tokens, start, table in zip(sequences, starts, pages, strict=True)]
    for logits, start, whole in zip(bench.run(*rows), starts, expected, strict=True):
        assert_same(logits, whole[start:])


def test_many_decode_rows_of_all_lengths(kind, checkpoint):
    """More rows than a tile and more positions than a block, against one-row steps."""
    bench = Bench(kind, checkpoint, 16, page_count=700)
    lengths = [1, 2, 127, 128, 129, 255, 256, 257, *range(3, 110, 3)]
    sequences = [prompt(length, seed=length) for length in lengths]
    pages = [bench.pages(length) for length in lengths]
    alone = []
    for tokens, table in zip(sequences, pages, strict=True):
        alone.append(bench.run((tokens, 0, table))[0][-1])
    rows = [(tokens[-1:], len(tokens) - 1, table) for tokens, table in zip(sequences, pages, strict=True)]
    for logits, expected in zip(bench.run(*rows), alone, strict=True):
        assert_same(logits, expected[None])


def test_long_rows_span_tiles_and_blocks(kind, checkpoint, dense):
    """Longer than a tile of queries and two blocks of keys; with a window, early blocks are left out altogether."""
    tokens = prompt(300, seed=5)
    expected = dense.logits(tokens)
    bench = Bench(kind, checkpoint, 16)
    assert_same(bench.run_in_chunks(tokens, []), expected)
    assert_same(bench.run_in_chunks(tokens, [100, 101, 298, 299]), expected)


def test_page_copy_shares_to_the_token(kind, checkpoint, dense):
    bench = Bench(kind, checkpoint, 16)
    first, second = prompt(40, seed=6), prompt(40, seed=7)
    second[:21] = first[:21]
    bench.run((first, 0, pages := bench.pages(40)))
    fork = [pages[0], *bench.pages(24)]
    bench.executor.copy_pages([PageCopy(pages[1], fork[1], 5)])
    assert_same(bench.run((second[21:], 21, fork))[0], dense.logits(second)[21:])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poisoned_row_hurts_nobody_else(kind, checkpoint, dense, poison):
    """Pages keep what their last owner left, page 0 (which pads tables) included."""
    bench = Bench(kind, checkpoint, 4)
    bench.pool.data.view(np.float32).fill(poison)
    tokens = prompt(18, seed=8)
    stale = bench.pages(2)
    poisoned, healthy, decoded = bench.run(([1], 1, stale), (tokens, 0, bench.pages(18)), ([5], 0, bench.pages(1)))
    assert np.isnan(poisoned).all()
    assert_same(healthy, dense.logits(tokens))
    assert_same(decoded, dense.logits([5]))


def test_gelu_gate(kind):
    llama = RandomCheckpoint(tiny_config("llama"))
    graph = build_graph(llama.config, llama.names)
    ops = tuple(dataclasses.replace(op, kind="gelu_tanh") if isinstance(op, GatedActivation) else op for op in graph.ops)
    bench = Bench(kind, llama, 16)
    plain = bench.run(([3], 0, bench.pages(1)))[0]
    bench = Bench(kind, llama, 16, graph=dataclasses.replace(graph, ops=ops))
    changed = bench.run(([3], 0, bench.pages(1)))[0]
    dense = Dense(llama)
    tanh = math.tanh
    gelu = np.vectorize(lambda x: 0.5 * x * (1 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
    w, x = dense.weights, dense.weights["token_embd.weight"][[3]]
    for layer in range(llama.config.layers):
        part = {name.split(".", 2)[2]: value for name, value in w.items() if name.startswith(f"blk.{layer}.")}
        x = x + dense.attention(part, dense.norm(x, part["attn_norm.weight"]))
        h = dense.norm(x, part["ffn_norm.weight"])
        x = x + (gelu(h @ part["ffn_gate.weight"].T) * (h @ part["ffn_up.weight"].T)) @ part["ffn_down.weight"].T
    assert_same(changed, dense.norm(x, w["output_norm.weight"]) @ w["token_embd.weight"].T)
    assert not np.allclose(plain, changed, atol=1e-3)


def test_source_may_take_its_weights_back(checkpoint):
    """The executor keeps copies: scribbling over what the source gave changes nothing."""
    given = {}

    def source(name):
        given[name] = dequantize(checkpoint.tensor(name)).copy()
        return given[name]

    graph = build_graph(checkpoint.config, checkpoint.names)
    bench = Bench("reference", checkpoint, 16)
    bench.executor = ReferenceExecutor(graph, source, bench.pool)
    before = bench.run(([1, 2, 3], 0, bench.pages(3)))[0]
    for array in given.values():
        array.fill(math.nan)
    assert (bench.run(([1, 2, 3], 0, bench.pages(3)))[0] == before).all()
    assert set(given) == set(graph.weights)


def test_graph_and_pool_must_fit(checkpoint):
    graph = build_graph(checkpoint.config, checkpoint.names)
    pool = KvPool(layers=1, kv_heads=1, head_dim=8, page_size=4, page_count=4)
    with pytest.raises(InvariantBroken, match="not made for this graph"):
        ReferenceExecutor(graph, lambda name: dequantize(checkpoint.tensor(name)), pool)
