"""`branchline calibrate [MODEL]`: measure how long steps take on this machine, fit a latency model, write it to a file that
`simulate` and `advise` read.
"""

import argparse
import datetime
from pathlib import Path

from rich.console import Console

from branchline.base.clock import NS_PER_S, MonotonicClock
from branchline.base.config import EngineConfig, Environment
from branchline.base.errors import ConfigError
from branchline.base.machine import Machine
from branchline.cli.options import add_engine_options, engine_settings
from branchline.cli.traffic import end_progress, latency_path, show_progress
from branchline.engine.build import Engine, build_engine
from branchline.sim.incident import latency_file
from branchline.sim.latency import Fit, LatencyFile, fit
from branchline.sim.probe import Room, measure
from branchline.sim.replay import Replay
from branchline.wire.inproc import InprocInbox, InprocOutbox

DEFAULT_SECONDS = 60.0
DUBIOUS_ERROR = 0.25
"""Mean error beyond which it is more likely that something disturbed the measurement than that steps are so irregular."""
CALIBRATED = (
    "threads",
    "executor",
    "isa",
    "kv_dtype",
    "context_length",
    "page_size",
    "pages",
    "max_running",
    "max_step_tokens",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as for serve (default: the embedded model)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="latency file (default: one for this model in the cache)"
    )
    parser.add_argument(
        "--seconds", type=float, default=DEFAULT_SECONDS, help="time for measuring; every step is measured once at least"
    )
    parser.add_argument(
        "--journal", dest="journal_read", type=Path, metavar="DIR", help="fit to the steps of a journal instead of measuring"
    )
    add_engine_options(parser, only=CALIBRATED)


def run(options: argparse.Namespace) -> int:
    if not options.seconds >= 0:
        raise ConfigError("--seconds must not be negative")
    if options.journal_read is not None:
        return _from_journal(options.journal_read, options.output)
    environment, clock = Environment.read(), MonotonicClock()
    inbox, outbox = InprocInbox(), InprocOutbox(lambda message: None)
    config = EngineConfig(**engine_settings(options))
    engine = build_engine(config, cache_dir=environment.cache_dir, inbox=inbox, outbox=outbox, clock=clock)
    try:
        samples = measure(
            engine.parts.worker, _room(engine.parts.config), clock,
            budget_ns=int(options.seconds * NS_PER_S), progress=_show_progress,
        )  # fmt: skip
    finally:
        engine.close()
        end_progress()
    fitted = fit(samples)
    path = options.output or latency_path(environment.cache_dir, engine.facts.name)
    describe(engine, fitted, len(samples)).save(path)
    _show(Console(highlight=False, soft_wrap=True), engine.facts.name, fitted, len(samples), path)
    return 0


def _from_journal(directory: Path, output: Path | None) -> int:
    """A journal tells how long steps took under the traffic of then."""
    file = latency_file(Replay.of(directory))
    path = output or latency_path(Environment.read().cache_dir, file.model)
    file.save(path)
    _show(Console(highlight=False, soft_wrap=True), file.model, Fit(file.latency, file.error), file.samples, path)
    return 0


def describe(engine: Engine, fitted: Fit, samples: int) -> LatencyFile:
    config, machine = engine.parts.config, Machine.look()
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return LatencyFile(
        model=engine.facts.name,
        executor=engine.facts.executor,
        machine=f"{machine.cpu_model}, {config.threads} thread{'' if config.threads == 1 else 's'}",
        measured=f"{day}, branchline calibrate",
        samples=samples,
        page_size=config.page_size,
        pages=config.pages or 0,
        context_length=config.context_length or 0,
        latency=fitted.model,
        error=fitted.error,
    )


def _room(config: EngineConfig) -> Room:
    return Room(
        rows=config.max_running, step_tokens=config.max_step_tokens, context_length=config.context_length or 0,
        pages=config.pages or 0, page_size=config.page_size,
    )  # fmt: skip


def _show_progress(done: int, total: int) -> None:
    show_progress(f"measured {done} steps, at least {total}")


def _show(console: Console, name: str, fitted: Fit, samples: int, path: Path) -> None:
    model, error = fitted.model, fitted.error
    console.print(f"[bold]{name}[/]: a step takes")
    for value, words in (
        (model.fixed_ns, "whatever is in it"),
        (model.per_new_token_ns, "per token computed"),
        (model.per_context_token_ns, "per token looked back at, once for each sequence"),
        (model.per_pair_ns, "per token looked back at, for each token computed"),
        (model.per_row_ns, "per sequence"),
    ):
        console.print(f"  {value / 1e6:12.6f} ms  {words}")
    console.print(
        f"Predictions are off by {error.mean:.1%} on average and by less than {error.p95:.1%} in 95 of 100 steps; on steps "
        f"that the fit did not see by {error.held_out_mean:.1%} and {error.held_out_p95:.1%} ({samples:,} samples)."
    )
    if error.held_out_mean > DUBIOUS_ERROR:
        console.print("[yellow]That is a lot: was the machine busy with something else? Measure again, or for longer.[/]")
    console.print(f"Written to {path}")
