"""The command line: words in, exit code out. Each command lives in a module of its own and is imported only when used,
so that `branchline --help` answers at once.

Exit codes: 0 done; 1 a request could not be served; 2 wrong usage; 70 the engine failed; 78 model or settings are wrong;
130 interrupted.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from branchline.base.errors import BranchlineError, ConfigError, EngineDead, ModelError, RequestError
from branchline.base.version import __version__

USAGE, SOFTWARE, CONFIG, INTERRUPTED = 2, 70, 78, 130

COMMANDS = {
    "serve": "OpenAI-compatible server",
    "generate": "one completion from an engine in this process",
    "chat": "chat in the terminal",
    "why": "why a request waits or what became of it; why the queue grows",
    "doctor": "what this machine, this model and this installation can do",
    "simulate": "a trace or made-up traffic through the scheduler in virtual time",
    "calibrate": "measure how long steps take, for simulate and advise",
    "replay": "a journal once more through the scheduler: same plans, or what other settings would have done",
    "advise": "settings for the traffic of a trace",
    "bench": "how fast a server or an executor is",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="branchline", description="An LLM serving engine whose heart is a cache-aware scheduler."
    )
    parser.add_argument("--version", action="version", version=f"branchline {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    words = list(sys.argv[1:] if arguments is None else arguments)
    for name, help_text in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        if name in words[:1]:
            module = importlib.import_module(f"branchline.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    options = parser.parse_args(words)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return 1
    except BranchlineError as error:
        print(f"branchline: {error}", file=sys.stderr)
        return exit_code(error)


def exit_code(error: BranchlineError) -> int:
    match error:
        case ModelError() | ConfigError():
            return CONFIG
        case RequestError():
            return 1
        case EngineDead():
            return SOFTWARE
        case _:
            return SOFTWARE


if __name__ == "__main__":
    sys.exit(main())
