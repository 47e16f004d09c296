"""Plots of simulations: PNG for looking at, SVG for documents. Needs matplotlib, the extra ``branchline[plots]``.

    queue      who waits and who runs, over time
    cache      how much of the prompts the cache serves, and what the pages hold, over time
    latency    times by percentile: the tail is as wide as the middle
    timeline   what steps are made of, over time; one figure for each run

Knows: results and paper. Refuses to know: how results come about. The same results give the same files.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from branchline.base.errors import ConfigError
from branchline.sim.report import NS_PER_MS, RequestRecord, Timeline, by_group, make_timeline
from branchline.sim.run import SimulationResult

Results = Mapping[str, SimulationResult]
"""By the name of their setting; one without a name if nothing was swept."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c", "#000000")
"""Okabe and Ito's palette, which people of every kind of colour vision can tell apart."""
PREFILL, DECODE, CACHED, BUSY = "#d55e00", "#0072b2", "#9ecae1", "#08519c"
BUCKETS = 160
CURVE_POINTS = 120
STYLE: dict[str, Any] = {
    "figure.dpi": 100, "savefig.dpi": 144, "svg.hashsalt": "branchline", "svg.fonttype": "none", "font.size": 10,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8, "axes.axisbelow": True, "axes.titlesize": 11, "axes.titlelocation": "left",
    "axes.titleweight": "bold", "legend.frameon": False, "lines.linewidth": 1.5,
}  # fmt: skip


def draw_all(results: Results, directory: Path) -> list[Path]:
    """Every plot of ``results`` as PNG and SVG.

    Raises:
        ConfigError: the files cannot be written.
    """
    figures: dict[str, Callable[[], Figure]] = {
        "queue": lambda: draw_queue(results), "cache": lambda: draw_cache(results), "latency": lambda: draw_latency(results),
    }  # fmt: skip
    for number, (name, result) in enumerate(results.items(), start=1):
        suffix = f"-{number}" if len(results) > 1 else ""
        figures[f"timeline{suffix}"] = lambda name=name, result=result: draw_timeline(name, result)  # type: ignore[misc]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(STYLE):
            return [path for name, draw in figures.items() for path in _save(draw(), directory / name)]
    except OSError as error:
        raise ConfigError(f"plots cannot be written to {directory}: {error.strerror}") from None


def draw_queue(results: Results) -> Figure:
    figure, (waiting, running) = _panels(2)
    for colour, name, line in _timelines(results):
        times = _times(line)
        waiting.step(times, line.waiting, where="mid", color=colour, label=name)
        running.step(times, line.running, where="mid", color=colour)
    waiting.set(title="Waiting requests", ylim=(0, None))
    running.set(title="Running requests", ylim=(0, None), xlabel="time (s)")
    _legend(figure, waiting, results)
    return figure


def draw_cache(results: Results) -> Figure:
    figure, (rate, pages) = _panels(2)
    for colour, name, line in _timelines(results):
        times = _times(line)
        total = np.cumsum(line.prompt_tokens)
        rate.plot(times, np.cumsum(line.cached_tokens) / np.maximum(total, 1), color=colour, label=name)
        pages.plot(times, line.pages_busy, color=colour)
        pages.plot(times, np.add(line.pages_busy, line.pages_cached), color=colour, linestyle=(0, (2, 1.5)), linewidth=1.1)
    rate.set(title="Share of prompt tokens served from the cache, since the beginning", ylim=(0, 1))
    rate.yaxis.set_major_formatter(PercentFormatter(1))
    pages.set(title="KV pages in use (solid) and with cached content (dashed)", ylim=(0, None), xlabel="time (s)")
    _legend(figure, rate, results)
    return figure


def draw_latency(results: Results) -> Figure:
    """A column for the TTFT of each group of requests, and one for TPOT."""
    groups: list[str | None] = [*by_group(next(iter(results.values())).requests)] or [None]
    figure = Figure(figsize=(3.3 * (len(groups) + 1) + 0.6, 3.7), layout="constrained")
    *firsts, last = figure.subplots(1, len(groups) + 1, squeeze=False)[0]
    for axis, group in zip(firsts, groups, strict=True):
        _percentiles(axis, results, lambda r: r.ttft_ns, group)
        axis.set(title="Time to first token" if group is None else f"TTFT, {group or 'others'}")
    low, high = min(axis.get_ylim()[0] for axis in firsts), max(axis.get_ylim()[1] for axis in firsts)
    for axis in firsts:
        axis.set_ylim(low, high)
    _percentiles(last, results, lambda r: r.tpot_ns, None)
    last.set(title="Time per output token")
    _legend(figure, firsts[0], results)
    return figure


def draw_timeline(name: str, result: SimulationResult) -> Figure:
    figure, (tokens, busy) = _panels(2)
    line = _timeline(result)
    times = _times(line)
    rates = [np.array(column) / line.bucket_s for column in (line.decode_tokens, line.prefill_tokens)]
    tokens.stackplot(times, *rates, colors=(DECODE, PREFILL), labels=("decode", "prefill"), alpha=0.85, linewidth=0)
    tokens.set(title=f"Tokens computed per second{f' ({name})' if name else ''}", ylim=(0, None))
    tokens.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, ncols=2)
    busy.fill_between(times, line.busy, step="mid", color=BUSY, alpha=0.25, linewidth=0)
    busy.step(times, line.busy, where="mid", color=BUSY, linewidth=1.2)
    busy.set(title="Share of the time in which workers computed", ylim=(0, 1.02), xlabel="time (s)")
    busy.yaxis.set_major_formatter(PercentFormatter(1))
    return figure


# ---------------------------------------------------------------- inner


def _panels(rows: int) -> tuple[Figure, Any]:
    """Panels one above the other, with one time axis."""
    figure = Figure(figsize=(8.0, 2.4 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True)
    for axis in axes:
        axis.margins(x=0)
        axis.yaxis.set_major_locator(MaxNLocator(5))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.4g}"))
    return figure, axes


def _percentiles(axis: Axes, results: Results, value: Callable[[RequestRecord], int | None], group: str | None) -> None:
    """Times over percentiles, both on scales of proportions: 90, 99 and 99.9 % are equally far apart."""
    most = 1
    for colour, (name, result) in zip(_colours(results), results.items(), strict=True):
        records = (r for r in result.requests if r.reason.is_success and (group is None or r.group == group))
        times = np.sort([ns / NS_PER_MS for r in records if (ns := value(r)) is not None])
        if not len(times):
            continue
        most = max(most, len(times))
        shares = 1 - np.geomspace(1, 0.5 / len(times), CURVE_POINTS)
        picked = np.unique(np.minimum((len(times) * shares).astype(np.intp), len(times) - 1))
        axis.plot(1 / (1 - (picked + 0.5) / len(times)), times[picked], color=colour, label=name)
    axis.set(xscale="log", yscale="log", xlabel="percentile", xlim=(1, 2 * most))
    axis.xaxis.set_major_locator(FixedLocator([1, 2, 10, 100, 1000, 10_000]))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * (1 - 1 / x):.4g}"))
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms / 1000:,.10g} s" if ms >= 1000 else f"{ms:g} ms"))
    for side in (axis.xaxis, axis.yaxis):
        side.set_minor_locator(NullLocator())


def _timelines(results: Results) -> list[tuple[str, str, Timeline]]:
    return [
        (colour, name, _timeline(result))
        for colour, (name, result) in zip(_colours(results), results.items(), strict=True)
    ]  # fmt: skip


def _timeline(result: SimulationResult) -> Timeline:
    return make_timeline(result.requests, [replica.steps for replica in result.replicas], BUCKETS)


def _times(line: Timeline) -> np.ndarray:
    """Middles of the buckets, in seconds."""
    return (np.arange(len(line.waiting)) + 0.5) * line.bucket_s


def _colours(results: Results) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(len(results))]


def _legend(figure: Figure, axis: Axes, results: Results) -> None:
    if len(results) > 1:
        figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=min(4, len(results)))


def _save(figure: Figure, path: Path) -> list[Path]:
    paths = [path.with_suffix(".png"), path.with_suffix(".svg")]
    figure.savefig(paths[0])
    figure.savefig(paths[1], metadata={"Date": None})
    return paths
