"""`branchline bench serve --url URL`: drive any OpenAI-compatible server and say how fast it is.
`branchline bench step [MODEL]`: time single steps of an executor in this process, beside what the machine could do.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from branchline.base.config import QUANTIZE_NAMES, Environment
from branchline.base.errors import ConfigError
from branchline.base.machine import Machine
from branchline.bench.arrivals import Arrival, poisson, read_trace
from branchline.bench.cases import Case, Design, design
from branchline.bench.client import RequestFailed, Server, first_model
from branchline.bench.drive import Tally, closed_loop, open_loop
from branchline.bench.figures import Figures, summarize
from branchline.bench.limits import BUFFER_BYTES, Limits, measure_limits
from branchline.bench.step import EXECUTORS, Timing, best_executor, measure, multipliers
from branchline.bench.workloads import WORKLOADS, find_workload
from branchline.engine.build import announce
from branchline.models.source import open_checkpoint

FAILED = 1
DEFAULT_DURATION_S = 60.0
PIPE_WIDTH = 140
LEAST_BUFFER_BYTES = 1 << 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", metavar="BENCH", required=True)
    _add_serve(benches.add_parser("serve", help="a server, over HTTP", description="Drive any OpenAI-compatible server."))
    _add_step(benches.add_parser("step", help="an executor, in this process", description="Time single steps."))


def run(options: argparse.Namespace) -> int:
    return {"serve": run_serve, "step": run_step}[options.bench](options)


# ---------------------------------------------------------------- serve


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="address of the server, like http://127.0.0.1:8000")
    parser.add_argument(
        "--workload", type=_names, default=list(WORKLOADS), metavar="NAMES",
        help=f"one after the other, separated by commas (default: {','.join(WORKLOADS)})",
    )  # fmt: skip
    parser.add_argument("--model", help="name to ask for (default: the first of /v1/models)")
    arrivals = parser.add_mutually_exclusive_group()
    arrivals.add_argument(
        "--rate", type=float, metavar="R",
        help="conversations that begin per second, at random (default: each client waits for its last answer)",
    )  # fmt: skip
    arrivals.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="JSON lines with time (s), prompt_tokens and output_tokens of each request",
    )
    parser.add_argument(
        "--duration", type=float, default=DEFAULT_DURATION_S, metavar="S",
        help="with --rate: seconds until the last conversation begins (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="of prompts and arrivals (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for each request (default: %(default)g)")
    parser.add_argument("--api-key", metavar="KEY", help="bearer token (default: the first of BRANCHLINE_API_KEYS)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")


def run_serve(options: argparse.Namespace) -> int:
    if not options.timeout > 0:
        raise ConfigError("--timeout must be positive")
    keys = [options.api_key] if options.api_key else [*Environment.read().api_keys, None]
    server = Server.at(options.url, api_key=keys[0], timeout_s=options.timeout)
    runs = _runs(options)
    try:
        model = options.model or asyncio.run(first_model(server))
    except RequestFailed as error:
        print(f"branchline: {error}", file=sys.stderr)
        return FAILED
    figures = []
    for name, arrivals in runs:
        announce(f"{name} on {options.url}, model {model}")
        figures.append(summarize(name, asyncio.run(_drive(server, model, name, arrivals, options.seed))))
    console = make_console()
    show_figures(console, figures)
    save(options.json, figures)
    return FAILED if any(one.failed for one in figures) else 0


def _runs(options: argparse.Namespace) -> list[tuple[str, list[Arrival] | None]]:
    """Names and arrivals; ``None``: closed loop. Everything that can be wrong is found before the first request."""
    if options.trace is not None:
        return [("trace", read_trace(options.trace, options.seed))]
    workloads = [find_workload(name) for name in options.workload]
    if not workloads:
        raise ConfigError("--workload names none")
    if options.rate is None:
        return [(workload.name, None) for workload in workloads]
    pace = {"rate": options.rate, "duration_s": options.duration}
    return [(workload.name, poisson(workload, options.seed, **pace)) for workload in workloads]


async def _drive(server: Server, model: str, name: str, arrivals: list[Arrival] | None, seed: int) -> Tally:
    if arrivals is not None:
        return await open_loop(server, model, arrivals)
    workload = find_workload(name)
    conversations = (
        conversation for _, conversation in zip(range(workload.count), workload.conversations(seed), strict=False)
    )
    return await closed_loop(server, model, conversations, workload.clients)


def show_figures(console: Console, figures: Sequence[Figures]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in (
        "workload", "requests", "failed", "wall s", "output tok/s", "total tok/s", "TTFT p50", "p99 ms", "TPOT p50", "p99 ms"
    ):  # fmt: skip
        table.add_column(name, justify="left" if name == "workload" else "right", no_wrap=True)
    for one in figures:
        table.add_row(
            one.workload, str(one.requests), str(one.failed), f"{one.wall_s:.1f}", f"{one.output_tok_s:.1f}",
            f"{one.total_tok_s:.1f}", _number(one.ttft_p50_ms, 0), _number(one.ttft_p99_ms, 0), _number(one.tpot_p50_ms, 2),
            _number(one.tpot_p99_ms, 2), style="red" if one.failed else None,
        )  # fmt: skip
    console.print(table)
    for one in figures:
        for reason, count in one.errors.items():
            console.print(f"{one.workload}: {count} × {reason}", markup=False)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


# ---------------------------------------------------------------- step


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as for serve (default: the embedded model)")
    parser.add_argument(
        "--rows", type=_numbers, default=[1, 4, 8, 16, 32, 64], help="decode rows of a step (default: 1,4,8,16,32,64)"
    )
    parser.add_argument("--prompts", type=_numbers, default=[128, 512, 2048], help="tokens (default: 128,512,2048)")
    parser.add_argument(
        "--prefix", type=_numbers, default=[1024], metavar="TOKENS",
        help="everything once more behind shared prefixes of so many tokens; empty: never (default: 1024)",
    )  # fmt: skip
    parser.add_argument(
        "--repeat", type=int, default=5, help="runs of each case; the median is shown (default: %(default)s)"
    )
    parser.add_argument("--executor", choices=sorted(EXECUTORS), help="(default: native where it is installed)")
    parser.add_argument("--isa", default="auto", help="instruction set of the native kernels (default: the best one)")
    parser.add_argument("--quantize", choices=QUANTIZE_NAMES, help="round plain weights on load (default: keep every bit)")
    parser.add_argument("--profile", action="store_true", help="show where the time goes, by kind of operator")
    parser.add_argument("--threads", type=int, help="(default: the CPUs this process may use)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per KV page (default: %(default)s)")
    parser.add_argument("--step-tokens", type=int, default=512, help="longest chunk of a prompt (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that is shown as JSON")


def run_step(options: argparse.Namespace) -> int:
    machine = Machine.look()
    threads = options.threads or machine.cpus
    if threads < 1:
        raise ConfigError("--threads must be positive")
    checkpoint = open_checkpoint(options.model, Environment.read().cache_dir, announce)
    plan = design(
        context_length=checkpoint.config.context_length, rows=options.rows, prompts=options.prompts,
        prefixes=options.prefix, repeats=options.repeat, page_size=options.page_size, step_tokens=options.step_tokens,
    )  # fmt: skip
    executor = options.executor or best_executor()
    subject = EXECUTORS[executor](checkpoint, plan, threads, options.profile, isa=options.isa, quantize=options.quantize)
    try:
        announce("measuring the machine")
        buffer_bytes = min(BUFFER_BYTES, max(machine.available_bytes // 4, LEAST_BUFFER_BYTES))
        limits = measure_limits(threads, multipliers(executor, options.isa), buffer_bytes=buffer_bytes)
        timings = measure(subject, plan, lambda case: announce(f"measuring {describe(case)}"))
    finally:
        subject.worker.close()
    console = make_console()
    show_steps(console, f"{checkpoint.config.name}, {subject.name}, {threads} threads", limits, plan, timings)
    save(options.json, step_record(checkpoint.config.name, subject.name, limits, plan, timings))
    return 0


def describe(case: Case) -> str:
    behind = f", prefix {case.prefix}" if case.prefix else ""
    return f"decode {case.rows} rows{behind}" if case.kind == "decode" else f"prompt {case.tokens}{behind}"


def show_steps(console: Console, title: str, limits: Limits, plan: Design, timings: Sequence[Timing]) -> None:
    bytewise = f", multiply-adds of bytes {limits.byte_op_s / 1e9:.0f} GOP/s" if limits.byte_op_s else ""
    pagewise = f", of KV pages {limits.page_op_s / 1e9:.0f} GOP/s" if limits.page_op_s else ""
    console.print(
        f"{title}\nlimits measured: read {limits.read_bytes_s / 1e9:.1f} GB/s, "
        f"float32 matrix product {limits.float32_flop_s / 1e9:.0f} GFLOP/s{bytewise}{pagewise}\n"
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "ms", "tok/s", "GB/s", "of limit", "GOP/s", "of limit"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for one in timings:
        table.add_row(
            describe(one.case), f"{one.median_ns / 1e6:.2f}", f"{one.tokens_s:.1f}",
            f"{one.read_bytes_s / 1e9:.2f}", f"{one.read_share(limits):.0%}",
            f"{one.flop_s / 1e9:.1f}", f"{one.compute_share(limits):.0%}",
        )  # fmt: skip
    console.print(table)
    show_operators(console, timings)
    for sentence in plan.skipped:
        console.print(f"Left out: {sentence}.")


def show_operators(console: Console, timings: Sequence[Timing]) -> None:
    """Shares of the time; nothing unless operators were timed."""
    kinds = list(dict.fromkeys(kind for one in timings for kind in one.op_ns))
    if not kinds:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), title="\nshare of the time", title_justify="left")
    for name in ("", *kinds):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for one in timings:
        total = sum(one.op_ns.values())
        table.add_row(describe(one.case), *(f"{one.op_ns.get(kind, 0) / total:.1%}" for kind in kinds))
    console.print(table)


def step_record(model: str, executor: str, limits: Limits, plan: Design, timings: Sequence[Timing]) -> dict[str, Any]:
    return {
        "model": model, "executor": executor, "limits": limits, "repeats": plan.repeats, "page_size": plan.page_size,
        "step_tokens": plan.step_tokens, "skipped": plan.skipped,
        "cases": [
            {
                "kind": one.case.kind, "rows": one.case.rows, "tokens": one.case.tokens, "context": one.case.context,
                "prefix": one.case.prefix, "median_ms": one.median_ns / 1e6, "tok_s": one.tokens_s,
                "read_bytes_s": one.read_bytes_s, "read_share": one.read_share(limits),
                "flop_s": one.flop_s, "compute_share": one.compute_share(limits),
                "operators_ms": {kind: ns / 1e6 for kind, ns in one.op_ns.items()},
            }
            for one in timings
        ],
    }  # fmt: skip


# ---------------------------------------------------------------- both


def make_console() -> Console:
    """As wide as the terminal; a file or a pipe has room for the widest table."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def save(path: Path | None, record: Any) -> None:
    if path is None:
        return
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in _names(text)]
