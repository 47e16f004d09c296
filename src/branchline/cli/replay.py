"""`branchline replay DIR`: drive the production loop once more from a journal, and prove that it plans the same.

With other settings (`--policy lpm`, `--pages 512`, ...) also: what would have become of the same requests?
"""

import argparse
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from branchline.base.errors import ConfigError
from branchline.cli.options import add_engine_options, engine_settings
from branchline.sim.incident import Change, Comparison, compare
from branchline.sim.replay import Replay
from branchline.sim.report import NS_PER_MS, Summary

DIFFERENT = 1
CHANGES_SHOWN = 5
OTHER_SETTINGS = (
    "policy", "pages", "page_size", "max_running", "max_queued", "max_queued_tokens", "max_step_tokens", "max_chunk_tokens",
    "overtake_tokens", "preemption_gap", "policy_seed", "eviction", "waiting_timeout_s", "running_timeout_s",
)  # fmt: skip

ROWS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("requests", lambda s: f"{s.requests:,}"),
    ("ended", lambda s: ", ".join(f"{count} {reason}" for reason, count in s.finished.items())),
    ("steps", lambda s: f"{s.steps:,}"),
    ("prompt tokens", lambda s: f"{s.prompt_tokens:,}"),
    ("from the cache", lambda s: f"{s.hit_rate:.1%}"),
    ("output tokens", lambda s: f"{s.output_tokens:,}"),
    ("retractions", lambda s: f"{s.retractions:,}"),
    ("evicted pages", lambda s: f"{s.evicted_pages:,}"),
    ("most waiting", lambda s: f"{s.most_waiting:,}"),
    ("makespan", lambda s: f"{s.makespan_s:.2f} s"),
    ("output tokens/s", lambda s: f"{s.output_tokens_per_s:.1f}"),
    ("TTFT p50 / p99", lambda s: f"{s.ttft_ms.p50:,.0f} / {s.ttft_ms.p99:,.0f} ms"),
    ("TTFT worst", lambda s: f"{s.ttft_ms.max:,.0f} ms"),
    ("TPOT p50 / p99", lambda s: f"{s.tpot_ms.p50:,.1f} / {s.tpot_ms.p99:,.1f} ms"),
    ("TPOT worst", lambda s: f"{s.tpot_ms.max:,.1f} ms"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="what was given to --journal")
    parser.add_argument(
        "--run", dest="run_number", type=int, metavar="N", help="which life of the engine (default: the last)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that is shown, and more, as JSON")
    add_engine_options(parser, only=OTHER_SETTINGS)
    parser.set_defaults(prefix_cache=None, overlap=None)
    parser.epilog = "Whatever is not given is as it was then."


def run(options: argparse.Namespace) -> int:
    console = Console(highlight=False, soft_wrap=True)
    settings = engine_settings(options)
    replay = Replay.of(options.directory, options.run_number)
    _show_header(console, replay)
    comparison = compare(replay, settings) if settings and replay.summary else None
    if comparison is not None:
        _show_comparison(console, comparison, settings)
    elif replay.summary is not None:
        _show_summaries(console, {"": replay.summary})
    _show_verdict(console, replay)
    if options.json is not None:
        _save(options.json, replay, comparison, settings)
    return DIFFERENT if replay.difference or replay.broken else 0


# ---------------------------------------------------------------- showing


def _show_header(console: Console, replay: Replay) -> None:
    header = replay.header
    began = datetime.datetime.fromtimestamp(header.began_unix_s, tz=datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    console.print(f"run {header.run}: {header.facts.name}, branchline {header.version}, began {began}")
    config = header.config
    console.print(
        f"policy {config.policy}, {config.pages} pages of {config.page_size} tokens, "
        f"{config.max_step_tokens} tokens a step, {config.max_running} rows, overlap {'on' if config.overlap else 'off'}\n"
    )


def _show_summaries(console: Console, columns: dict[str, Summary]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=len(columns) > 1)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for name, show in ROWS:
        table.add_row(name, *map(show, columns.values()))
    console.print(table)
    console.print()


def _show_comparison(console: Console, comparison: Comparison, settings: dict[str, Any]) -> None:
    words = ", ".join(f"{name} {value}" for name, value in settings.items())
    live = comparison.replay.summary
    columns = {} if live is None else {"as it happened": live}
    columns |= {"simulated": comparison.as_then.summary, f"with {words}": comparison.otherwise.summary}
    _show_summaries(console, columns)
    console.print(
        f"Simulated steps are off by {comparison.step_error:.1%} on average, "
        f"the makespan by {comparison.makespan_error:+.1%}."
    )
    changes = comparison.changes
    _show_changes(console, "Later first tokens", [c for c in changes if c.ttft_ns > 0][:CHANGES_SHOWN])
    _show_changes(console, "Earlier first tokens", [c for c in reversed(changes) if c.ttft_ns < 0][:CHANGES_SHOWN])
    console.print()


def _show_changes(console: Console, title: str, changes: list[Change]) -> None:
    if changes:
        console.print(f"{title}:")
    for change in changes:
        before, after = change.before, change.after
        console.print(
            f"  {before.request_id}  {(before.ttft_ns or 0) / NS_PER_MS:,.0f} -> {(after.ttft_ns or 0) / NS_PER_MS:,.0f} ms"
            f"  ({before.prompt_tokens} prompt tokens, from the cache {before.cached_tokens} -> {after.cached_tokens})"
        )


def _show_verdict(console: Console, replay: Replay) -> None:
    if replay.lost_bytes:
        console.print(f"The last {replay.lost_bytes:,} bytes could not be read: the end was torn off or is damaged.")
    elif not replay.is_complete and not replay.difference:
        console.print("The journal ends before the engine was stopped.")
    if replay.broken:
        console.print(f"[red]The books of the scheduler did not add up, and do not now:[/] {replay.broken}")
    if replay.difference:
        console.print(f"[red]After {replay.plan_count:,} identical plans there is a difference:[/]")
        console.print(replay.difference, markup=False)
    else:
        console.print(f"[green]{replay.plan_count:,} plans byte-identical[/]")


# ---------------------------------------------------------------- JSON


def _save(path: Path, replay: Replay, comparison: Comparison | None, settings: dict[str, Any]) -> None:
    """Raises ConfigError: the file cannot be written."""
    record: dict[str, Any] = {
        "header": replay.header, "plans": replay.plan_count, "identical": not replay.difference,
        "difference": replay.difference, "broken": replay.broken, "complete": replay.is_complete,
        "lost_bytes": replay.lost_bytes, "summary": replay.summary, "requests": replay.story.records,
    }  # fmt: skip
    if comparison is not None:
        record |= {
            "settings": settings, "latency": comparison.latency,
            "step_error": comparison.step_error, "makespan_error": comparison.makespan_error,
            "simulated": comparison.as_then.summary, "otherwise": comparison.otherwise.summary,
            "otherwise_requests": comparison.otherwise.requests,
        }  # fmt: skip
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
