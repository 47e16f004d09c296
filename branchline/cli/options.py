"""Options that several commands share, and how they become settings. Flags are named like the fields they set; a
default stands in one place only, the field itself.
"""

import argparse
import dataclasses
from collections.abc import Iterable
from typing import Any

from branchline.base.config import EngineConfig, ServerConfig
from branchline.core.request import SamplingParams

ENGINE_HELP = {
    "threads": "threads of the executor (default: the CPUs this process may use)",
    "context_length": "longest sequence in tokens (default: the model's)",
    "page_size": "tokens per KV page",
    "pages": "KV pages (default: a quarter of the available memory)",
    "max_running": "sequences computed at the same time",
    "max_queued": "waiting requests beyond which new ones are refused",
    "max_step_tokens": "token budget of one step",
    "max_chunk_tokens": "most prompt tokens of one request in one step (default: what the budget leaves)",
    "policy": "order of the queue: fcfs or lpm",
    "waiting_timeout_s": "seconds a request may wait before it is refused (default: no limit)",
    "running_timeout_s": "seconds a request may run (default: no limit)",
    "step_timeout_s": "seconds after which a step makes /ready answer 503",
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


def _flag(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")
