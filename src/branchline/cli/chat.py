"""`branchline chat`: a conversation in the terminal, streamed. Each turn hits the prefix cache of the one before."""

import argparse

from rich.console import Console

from branchline.cli.options import add_engine_options, add_sampling_options, engine_settings, sampling_params
from branchline.engine.offline import LLM

HELP = "/new starts again, /quit or Ctrl-D ends, Ctrl-C stops an answer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="GGUF file, Hugging Face folder or hf:org/name (default: the embedded model)")
    parser.add_argument("--system", help="system message")
    add_sampling_options(parser)
    add_engine_options(parser, only=("threads", "quantize", "context_length", "pages"))


def run(options: argparse.Namespace) -> int:
    console = Console(highlight=False)
    console.print("Loading the model ...", style="dim")
    with LLM(**engine_settings(options)) as llm:
        console.print(f"[bold]{llm.facts.name}[/] · {llm.facts.context_length} tokens of context · {HELP}", style="dim")
        _converse(console, llm, options)
    return 0


def _converse(console: Console, llm: LLM, options: argparse.Namespace) -> None:
    opening = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(opening)
    while True:
        try:
            text = console.input("[bold green]> [/]").strip()
        except EOFError:
            console.print()
            return
        if text in ("/quit", "/exit"):
            return
        if text == "/new":
            messages = list(opening)
        elif text:
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": _answer(console, llm, messages, options)})


def _answer(console: Console, llm: LLM, messages: list[dict[str, str]], options: argparse.Namespace) -> str:
    parts: list[str] = []
    try:
        for text in llm.stream(messages, sampling_params(options)):
            parts.append(text)
            console.print(text, end="", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/]", end="")
    console.print()
    return "".join(parts)
