"""What a step costs beside arithmetic: plan and commit by rows, and the time in which nothing computes, overlap on and off.

    python docs/decisions/step_cost.py [--rows 16,64,256] [--tokens 96]

Plan and commit: a scheduler whose rows only decode, without a worker. Gaps: the default model in an engine of this process;
arithmetic is the time inside steps of the executor, the gap is the time from the end of one to the beginning of the next.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from explanation_cost import Stopwatch, run

from branchline import LLM, SamplingParams
from branchline.base.config import EngineConfig
from branchline.core.request import RequestSpec
from branchline.core.request import SamplingParams as Sampling
from branchline.engine.books import make_books
from branchline.observe.stories import Stories
from branchline.ops.batch import Outcome
from branchline.ops.native import NativeExecutor
from branchline.sched.scheduler import Scheduler


def plan_and_commit_us(rows: int, steps: int = 200) -> float:
    """Median over steps in which all rows decode."""
    config = EngineConfig(
        pages=rows * 40, context_length=4096, max_running=rows, max_step_tokens=max(512, rows), max_queued=rows
    )
    scheduler = Scheduler(config, *make_books(config), (Stories(),))
    specs = [
        RequestSpec(
            request_id=f"r{i}", prompt=tuple(range(i * 100, i * 100 + 40)), sampling=Sampling(),
            max_new_tokens=steps + 60, seed=0,
        )
        for i in range(rows)
    ]  # fmt: skip
    spent, plans = run(scheduler, specs, Stopwatch())
    decoding = [
        ns
        for (ns, _), plan in zip(spent, plans, strict=True)
        if len(plan.rows) == rows and all(row.count == 1 for row in plan.rows)
    ]
    return statistics.median(decoding) / 1000


class Watch:
    """Notes when the native executor computes."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        prepare = NativeExecutor.prepare

        def prepare_timed(*arguments: Any) -> Callable[[], Outcome]:
            return partial(self._timed, prepare(*arguments))

        NativeExecutor.prepare = prepare_timed  # type: ignore[method-assign]

    def _timed(self, step: Callable[[], Outcome]) -> Outcome:
        started = time.perf_counter_ns()
        try:
            return step()
        finally:
            self.spans.append((started, time.perf_counter_ns()))


def gaps(watch: Watch, rows: int, tokens: int, overlap: bool) -> tuple[float, float]:
    """Median milliseconds of a decode step of all rows, and of the part of it in which nothing computes."""
    with LLM(overlap=overlap, max_running=rows, pages=2048) as llm:
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        watch.spans.clear()
        llm.generate([f"Story number {i} begins" for i in range(rows)], sampling)
    spans = watch.spans[rows // 4 + 4 : -4]
    steps = [following - first for (first, _), (following, _) in itertools.pairwise(spans)]
    idle = [following - end for (_, end), (following, _) in itertools.pairwise(spans)]
    return statistics.median(steps) / 1e6, statistics.median(idle) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="16,64,256")
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    for rows in map(int, options.rows.split(",")):
        print(f"plan + commit, {rows} rows that decode: {plan_and_commit_us(rows):.0f} us")
    watch = Watch()
    for overlap in (True, False, True, False):
        step, gap = gaps(watch, 16, options.tokens, overlap)
        name = "on" if overlap else "off"
        print(f"overlap {name}, 16 rows: step {step:.2f} ms, nothing computes for {gap:.2f} ms, {gap / step:.1%}")


if __name__ == "__main__":
    main()
