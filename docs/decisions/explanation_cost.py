"""What explanation costs: its share of the time in plan and commit.

    python docs/decisions/explanation_cost.py

The worker costs nothing, so this is the scheduler's own time. Every function that is there for explanation alone is timed
where it is called, and so is each plan and commit as a whole; of each step the fastest of several rounds counts, so that
other work on the machine does not. The difference between two whole runs, with and without, would drown in the noise of a
busy machine; that both make the same plans is checked here all the same.
"""

import time
from collections.abc import Callable
from typing import Any

from branchline.base.config import EngineConfig
from branchline.cache import node, radix
from branchline.core.plan import StepPlan
from branchline.core.request import RequestSpec, SamplingParams
from branchline.core.result import RowResult, StepResult
from branchline.engine.books import make_books
from branchline.observe.stories import Stories
from branchline.sched.notes import NoNotes, Notebook
from branchline.sched.scheduler import Scheduler

WORKLOADS = {
    # name: (prefixes, prefix tokens, own prompt tokens, new tokens, KV pages)
    "64 rows that decode, short prompts": (8, 64, 32, 96, 4096),
    "prompts of 500 tokens, mostly cached": (16, 400, 100, 24, 4096),
    "prompts of 500 tokens, the cache thrashes": (64, 400, 100, 24, 1536),
}
REQUESTS = 192
ROUNDS = 12
NOTED = ("begin", "spent", "follows", "short", "stop", "admitted", "dropped", "stepped", "entry")


class Stopwatch:
    """Sums up the time in the functions it has wrapped, less what looking at the watch takes."""

    def __init__(self) -> None:
        self.ns = 0
        looks = [-time.perf_counter_ns() + time.perf_counter_ns() for _ in range(10_000)]
        self._look_ns = sorted(looks)[len(looks) // 2]

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter_ns()
            try:
                return function(*arguments, **named)
            finally:
                self.ns += time.perf_counter_ns() - started - self._look_ns

        return timed


def specs(prefixes: int, prefix_tokens: int, own_tokens: int, new_tokens: int) -> list[RequestSpec]:
    prefix = [tuple(i * 31 + k for k in range(prefix_tokens)) for i in range(prefixes)]
    return [
        RequestSpec(
            request_id=f"r{i}",
            prompt=(*prefix[i % prefixes], *(90_000 + i * 7 + k for k in range(own_tokens))),
            sampling=SamplingParams(),
            max_new_tokens=new_tokens,
            seed=0,
        )
        for i in range(REQUESTS)
    ]


def explained(config: EngineConfig, watch: Stopwatch) -> Scheduler:
    ledger, cache = make_books(config)
    stories, notes = Stories(), Notebook(cache, shares=True)
    for name in NOTED:
        setattr(notes, name, watch.wrap(getattr(notes, name)))
    stories.notice = watch.wrap(stories.notice)  # type: ignore[method-assign]
    return Scheduler(config, ledger, cache, (stories,), notes)


def run(scheduler: Scheduler, requests: list[RequestSpec], watch: Stopwatch) -> tuple[list[tuple[int, int]], list[StepPlan]]:
    """For each step the nanoseconds of plan and commit and, of these, of explanation; and the plans."""
    plans, spent, now_ns = [], [], 0
    for spec in requests:
        scheduler.submit(spec, now_ns)
    while not scheduler.is_empty:
        now_ns += 1_000_000
        watch.ns = 0
        started = time.perf_counter_ns()
        plan = scheduler.plan(now_ns)
        planned = time.perf_counter_ns()
        if plan is None:
            raise SystemExit("an engine with work has no plan")
        plans.append(plan)
        rows = tuple(RowResult(row.seq, row.epoch, 5 if row.sample else None) for row in plan.rows)
        result = StepResult(plan.step, rows, 1_000_000)
        resumed = time.perf_counter_ns()
        scheduler.commit(result, now_ns)
        spent.append((time.perf_counter_ns() - resumed + planned - started, watch.ns))
        scheduler.take_news()
    return spent, plans


def main() -> None:
    watch = Stopwatch()
    node.marks_after = watch.wrap(node.marks_after)
    node.Node.origin = watch.wrap(node.Node.origin)  # type: ignore[method-assign]
    radix.Dropped = watch.wrap(radix.Dropped)  # type: ignore[misc, assignment]
    for name, (prefixes, prefix_tokens, own_tokens, new_tokens, pages) in WORKLOADS.items():
        requests = specs(prefixes, prefix_tokens, own_tokens, new_tokens)
        config = EngineConfig(pages=pages, context_length=4096, max_queued=REQUESTS)
        _, silent = run(Scheduler(config, *make_books(config), (), NoNotes()), requests, watch)
        rounds = []
        for _ in range(ROUNDS):
            spent, plans = run(explained(config, watch), requests, watch)
            rounds.append(spent)
            if plans != silent:
                raise SystemExit("explanation has changed a plan")
        fastest = [min(step) for step in zip(*rounds, strict=True)]
        whole, share = sum(step[0] for step in fastest), sum(step[1] for step in fastest)
        mean_us = whole / len(fastest) / 1000
        print(f"{name}: {len(fastest)} steps of {mean_us:.0f} us, {share / (whole - share):.1%} for explanation")


if __name__ == "__main__":
    main()
