"""`branchline doctor`: what this machine, this installation and a model can do together, and what would be faster."""

import argparse
import importlib.metadata
import platform
import sys

from rich.console import Console
from rich.table import Table

from branchline.base.config import EngineConfig, Environment
from branchline.base.errors import ModelError
from branchline.base.machine import Machine
from branchline.base.version import __version__
from branchline.cli.options import add_engine_options, engine_settings
from branchline.engine.build import HOW_TO_BUILD, announce, bytes_per_page, derive
from branchline.models.checkpoint import Checkpoint
from branchline.models.registry import build_graph
from branchline.models.source import open_checkpoint
from branchline.ops.native import usable_isas

GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as for serve (default: the embedded model)")
    add_engine_options(parser, only=("threads", "context_length", "pages", "page_size", "max_running"))


def run(options: argparse.Namespace) -> int:
    console = Console(highlight=False)
    machine = Machine.look()
    config = EngineConfig(**engine_settings(options))
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in (*machine_facts(machine), *installation_facts()):
        table.add_row(f"[bold]{name}[/]", value)
    try:
        checkpoint = open_checkpoint(config.model, Environment.read().cache_dir, announce)
    except ModelError as error:
        table.add_row("[bold]model[/]", f"[red]{error}[/]")
        console.print(table)
        return 1
    for name, value in model_facts(checkpoint, config, machine):
        table.add_row(f"[bold]{name}[/]", value)
    console.print(table)
    for hint in hints(checkpoint, config, machine):
        console.print(f"[yellow]•[/] {hint}")
    return 0


def machine_facts(machine: Machine) -> list[tuple[str, str]]:
    return [
        ("processor", f"{machine.cpu_model}, {machine.cpus} usable CPUs"),
        ("instruction sets", " ".join(machine.flags) or "none that matter"),
        ("memory", f"{machine.memory_bytes / GIB:.1f} GiB, {machine.available_bytes / GIB:.1f} GiB available"),
    ]


def installation_facts() -> list[tuple[str, str]]:
    isas = usable_isas()
    numpy_version = importlib.metadata.version("numpy")
    return [
        ("branchline", f"{__version__} on Python {platform.python_version()} ({sys.executable})"),
        ("executor", f"native kernels for {', '.join(isas)}; the first is used" if isas else
                     f"reference (numpy {numpy_version}, float32, threaded BLAS): this installation has no native kernels"),
    ]  # fmt: skip


def model_facts(checkpoint: Checkpoint, config: EngineConfig, machine: Machine) -> list[tuple[str, str]]:
    model, graph = checkpoint.config, build_graph(checkpoint.config, checkpoint.names)
    settled = derive(config, checkpoint, graph, machine)
    page_bytes = bytes_per_page(settled, graph)
    pages = settled.pages or 0
    weights = weight_count(checkpoint)
    return [
        ("model", f"{model.name} ({model.architecture}, {weights / 1e6:.0f} M parameters, {model.layers} layers)"),
        ("context", f"{settled.context_length} tokens"),
        ("weights", f"{weight_bytes(checkpoint) / GIB:.2f} GiB{'' if usable_isas() else ' as float32'}"),
        ("KV cache", f"{pages} pages of {settled.page_size} tokens = {pages * settled.page_size} tokens, "
                     f"{pages * page_bytes / GIB:.2f} GiB"),
    ]  # fmt: skip


def hints(checkpoint: Checkpoint, config: EngineConfig, machine: Machine) -> list[str]:
    """What the user could change, most useful first."""
    found = []
    needed = weight_bytes(checkpoint)
    if needed > machine.available_bytes:
        found.append(f"The weights need {needed / GIB:.1f} GiB, more than is available: choose a smaller model.")
    if "avx2" not in machine.flags and "asimd" not in machine.flags:
        found.append("This processor has no vector instructions that BLAS libraries use; expect very slow answers.")
    if config.threads is not None and config.threads > machine.cpus:
        found.append(f"{config.threads} threads share {machine.cpus} CPUs: --threads {machine.cpus} would be faster.")
    if not usable_isas():
        found.append(f"Native kernels would be several times faster. {HOW_TO_BUILD}")
    return found


def weight_count(checkpoint: Checkpoint) -> int:
    return sum(checkpoint.tensor(name).size for name in checkpoint.names)


def weight_bytes(checkpoint: Checkpoint) -> int:
    """About as much as the executor holds: native kernels keep the encoding of the file, the reference executor float32."""
    if usable_isas():
        return sum(checkpoint.tensor(name).data.nbytes for name in checkpoint.names)
    return weight_count(checkpoint) * 4
