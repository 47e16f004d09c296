"""`branchline simulate`: traffic through the production scheduler in virtual time, and what came of it.

Nothing is computed but the decisions: no weights are needed, and hours pass in seconds.
"""

import argparse
import dataclasses
import itertools
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from branchline.base.config import EngineConfig
from branchline.base.errors import ConfigError
from branchline.base.version import __version__
from branchline.cli.options import add_engine_options, engine_settings
from branchline.cli.traffic import (
    UNLIMITED,
    add_pages_option,
    add_traffic_options,
    end_progress,
    read_latency,
    read_pages,
    read_workload,
    show_progress,
)
from branchline.router.policy import ROUTING
from branchline.sim.fleet import simulate_fleet
from branchline.sim.latency import LatencyFile
from branchline.sim.report import RequestRecord, Spread, Summary, by_group, make_timeline
from branchline.sim.run import SimulationResult, simulate
from branchline.sim.workload import Workload

FILE_KIND = "branchline-simulation-1"
MAX_RUNS = 64
LONGEST_LINE = 4096
"""Requests that may wait unless a limit is asked for. More than a server allows, since refusals flatter the figures of those
who are let in; but a line that is longer still says only that the engine is overloaded, and it takes time to sort."""
ENGINE_OPTIONS = (
    "page_size", "max_running", "max_queued", "max_queued_tokens", "max_step_tokens", "max_chunk_tokens", "policy",
    "overtake_tokens", "preemption_gap", "policy_seed", "eviction", "waiting_timeout_s", "running_timeout_s",
)  # fmt: skip
SWITCHES = ("prefix_cache", "overlap")
FLEET_KEYS = ("replicas", "routing", "rate")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One run."""

    swept: dict[str, str]
    """What sets it apart in a sweep; empty without one."""
    config: EngineConfig
    replicas: int
    routing: str
    rate: float

    @property
    def name(self) -> str:
        return ", ".join(f"{key}={words}" for key, words in self.swept.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_traffic_options(parser)
    add_pages_option(parser, "KV pages of each replica (default: what the calibrated engine has)")
    add_engine_options(parser, only=ENGINE_OPTIONS)
    group = parser.add_argument_group("fleet")
    group.add_argument("--replicas", type=int, default=1, help="engines behind a router (default: 1)")
    group.add_argument("--routing", choices=sorted(ROUTING), default="cache-aware", help="(default: cache-aware)")
    group = parser.add_argument_group("results")
    group.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=A,B,C",
        help=f"run once for each value of pages, {', '.join(FLEET_KEYS)} or an engine option; several sweeps multiply",
    )  # fmt: skip
    group.add_argument("--json", type=Path, metavar="FILE", help="write every figure and every request")
    group.add_argument("--plots", type=Path, metavar="DIR", help="write plots as PNG and SVG (needs branchline[plots])")


def run(options: argparse.Namespace) -> int:
    workload, file = read_workload(options), read_latency(options)
    settings = list(_settings(options, workload, file))
    draw = _plotter(options.plots)
    results = []
    for number, setting in enumerate(settings, start=1):
        if len(settings) > 1:
            show_progress(f"run {number} of {len(settings)}: {setting.name}")
        results.append(run_setting(setting, workload, file))
    end_progress()
    _show(Console(highlight=False, soft_wrap=True), workload, file, settings, results)
    if options.json is not None:
        _write(options.json, as_json(workload, file, settings, results))
    draw({setting.name: result for setting, result in zip(settings, results, strict=True)})
    return 0


def run_setting(setting: Setting, workload: Workload, file: LatencyFile) -> SimulationResult:
    workload = workload.at_rate(setting.rate)
    if setting.replicas == 1:
        return simulate(setting.config, workload, file.latency)
    return simulate_fleet(
        setting.config, workload, file.latency, replicas=setting.replicas, routing=setting.routing
    )  # fmt: skip


# ---------------------------------------------------------------- settings


def _settings(options: argparse.Namespace, workload: Workload, file: LatencyFile) -> Iterator[Setting]:
    """One for each combination of swept values."""
    engine = {"page_size": file.page_size, "max_queued": min(len(workload), LONGEST_LINE)} | engine_settings(options)
    base = EngineConfig(**engine | {"pages": read_pages(options.pages, file)})
    sweeps = [_sweep(words, file) for words in options.sweep]
    combinations = list(itertools.product(*sweeps))
    if len(combinations) > MAX_RUNS:
        raise ConfigError(f"these sweeps make {len(combinations)} runs; at most {MAX_RUNS} are allowed")
    for combination in combinations:
        swept = dict(combination)
        fleet = {"replicas": options.replicas, "routing": options.routing, "rate": 1.0}
        fleet |= {name: swept.pop(name) for name in FLEET_KEYS if name in swept}
        words = {key: _words(value) for key, value in combination}
        yield Setting(swept=words, config=dataclasses.replace(base, **swept), **fleet)


def _sweep(words: str, file: LatencyFile) -> list[tuple[str, Any]]:
    """``key=a,b`` to pairs of key and value. Raises ConfigError."""
    key, equals, values = words.partition("=")
    key = key.strip().replace("-", "_")
    key = key if key in _converters(file) else f"{key}_s"
    if not equals or not values or key not in _converters(file):
        raise ConfigError(f"--sweep takes KEY=A,B,C with one of {', '.join(_converters(file))}, not {words!r}")
    try:
        return [(key, _converters(file)[key](value.strip())) for value in values.split(",")]
    except msgspec.ValidationError as error:
        raise ConfigError(f"--sweep {words}: {error}") from None


def _converters(file: LatencyFile) -> dict[str, Callable[[str], Any]]:
    """How the words of each key that can be swept become a value."""

    def to(kind: Any) -> Callable[[str], Any]:
        return lambda words: msgspec.convert(words, kind, strict=False)

    hints = typing.get_type_hints(EngineConfig)
    switch = {name: lambda words: _choice(words, ("on", "off")) == "on" for name in SWITCHES}
    return {
        "pages": lambda words: read_pages(words, file),
        "replicas": to(typing.Annotated[int, msgspec.Meta(ge=1)]),
        "routing": lambda words: _choice(words, tuple(ROUTING)),
        "rate": to(typing.Annotated[float, msgspec.Meta(gt=0)]),
        **{name: to(hints[name]) for name in ENGINE_OPTIONS},
        **switch,
    }


def _choice(words: str, allowed: Sequence[str]) -> str:
    if words not in allowed:
        raise ConfigError(f"{words!r} is not one of {', '.join(allowed)}")
    return words


def _words(value: Any) -> str:
    match value:
        case None:
            return UNLIMITED
        case bool():
            return "on" if value else "off"
        case float():
            return f"{value:g}"
        case _:
            return str(value)


# ---------------------------------------------------------------- showing

Figure = tuple[str, Callable[[Summary], str]]

FIGURES: tuple[Figure, ...] = (
    ("ended by", lambda s: ", ".join(f"{reason} {count:,}" for reason, count in s.finished.items())),
    ("prompt tokens", lambda s: f"{s.prompt_tokens:,}, of which {s.hit_rate:.2%} came from the cache"),
    ("output tokens", lambda s: f"{s.output_tokens:,}, {s.output_tokens_per_s:,.1f} a second"),
    ("time to first token", lambda s: _spread(s.ttft_ms)),
    ("time per output token", lambda s: _spread(s.tpot_ms)),
    ("arrival to end", lambda s: _spread(s.total_ms)),
    ("makespan", lambda s: f"{s.makespan_s:,.1f} s, {s.steps:,} steps, workers busy {s.busy:.1%}"),
    ("rows", lambda s: f"{s.mean_running:.1f} in a mean step, at most {s.most_waiting:,} waiting"),
    ("KV pages", lambda s: f"at most {s.most_pages:,} in use of {s.pages:,}, {s.evicted_pages:,} evicted"),
    ("retractions", lambda s: f"{s.retractions:,}"),
)
ROWS: tuple[Figure, ...] = (
    ("from the cache", lambda s: f"{s.hit_rate:.1%}"),
    ("TTFT mean", lambda s: _ms(s.ttft_ms.mean)),
    ("TTFT p50", lambda s: _ms(s.ttft_ms.p50)),
    ("TTFT p99", lambda s: _ms(s.ttft_ms.p99)),
    ("TPOT p50", lambda s: _ms(s.tpot_ms.p50)),
    ("TPOT p99", lambda s: _ms(s.tpot_ms.p99)),
    ("output tokens/s", lambda s: f"{s.output_tokens_per_s:,.1f}"),
    ("workers busy", lambda s: f"{s.busy:.1%}"),
    ("rows in a mean step", lambda s: f"{s.mean_running:.1f}"),
    ("most waiting", lambda s: f"{s.most_waiting:,}"),
    ("most pages in use", lambda s: f"{s.most_pages:,}"),
    ("retractions", lambda s: f"{s.retractions:,}"),
    ("not served", lambda s: f"{s.requests - s.ttft_ms.count:,}"),
    ("makespan", lambda s: f"{s.makespan_s:,.1f} s"),
)
SIDE_BY_SIDE = 5
"""Settings in one table; further ones follow below."""


def _show(
    console: Console, workload: Workload, file: LatencyFile, settings: Sequence[Setting], results: Sequence[SimulationResult]
) -> None:
    note = f" ({workload.note})" if workload.note else ""
    console.print(f"[bold]{workload.name}[/]: {len(workload):,} requests in {workload.span_ns / 1e9:,.1f} s{note}")
    console.print(f"speed of {file.words}")
    if len(results) == 1:
        console.print(_one(results[0]))
        return
    for start in range(0, len(results), SIDE_BY_SIDE):
        some = slice(start, start + SIDE_BY_SIDE)
        console.print(_side_by_side(settings[some], results[some]))


def _one(result: SimulationResult) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 1))
    for name, show in FIGURES:
        table.add_row(f"[bold]{name}[/]", show(result.summary))
    for group, spread in by_group(result.requests).items():
        table.add_row(f"[bold]TTFT, {group or 'others'}[/]", _spread(spread))
    if len(result.replicas) > 1:
        loads = _requests_per_replica(result.requests, len(result.replicas))
        table.add_row("[bold]requests per replica[/]", ", ".join(f"{count:,}" for count in loads))
    return table


def _side_by_side(settings: Sequence[Setting], results: Sequence[SimulationResult]) -> Table:
    """A column for each setting."""
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    for _ in settings:
        table.add_column(justify="right", no_wrap=True)
    for key in settings[0].swept:
        table.add_row(key, *(f"[bold]{setting.swept[key]}[/]" for setting in settings))
    for name, show in ROWS:
        table.add_row(name, *(show(result.summary) for result in results))
    spreads = [by_group(result.requests) for result in results]
    for group in sorted({group for own in spreads for group in own}):
        shown = [_ms(own[group].p99) if group in own else "" for own in spreads]
        table.add_row(f"TTFT p99, {group or 'others'}", *shown)
    return table


def _requests_per_replica(records: Sequence[RequestRecord], replicas: int) -> list[int]:
    return [sum(record.replica == replica for record in records) for replica in range(replicas)]


def _spread(spread: Spread) -> str:
    if not spread.count:
        return "none"
    return f"mean {_ms(spread.mean)}, p50 {_ms(spread.p50)}, p90 {_ms(spread.p90)}, p99 {_ms(spread.p99)}"


def _ms(value: float) -> str:
    """Three digits or so are enough for people."""
    if value >= 1000:
        seconds = value / 1000
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.1f} s" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


# ---------------------------------------------------------------- files


def as_json(
    workload: Workload, file: LatencyFile, settings: Sequence[Setting], results: Sequence[SimulationResult]
) -> dict[str, Any]:
    """Everything, in a fixed order: the same command writes the same bytes."""
    return {
        "kind": FILE_KIND,
        "version": __version__,
        "workload": {
            "name": workload.name, "note": workload.note, "requests": len(workload), "span_s": workload.span_ns / 1e9,
            "prompt_tokens": workload.prompt_tokens, "output_tokens": workload.output_tokens,
        },
        "latency": file,
        "runs": [_run_as_json(setting, result) for setting, result in zip(settings, results, strict=True)],
    }  # fmt: skip


def _run_as_json(setting: Setting, result: SimulationResult) -> dict[str, Any]:
    names = RequestRecord.__struct_fields__
    return {
        "name": setting.name,
        "settings": dataclasses.asdict(result.config),
        "replicas": setting.replicas,
        "routing": setting.routing if setting.replicas > 1 else None,
        "rate": setting.rate,
        "summary": result.summary,
        "ttft_ms_by_group": by_group(result.requests),
        "timeline": make_timeline(result.requests, [replica.steps for replica in result.replicas]),
        "requests": {"columns": names, "rows": [msgspec.structs.astuple(record) for record in result.requests]},
    }


def _write(path: Path, content: Any) -> None:
    try:
        path.write_bytes(msgspec.json.encode(content) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def _plotter(directory: Path | None) -> Callable[[dict[str, SimulationResult]], object]:
    """Asked for before the work is done: a missing library shall not cost a long run."""
    if directory is None:
        return lambda results: None
    try:
        from branchline.sim.plots import draw_all
    except ModuleNotFoundError as error:
        raise ConfigError(f"plots need {error.name}: install branchline[plots]") from None
    return lambda results: draw_all(results, directory)
