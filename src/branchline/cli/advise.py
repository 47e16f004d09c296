"""`branchline advise`: settings for the traffic of a trace, found in virtual time, and what limits the engine first."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from branchline.base.config import EngineConfig
from branchline.base.errors import ConfigError
from branchline.cli.options import add_engine_options, engine_settings
from branchline.cli.traffic import (
    add_pages_option,
    add_traffic_options,
    end_progress,
    read_latency,
    read_pages,
    read_workload,
    show_progress,
)
from branchline.sim.advise import KEEPS_UP, SLOWDOWN, WORTH_IT, Advice, Adviser, Goal
from branchline.sim.latency import LatencyFile
from branchline.sim.report import Summary
from branchline.sim.workload import Workload

DEFAULT_REQUESTS = 500
MOST_HEADROOM = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_traffic_options(parser)
    parser.add_argument("--ttft-ms", type=float, metavar="N", help="goal: first token within N milliseconds")
    parser.add_argument("--tpot-ms", type=float, metavar="N", help="goal: N milliseconds per further token")
    parser.add_argument(
        "--requests", type=int, default=DEFAULT_REQUESTS, metavar="N",
        help="of a longer trace, look only at the N consecutive requests that ask for most (default: %(default)s)",
    )  # fmt: skip
    add_pages_option(parser, "KV pages there is memory for (default: what the calibrated engine has)")
    add_engine_options(parser, only=("page_size", "max_running", "max_step_tokens", "max_chunk_tokens", "policy"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the advice as JSON")


def run(options: argparse.Namespace) -> int:
    for name in ("ttft_ms", "tpot_ms", "requests"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} must be above zero")
    workload, file = read_workload(options).busiest(options.requests), read_latency(options)
    goal = Goal(options.ttft_ms, options.tpot_ms)
    engine = {"page_size": file.page_size, "max_queued": len(workload)} | engine_settings(options)
    config = EngineConfig(**engine | {"pages": read_pages(options.pages, file)})
    advice = Adviser(workload, file.latency, goal, lambda runs: show_progress(f"{runs} simulations")).advise(config)
    end_progress()
    _show(Console(highlight=False, soft_wrap=True), workload, file, config, goal, advice)
    if options.json is not None:
        try:
            options.json.write_bytes(msgspec.json.format(msgspec.json.encode(advice), indent=2) + b"\n")
        except OSError as error:
            raise ConfigError(f"{options.json} cannot be written: {error.strerror}") from None
    return 0


def _show(console: Console, workload: Workload, file: LatencyFile, config: EngineConfig, goal: Goal, advice: Advice) -> None:
    note = f" ({workload.note})" if workload.note else ""
    console.print(f"[bold]{workload.name}[/]: {len(workload):,} requests in {workload.span_ns / 1e9:,.1f} s{note}")
    console.print(f"speed of {file.words}\n")
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in advice.settings.items())
    console.print(f"[bold]Recommended:[/] branchline serve {flags}")
    console.print(_table(config, goal, advice))
    for sentence in sentences(goal, advice):
        console.print(f"[yellow]•[/] {sentence}")


def _table(config: EngineConfig, goal: Goal, advice: Advice) -> Table:
    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_row("", "as it is", "recommended", style="bold")
    for name, value in advice.settings.items():
        table.add_row(name, str(getattr(config, name) or "unlimited"), str(value))
    rows: dict[str, tuple[str, str]] = {
        "within the goal": (f"{advice.before_share:.1%}", f"{advice.share_within_goal:.1%}"),
        **{name: (show(advice.before), show(advice.summary)) for name, show in _FIGURES.items()},
    }
    for name, pair in rows.items():
        if name != "within the goal" or not goal.is_open:
            table.add_row(name, *pair)
    return table


_FIGURES: dict[str, Callable[[Summary], str]] = {
    "TTFT mean": lambda s: f"{s.ttft_ms.mean:,.0f} ms",
    "TTFT p95": lambda s: f"{s.ttft_ms.p95:,.0f} ms",
    "TPOT mean": lambda s: f"{s.tpot_ms.mean:,.0f} ms",
    "TPOT p95": lambda s: f"{s.tpot_ms.p95:,.0f} ms",
    "arrival to end": lambda s: f"{s.total_ms.mean:,.0f} ms",
    "from the cache": lambda s: f"{s.hit_rate:.1%}",
    "workers busy": lambda s: f"{s.busy:.1%}",
}


def sentences(goal: Goal, advice: Advice) -> list[str]:
    """The advice in words."""
    alone = f"a request takes at most {SLOWDOWN:g} times as long as alone"
    within = alone if goal.is_open else f"{KEEPS_UP:.0%} of the requests meet the goal"
    if advice.headroom >= MOST_HEADROOM:
        edge = f"The engine is far from its limit: {within} even if they come {MOST_HEADROOM} times as fast."
    elif advice.keeps_up:
        edge = f"The engine keeps up: {within} until they come {advice.headroom:.2g} times as fast as now."
    else:
        edge = f"The engine does not keep up: {within} only if they come at {advice.headroom:.0%} of the present rate."
    found = [edge, f"The first bottleneck is the {advice.bottleneck}."]
    idle = [relief.name for relief in advice.reliefs if abs(relief.gain) < WORTH_IT]
    for relief in advice.reliefs:
        if relief.name not in idle:
            change = f"save {relief.gain:.0%} of" if relief.gain > 0 else f"add {-relief.gain:.0%} to"
            found.append(f"Twice the {relief.name} would {change} the mean time from arrival to end at that point.")
    if idle:
        found.append(f"Twice the {_either(idle)} would make hardly any difference there.")
    if advice.bottleneck == advice.reliefs[0].name == "speed of the worker":
        found.append("A faster machine, a smaller model or more replicas would help, other settings would not.")
    return found


def _either(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
