"""Steps of a tiny random model, timed in process: the plans are those that were designed, and they are right."""

from dataclasses import replace

import numpy as np
import pytest

from branchline.base.errors import ConfigError, StepFailed
from branchline.bench import step
from branchline.bench.cases import WARM_UPS, Case, Work, design
from branchline.bench.limits import Limits
from branchline.bench.step import EXECUTORS, REST, Timing, measure
from branchline.core.result import StepResult
from branchline.models.random import RandomCheckpoint, tiny_config
from branchline.ops.native import usable_isas

BEST_EXECUTORS = ("reference", *(["native"] if usable_isas() else []))
CHECKPOINT = RandomCheckpoint(tiny_config())


def designed(**changes):
    numbers = {"rows": [1, 3], "prompts": [40], "prefixes": [32], "repeats": 2, "page_size": 8, "step_tokens": 32}
    return design(context_length=CHECKPOINT.config.context_length, **numbers | changes)


class Witness:
    """Passes everything on to a worker and remembers it."""

    def __init__(self, worker):
        self.worker = worker
        self.plans = []
        self.results = []

    def launch(self, plan):
        self.plans.append(plan)
        return self.worker.launch(plan)

    def collect(self, ticket):
        self.results.append(self.worker.collect(ticket))
        return self.results[-1]

    def close(self):
        self.worker.close()


@pytest.fixture
def subject():
    made = EXECUTORS["reference"](CHECKPOINT, designed(), 1, False)
    yield replace(made, worker=Witness(made.worker))
    made.worker.close()


def test_every_case_is_timed(subject):
    plan, seen = designed(), []
    timings = measure(subject, plan, seen.append)
    assert [one.case for one in timings] == list(plan.cases) == seen
    for one in timings:
        assert one.median_ns > 0
        assert one.tokens_s == pytest.approx(one.case.rows * one.case.tokens * 1e9 / one.median_ns)
        assert one.flop_s > one.work.flop / 1e3
        assert one.op_ns == {}


def test_decode_rows_share_the_pages_of_the_prefix_and_no_other(subject):
    plan = designed(prompts=[])
    measure(subject, plan)
    decodes = [one for one in subject.worker.plans if len(one.rows) == 3 and all(row.sample for row in one.rows)]
    assert len(decodes) == 2 * (WARM_UPS + plan.repeats)
    for one in decodes:
        shared = 32 // 8 if one.rows[0].start < 128 else 0
        tables = [row.pages for row in one.rows]
        assert len({pages[:shared] for pages in tables}) == 1
        own = [page for pages in tables for page in pages[shared:]]
        assert len(set(own)) == len(own)
        assert not set(own) & set(tables[0][:shared])
        assert all(row.end <= len(row.pages) * 8 for row in one.rows)


def test_a_prompt_is_computed_in_chunks_and_sampled_once(subject):
    plan = designed(rows=[], prefixes=[])
    measure(subject, plan)
    rows = [row for one in subject.worker.plans for row in one.rows if row.count > 1 and row.slot == 0][1:]
    assert [(row.start, row.count, row.sample) for row in rows] == [(0, 32, False), (32, 8, True)] * (WARM_UPS + 2)
    tokens = {one.token for result in subject.worker.results for one in result.rows if one.token is not None}
    assert len(tokens) == 1  # the same prompt again and again


def test_pages_that_are_read_hold_real_numbers(subject):
    measure(subject, designed())
    read, written = set(), set()
    for plan in subject.worker.plans:
        written |= {copy.target for copy in plan.copies} | {
            page for row in plan.rows if not row.start for page in row.pages[:1]
        }
        read |= {page for row in plan.rows for page in row.pages[: -(-row.end // 8)]}
    assert read <= written


def test_the_work_knows_the_model(subject):
    config = CHECKPOINT.config
    layer = 2 * config.hidden**2 + 2 * config.hidden * 16 + 3 * config.hidden * config.ffn
    assert subject.size.matrix_weights == config.layers * layer
    assert subject.size.head_weights == config.hidden * config.vocab_size
    assert subject.size.weight_bytes == 4 * (subject.size.matrix_weights + subject.size.head_weights)
    assert subject.size.kv_position_bytes == 2 * 2 * 8 * 4


def test_a_profile_accounts_for_the_whole_time():
    subject = EXECUTORS["reference"](CHECKPOINT, designed(), 1, True)
    try:
        timings = measure(subject, designed(repeats=1))
    finally:
        subject.worker.close()
    kinds = {"Embed", "Norm", "Linear", "Rope", "PagedAttention", "GatedActivation", "Add", "Logits", REST}
    for one in timings:
        assert set(one.op_ns) == kinds
        assert min(one.op_ns.values()) > 0
        assert sum(one.op_ns.values()) == pytest.approx(one.median_ns)


@pytest.mark.parametrize("executor", BEST_EXECUTORS)
def test_rounded_weights_are_fewer_bytes_and_multiplied_as_such(executor):
    sizes = {}
    for quantize in (None, "int8"):
        made = EXECUTORS[executor](CHECKPOINT, designed(), 1, False, quantize=quantize)
        made.worker.close()
        sizes[quantize] = made.size
        assert made.name.endswith("int8 weights") == (quantize == "int8")
    is_native = executor == "native"
    assert [size.byte_share for size in sizes.values()] == [0, 1 if is_native else 0]
    assert sizes["int8"].weight_bytes == sizes[None].weight_bytes * (34 / 128 if is_native else 1)


def test_a_limit_for_each_kind_of_multiplication():
    timing = Timing(Case("decode", 1, 1, 9, 0), 2e9, Work(read_bytes=5e9, flop=5e9, byte_op=3e9, page_op=1e9), {})
    limits = Limits(read_bytes_s=10e9, float32_flop_s=2e9, byte_op_s=6e9, page_op_s=4e9, threads=1)
    assert timing.read_share(limits) == 0.25
    assert timing.compute_share(limits) == 0.625  # half a second of float32 and of bytes, a quarter of pages, of two seconds
    plain = replace(timing, work=replace(timing.work, byte_op=0.0, page_op=1e9))
    assert plain.compute_share(replace(limits, byte_op_s=None, page_op_s=None)) == 1.25


def test_only_kernels_have_an_instruction_set():
    assert step.multipliers("reference", "auto") is None
    with pytest.raises(ConfigError, match="no kernels for avx2"):
        EXECUTORS["reference"](CHECKPOINT, designed(), 1, False, isa="avx2")
    for isa in usable_isas():
        made = EXECUTORS["native"](CHECKPOINT, designed(), 1, False, isa=isa)
        made.worker.close()
        assert made.name == f"native ({isa}, bf16 pages)"
        kernels = step.multipliers("native", isa)
        assert all(multiply(2) == 2 * multiply(1) for multiply in (kernels.bytes, kernels.pages))


def test_profiling_changes_no_token():
    tokens = []
    for is_profiled in (False, True):
        subject = EXECUTORS["reference"](CHECKPOINT, designed(), 1, is_profiled)
        witness = Witness(subject.worker)
        measure(replace(subject, worker=witness), designed())
        witness.close()
        tokens.append([row.token for result in witness.results for row in result.rows])
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 2


def test_a_row_that_fails_fails_the_bench():
    broken = RandomCheckpoint(tiny_config())
    healthy = broken.tensor
    broken.tensor = lambda name: (
        replace(healthy(name), data=np.full(32, np.nan, np.float32).view(np.uint8))
        if name == "output_norm.weight"
        else healthy(name)
    )
    subject = EXECUTORS["reference"](broken, designed(), 1, False)
    try:
        with pytest.raises(StepFailed, match=r"a row failed: .*not finite"):
            measure(subject, designed())
    finally:
        subject.worker.close()


def test_too_many_pages_are_refused_before_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(step, "KV_SHARE", 1e-9)
    with pytest.raises(ConfigError, match="choose fewer rows"):
        EXECUTORS["reference"](CHECKPOINT, designed(), 1, False)


def test_the_median_is_the_workers_own_time(subject):
    class Slow(Witness):
        def collect(self, ticket):
            result = super().collect(ticket)
            return StepResult(result.step, result.rows, 1000 * len(self.results))

    plan = designed(rows=[1], prompts=[], prefixes=[], repeats=3)
    timing = measure(replace(subject, worker=Slow(subject.worker)), plan)[0]
    # The pattern, the opening and the warm-up come first.
    assert timing.median_ns == 5000
    assert timing.tokens_s == pytest.approx(1e9 / 5000)
