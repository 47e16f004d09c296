"""A range of random schedules, run in a process of its own: a module that such a process can import by name."""

import logging
from collections import Counter
from dataclasses import dataclass

from tests.support.schedules import CHECK_EVERY, VIOLATIONS, run_schedule


@dataclass(frozen=True)
class Report:
    coverage: Counter
    violations: list[tuple[int, str]]


def run_range(seeds: range) -> Report:
    logging.getLogger("branchline").addHandler(logging.NullHandler())  # injected faults are logged by the loop
    coverage: Counter = Counter()
    violations = []
    for seed in seeds:
        try:
            coverage += run_schedule(seed, CHECK_EVERY).coverage
        except VIOLATIONS as error:
            violations.append((seed, f"{type(error).__name__}: {error}"))
    return Report(coverage, violations)
