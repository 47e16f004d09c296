"""Options that several commands share, and how they become settings. Flags are named like the fields they set; a
default stands in one place only, the field itself.
"""

import argparse
import dataclasses
from collections.abc import Iterable
from typing import Any

from branchline.base.config import EVICTION_NAMES, POLICY_NAMES, QUANTIZE_NAMES, EngineConfig, ServerConfig
from branchline.core.request import SamplingParams

ENGINE_HELP = {
    "threads": "threads of the executor (default: the CPUs this process may use)",
    "executor": "native, reference, or auto: native kernels where they are installed",
    "kv_dtype": "numbers of the KV pages: f32, bf16 or int8 (auto: bf16 with native kernels)",
    "isa": "instruction set of the native kernels, see `branchline doctor`",
    "quantize": f"round F32, F16 and BF16 weights when they are loaded: {' or '.join(QUANTIZE_NAMES)}; weights that are "
    "quantized already stay as they are (default: nothing is rounded)",
    "context_length": "longest sequence in tokens (default: the model's)",
    "page_size": "tokens per KV page",
    "pages": "KV pages (default: a quarter of the available memory)",
    "max_running": "sequences computed at the same time",
    "max_queued": "waiting requests beyond which new ones are refused",
    "max_queued_tokens": "prompt tokens of waiting requests beyond which new ones are refused (default: no limit)",
    "max_step_tokens": "token budget of one step",
    "max_chunk_tokens": "most prompt tokens of one request in one step (default: what the budget leaves)",
    "policy": f"order of the queue: {', '.join(POLICY_NAMES)}",
    "overtake_tokens": "hrrn: work for later arrivals, in tokens, after which nobody overtakes a waiting request",
    "preemption_gap": "priority: how much higher a priority must be to take the place of running work",
    "policy_seed": "random: the seed",
    "eviction": f"which cached prefix goes first: {', '.join(EVICTION_NAMES)}",
    "pin_share": "share of the KV pages that pinned prefixes may hold",
    "waiting_timeout_s": "seconds a request may wait before it is refused (default: no limit)",
    "running_timeout_s": "seconds a request may run (default: no limit)",
    "step_timeout_s": "seconds after which a step makes /ready answer 503",
    "journal": "directory for a record of every decision, see `branchline replay` (default: none is kept)",
    "journal_max_bytes": "delete the oldest parts of the journal beyond this (default: no limit)",
}
SERVER_HELP = {
    "host": "address to listen on",
    "port": "port to listen on; 0 chooses a free one",
    "served_model_name": "name in /v1/models (default: the model's)",
    "text_workers": "0: tokenizer inside the HTTP process; 1: in a process of its own",
    "chat_template": "file with a Jinja chat template that replaces the model's",
    "max_body_bytes": "largest request body",
    "drain_timeout_s": "seconds that running requests may go on after SIGTERM",
    "log_level": "debug, info, warning or error",
}
KINDS: dict[str, type] = {"int": int, "float": float, "str": str}


def add_engine_options(parser: argparse.ArgumentParser, only: Iterable[str] | None = None) -> None:
    group = parser.add_argument_group("engine")
    names = list(ENGINE_HELP) if only is None else list(only)
    _add_fields(group, EngineConfig, {name: ENGINE_HELP[name] for name in names})
    if "policy" in names:
        group.add_argument(
            "--tenant-weight", dest="tenant_weights", action="append", type=_weight, metavar="NAME=WEIGHT",
            help="fair: share of a tenant, may be given several times (default: 1 for everyone)",
        )  # fmt: skip
    if "journal" in names:
        group.add_argument(
            "--journal-text", action="store_true", default=None,
            help="keep token ids, and so the text, in the journal (default: only which prompts begin alike)",
        )  # fmt: skip
    for name, help_text in (
        ("prefix_cache", "share KV of common prefixes"),
        ("overlap", "plan the next step while one runs"),
    ):
        group.add_argument(_flag(name), choices=("on", "off"), default="on", help=f"{help_text} (default: on)")


def add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    _add_fields(group, ServerConfig, SERVER_HELP)
    group.add_argument(
        "--allow-unauthenticated", action="store_true", help="serve other machines although no API key is set"
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, help="new tokens at most (default: what the context leaves)")
    group.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default: %(default)s)")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--repetition-penalty", type=float, default=1.0)
    group.add_argument("--seed", type=int)
    group.add_argument("--stop", action="append", default=[], help="stop string; may be given several times")


def engine_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig that were given."""
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    settings = {name: value for name, value in vars(options).items() if name in names and value is not None}
    for name in ("prefix_cache", "overlap"):
        if name in settings:
            settings[name] = settings[name] == "on"
    if "tenant_weights" in settings:
        settings["tenant_weights"] = tuple(settings["tenant_weights"])
    return settings


def server_settings(options: argparse.Namespace) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(ServerConfig)}
    return {name: value for name, value in vars(options).items() if name in names and value is not None}


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        stop=tuple(options.stop),
    )


def _add_fields(group: Any, config: type, helps: dict[str, str]) -> None:
    """One option per field; the help shows the field's own default, the value stays ``None`` unless it is given."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    for name, help_text in helps.items():
        field = fields[name]
        kind = KINDS[str(getattr(field.type, "__name__", field.type)).split(" ", maxsplit=1)[0]]
        shown = help_text if "default" in help_text else f"{help_text} (default: {field.default})"
        group.add_argument(_flag(name), dest=name, type=kind, default=None, help=shown)


def _weight(text: str) -> tuple[str, float]:
    tenant, _, weight = text.rpartition("=")
    try:
        return tenant, float(weight)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=WEIGHT") from None


def _flag(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")
