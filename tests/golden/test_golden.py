"""The reference executor and the default model against Hugging Face transformers (``make_golden.py`` made the file)."""

from pathlib import Path

import numpy as np
import pytest

from branchline.base.clock import MonotonicClock
from branchline.core.plan import PlanRow, SlotOpen, StepPlan
from branchline.core.request import SamplingParams
from branchline.memory.kv import KvPool
from branchline.models.quants import dequantize
from branchline.models.registry import build_graph
from branchline.ops.batch import Batch
from branchline.ops.reference import ReferenceExecutor
from branchline.worker.runner import LocalWorker

PAGE_SIZE, PAGES_PER_ROW = 16, 64


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).with_name("smollm2.npz")) as file:
        return dict(file)


@pytest.fixture(scope="module")
def prompts(golden):
    return [part.tolist() for part in np.split(golden["prompt_tokens"], golden["prompt_offsets"][1:-1])]


@pytest.fixture(scope="module")
def executor(default_checkpoint):
    graph = build_graph(default_checkpoint.config, default_checkpoint.names)
    pool = KvPool(**graph.kv_shape, page_size=PAGE_SIZE, page_count=20 * PAGES_PER_ROW)
    return ReferenceExecutor(graph, lambda name: dequantize(default_checkpoint.tensor(name)), pool)


def table(row):
    return tuple(range(row * PAGES_PER_ROW, (row + 1) * PAGES_PER_ROW))


def test_the_prompts_are_what_they_should_be(golden, prompts):
    lengths = [len(prompt) for prompt in prompts]
    assert len(prompts) == 20
    assert min(lengths) == 1
    assert max(lengths) > 500
    assert golden["greedy_tokens"].shape == (20, 64)


@pytest.mark.parametrize("row", range(20))
def test_logits_differ_by_less_than_a_thousandth(golden, prompts, executor, row):
    """At the last prompt position and at three positions of the output, with the reference's tokens as input."""
    tokens = np.array(prompts[row] + golden["greedy_tokens"][row].tolist()[:-1], np.intp)
    hidden = executor.forward(Batch(tokens, np.arange(len(tokens)), np.array([0, len(tokens)]), np.array([table(0)])))
    logits = executor.logits(hidden[len(prompts[row]) - 1 + golden["checked"]])
    top = np.take_along_axis(logits, golden["top_ids"][row].astype(np.intp), axis=1)
    assert np.abs(top - golden["top_values"][row]).max() < 1e-3
    assert np.abs(logits[:, golden["random_ids"]] - golden["random_values"][row]).max() < 1e-3


def test_greedy_tokens_are_equal_for_64_steps(golden, prompts, executor):
    """All prompts at once through the worker: chunks of 200 tokens beside decode rows, then 20 decode rows per step."""
    worker = LocalWorker(executor, token_limit=executor.vocab_size, threads=1, clock=MonotonicClock())
    greedy = SamplingParams(temperature=0)
    opens = [SlotOpen(i, i, 0, tuple(prompt), len(prompt), greedy, 0, ()) for i, prompt in enumerate(prompts)]
    computed = [0] * 20
    found = [[] for _ in prompts]
    try:
        for step in range(1, 68):
            rows = []
            for i, prompt in enumerate(prompts):
                count = min(200, max(1, len(prompt) - computed[i]))
                computed[i] += count
                rows.append(PlanRow(i, i, 0, computed[i] - count, count, computed[i] >= len(prompt), table(i)))
            plan = StepPlan(step, tuple(rows), tuple(opens) if step == 1 else ())
            for i, row in enumerate(worker.collect(worker.launch(plan)).rows):
                found[i] += [] if row.token is None else [row.token]
    finally:
        worker.close()
    assert [tokens[:64] for tokens in found] == golden["greedy_tokens"].tolist()
