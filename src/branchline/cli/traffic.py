"""Options that `simulate` and `advise` share: which traffic, and how fast the engine is.

Knows: options and files. Refuses to know: what is done with a workload.
"""

import argparse
import importlib.resources
import re
import sys
from pathlib import Path

from branchline.base.config import Environment
from branchline.base.errors import ConfigError
from branchline.sim.latency import LatencyFile
from branchline.sim.synthetic import KINDS, make_workload
from branchline.sim.traces import READERS, read_trace
from branchline.sim.workload import Workload

PACKAGED = "smollm2-135m.json"
UNLIMITED = "unlimited"


def add_traffic_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traffic")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE", help="trace file, may be gzipped, or a journal directory")
    source.add_argument(
        "--synthetic", metavar="NAME[,KEY=VALUE...]", help=f"made-up traffic instead of a trace: {', '.join(KINDS)}"
    )
    group.add_argument("--format", choices=sorted(READERS), help="format of the trace (default: told from its name)")
    group.add_argument(
        "--scale", type=float, help="multiply the lengths of a trace (default: 1/32 for mooncake, so that a block of 512 is "
        "16 tokens; else 1)",
    )  # fmt: skip
    group.add_argument("--rate", type=float, default=1.0, help="arrivals so many times as fast as in the trace")
    group.add_argument("--first", type=int, metavar="N", help="only the first N requests")
    group = parser.add_argument_group("speed of the engine")
    speed = group.add_mutually_exclusive_group()
    speed.add_argument("--latency", type=Path, metavar="FILE", help="latency file, written by `branchline calibrate`")
    speed.add_argument("--model", metavar="NAME", help="a model calibrated on this machine (default: the embedded one)")


def add_pages_option(parser: argparse.ArgumentParser, help_text: str) -> None:
    parser.add_argument("--pages", metavar=f"N|{UNLIMITED}", help=help_text)


def read_pages(words: str | None, file: LatencyFile) -> int | None:
    """``None`` is unlimited. Raises ConfigError."""
    if words == UNLIMITED:
        return None
    if words is None:
        return file.pages
    if not words.isdecimal() or int(words) < 1:
        raise ConfigError(f"pages must be a number above zero or {UNLIMITED!r}, not {words!r}")
    return int(words)


def read_workload(options: argparse.Namespace) -> Workload:
    """Raises ConfigError: the trace cannot be read, or an option is out of range."""
    for name in ("scale", "rate", "first"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name} must be above zero")
    if options.synthetic is not None:
        workload = make_workload(options.synthetic)
    else:
        workload = read_trace(options.trace, options.format, options.scale)
    workload = workload if options.first is None else workload.first(options.first)
    return workload.at_rate(options.rate)


def read_latency(options: argparse.Namespace) -> LatencyFile:
    """Raises ConfigError: there is no such file, or it cannot be read."""
    if options.latency is not None:
        return LatencyFile.load(options.latency)
    packaged = packaged_latency()
    path = latency_path(Environment.read().cache_dir, options.model or packaged.model)
    if path.exists():
        return LatencyFile.load(path)
    if options.model is None or _slug(options.model) == _slug(packaged.model):
        return packaged
    raise ConfigError(f"{options.model} has not been calibrated here: run `branchline calibrate {options.model}` first")


def show_progress(words: str) -> None:
    """One line that is written over and over, for people who wait at a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[Kbranchline: {words}", end="", file=sys.stderr, flush=True)


def end_progress() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def latency_path(cache_dir: str, model: str) -> Path:
    """Where the latency file of a model is looked for unless a path is given."""
    return Path(cache_dir) / "latency" / f"{_slug(model)}.json"


def packaged_latency() -> LatencyFile:
    """The default model with native kernels on AVX2, as measured by the authors."""
    data = importlib.resources.files("branchline.sim").joinpath("data", PACKAGED).read_bytes()
    return LatencyFile.parse(data, PACKAGED)


def _slug(model: str) -> str:
    """A file name for a model, whether it is given by its name or by the path of its file."""
    return re.sub(r"[^a-z0-9.]+", "-", Path(model).name.lower().removesuffix(".gguf")).strip("-")
