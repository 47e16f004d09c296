"""``python -m tests.schedules``: random schedules, all small ones, and the bugs that both must catch.

    --count 100000 --jobs 2          random schedules; violations with the command that replays each, and what was covered
    --seed 4711                      one of them again, everything checked after every turn, with its traceback
    --exhaustive --depth 12          every interleaving of three requests on six pages
    --bugs                           re-created historical bugs, and how many seeds it takes to catch each

Exit status 1 if anything was found that should not be (or, with ``--bugs``, if anything was not found that should be).
"""

import argparse
import logging
import multiprocessing
import sys
import time
import traceback
from collections import Counter

from tests.schedules.report import run_range
from tests.support.bugs import BUGS, catch
from tests.support.exhaustive import explore
from tests.support.schedules import VIOLATIONS, replay_command, run_schedule

CHUNK = 250
SHOWN = 20


def run_many(first: int, count: int, jobs: int, minutes: float) -> int:
    started = time.monotonic()
    ranges = [range(start, min(start + CHUNK, first + count)) for start in range(first, first + count, CHUNK)]
    coverage: Counter = Counter()
    done, violations = 0, 0
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for seeds, report in zip(ranges, pool.imap(run_range, ranges), strict=True):
            coverage += report.coverage
            done += len(seeds)
            for seed, words in report.violations[: max(0, SHOWN - violations)]:
                print(f"VIOLATION in schedule {seed}: {words}\n    {replay_command(seed)}", flush=True)
            violations += len(report.violations)
            if done % 10_000 == 0 and done < count:
                print(f"... {done:,} schedules, {violations} violations, {time.monotonic() - started:.0f} s", flush=True)
            if time.monotonic() - started > 60 * minutes:
                break
    seconds = time.monotonic() - started
    for name, number in sorted(coverage.items()):
        print(f"{number:12,}  {name}")
    print(
        f"{done:,} of {count:,} schedules from seed {first}: {violations} violations; "
        f"{seconds:.1f} s with {jobs} process(es), {1000 * seconds * jobs / max(done, 1):.1f} ms each"
    )
    return 1 if violations or not done else 0


def replay(seed: int) -> int:
    try:
        schedule = run_schedule(seed, check_every=1)
    except VIOLATIONS:
        traceback.print_exc()
        return 1
    for name, number in sorted(schedule.coverage.items()):
        print(f"{number:12,}  {name}")
    print(f"schedule {seed}: no violation, everything checked after every turn")
    return 0


def hunt() -> int:
    logging.getLogger("branchline").addHandler(logging.NullHandler())
    caught = []
    for known in BUGS:
        result = catch(known)
        caught.append(result)
        print(result.line, flush=True)
    seeds = sorted(result.seeds for result in caught if result.is_caught and result.seeds)
    missed = [result.bug.name for result in caught if not result.is_caught]
    middle, most = seeds[len(seeds) // 2], seeds[-1]
    print(f"{len(caught) - len(missed)} of {len(caught)} bugs caught; schedules needed: median {middle}, most {most}")
    return 1 if missed else 0


def search_all(depth: int) -> int:
    started = time.monotonic()
    result = explore(depth)
    print(
        f"depth {result.depth}: {result.states:,} states, {result.edges:,} transitions, {result.ends:,} ends, "
        f"no violation, {time.monotonic() - started:.1f} s"
    )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.schedules", description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=5000, help="random schedules to run")
    parser.add_argument("--seed-from", type=int, default=0, help="number of the first")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing new after so long")
    parser.add_argument("--seed", type=int, help="run one schedule and show what happens")
    parser.add_argument("--exhaustive", action="store_true", help="all interleavings of a small engine")
    parser.add_argument("--depth", type=int, default=12, help="actions in an interleaving")
    parser.add_argument("--bugs", action="store_true", help="hunt the re-created bugs")
    options = parser.parse_args()
    if options.seed is not None:
        return replay(options.seed)
    if options.exhaustive:
        return search_all(options.depth)
    if options.bugs:
        return hunt()
    return run_many(options.seed_from, options.count, options.jobs, options.minutes)


if __name__ == "__main__":
    sys.exit(main())
