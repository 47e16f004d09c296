"""Chat templates: messages in, the text of a prompt out, as transformers' ``apply_chat_template`` renders them.

Templates come from the model or from the operator, never from a request, and are nevertheless not trusted: an
immutable sandbox without loaders, bounded ranges, products and output. Whatever a template raises becomes
InvalidRequest; only the words of its own ``raise_exception`` are shown.

Knows: Jinja. Refuses to know: tokens (special tokens arrive as named texts) and what day it is (``now`` is passed in).
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn, Protocol

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from branchline.base.errors import InvalidRequest, ModelError
from branchline.wire.messages import ChatPrompt

MAX_OUTPUT_CHARS = 16 << 20
MAX_MESSAGE_CHARS = 500
_RESERVED = frozenset(
    {
        "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize",
        "bos_token", "eos_token", "pad_token", "unk_token", "raise_exception", "strftime_now",
        "range", "dict", "lipsum", "cycler", "joiner", "namespace",
    }
)  # fmt: skip
_END = "\ufdd1"
"""A noncharacter behind the message that is to be continued: the prompt is cut there."""
_REFUSAL = "The chat template of this model cannot render these messages."


class Template(Protocol):
    def render(self, prompt: ChatPrompt) -> str:
        """The prompt as text, special tokens spelled out. Raises InvalidRequest."""


class NoTemplate:
    """Stands where a model has no chat template."""

    def render(self, prompt: ChatPrompt) -> str:
        raise InvalidRequest(
            "This model has no chat template. Use the completions endpoint, or start the server with --chat-template.",
            param="messages",
        )


class ChatTemplate:
    """One compiled template. Rendering changes nothing and is safe from several threads."""

    def __init__(
        self,
        text: str,
        *,
        variables: Mapping[str, str],
        now: Callable[[], datetime],
        max_output_chars: int = MAX_OUTPUT_CHARS,
    ) -> None:
        """``variables`` are special tokens by name (``bos_token``, ...). Raises ModelError if ``text`` is not Jinja."""
        self._variables = dict(variables)
        self._max_output_chars = max_output_chars
        try:
            self._template = _environment(now).from_string(text)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template is not valid Jinja: {error}") from error

    def render(self, prompt: ChatPrompt) -> str:
        _check(prompt)
        if not prompt.continue_final_message:
            return self._render(prompt)
        last = {**prompt.messages[-1], "content": f"{prompt.messages[-1].get('content') or ''}{_END} "}
        text = self._render(prompt, last)
        place = text.rfind(_END)
        if place < 0:
            raise InvalidRequest(
                "The chat template leaves out the final message, so it cannot be continued.", param="messages"
            )
        # A template that trims takes the space behind the mark, and would have taken those before it.
        return text[:place] if text[place + 1 : place + 2] == " " else text[:place].rstrip()

    def _render(self, prompt: ChatPrompt, *last: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        room = self._max_output_chars
        try:
            for piece in self._template.generate(
                **self._variables,
                **prompt.template_arguments,
                messages=[*prompt.messages[:-1], *last] if last else list(prompt.messages),
                add_generation_prompt=prompt.add_generation_prompt,
            ):
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    raise InvalidRequest("The messages make a prompt that is too long.", param="messages")
        except InvalidRequest:
            raise
        except Exception as error:  # a template can raise anything; nothing of it is the request's to see
            raise InvalidRequest(_REFUSAL, param="messages") from error
        return "".join(pieces)


def chat_template(
    text: str | None, *, variables: Mapping[str, str], now: Callable[[], datetime]
) -> ChatTemplate | NoTemplate:
    """The template to use: of the model, or the operator's replacement for it."""
    return NoTemplate() if text is None else ChatTemplate(text, variables=variables, now=now)


def _check(prompt: ChatPrompt) -> None:
    if not prompt.messages:
        raise InvalidRequest("messages must not be empty.", param="messages")
    taken = sorted(_RESERVED.intersection(prompt.template_arguments))
    if taken:
        raise InvalidRequest(f"Template arguments may not set {', '.join(taken)}.", param="chat_template_kwargs")
    if prompt.continue_final_message and prompt.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other.", param="continue_final_message"
        )


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Products and powers are bounded: ``'x' * 10**9`` would take the memory of the process."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= 1 << 32 and 0 <= right <= 8):
            raise jinja2.exceptions.SecurityError("a power is too large")
        if operator == "*" and max(_repeated_size(left, right), _repeated_size(right, left)) > MAX_OUTPUT_CHARS:
            raise jinja2.exceptions.SecurityError("a repetition is too long")
        return super().call_binop(context, operator, left, right)


def _repeated_size(sequence: Any, count: Any) -> int:
    return len(sequence) * count if isinstance(sequence, str | list | tuple) and isinstance(count, int) else 0


class _GenerationBlocks(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it this way

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment(now: Callable[[], datetime]) -> jinja2.Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; prompts are not HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: object) -> NoReturn:
    raise InvalidRequest(str(message)[:MAX_MESSAGE_CHARS], param="messages")
