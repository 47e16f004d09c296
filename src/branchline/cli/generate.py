"""`branchline generate PROMPT`: one completion from an engine in this process."""

import argparse
import sys

import msgspec

from branchline.cli.options import add_engine_options, add_sampling_options, engine_settings, sampling_params
from branchline.engine.offline import LLM

DEFAULT_MAX_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads standard input")
    parser.add_argument("--model", help="GGUF file, Hugging Face folder or hf:org/name (default: the embedded model)")
    parser.add_argument("--chat", action="store_true", help="send the prompt through the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object: text, finish reason, token counts")
    add_sampling_options(parser)
    add_engine_options(parser, only=("threads", "quantize", "context_length", "pages"))
    parser.set_defaults(max_tokens=DEFAULT_MAX_TOKENS)


def run(options: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    sampling = sampling_params(options)
    with LLM(**engine_settings(options)) as llm:
        messages = [{"role": "user", "content": prompt}]
        if options.json:
            completion = llm.chat(messages, sampling) if options.chat else llm.generate(prompt, sampling)
            print(msgspec.json.encode(completion).decode())
            return 0
        for text in llm.stream(messages if options.chat else prompt, sampling):
            print(text, end="", flush=True)
        print()
    return 0
