"""From a request's prompt to token ids: the slow part of the text side, pure and safe to run in a thread.

A chat is rendered by the template with every special token that a message spells broken up first, so that only the
template itself can open or close a turn. Refuses to know: what becomes of the ids (``side``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from branchline.base.errors import ContextLengthExceeded, InvalidRequest
from branchline.base.ids import TokenId
from branchline.text.template import Template
from branchline.text.tokenizer import Tokenizer, clean
from branchline.wire.messages import ChatPrompt, ModelFacts, Prompt, TextPrompt, TokenPrompt

MAX_DEPTH = 64
"""Nesting of message contents and template arguments."""


@dataclass(frozen=True, slots=True)
class PromptReader:
    tokenizer: Tokenizer
    template: Template
    facts: ModelFacts

    @property
    def vocab_size(self) -> int:
        """Ids that are tokens of both the tokenizer and the model."""
        return min(self.tokenizer.vocab_size, self.facts.vocab_size)

    @property
    def context(self) -> int:
        """Tokens of the longest sequence, prompt and output together, that context and KV memory allow."""
        return min(self.facts.context_length, self.facts.max_prompt_tokens + 1)

    def tokens(self, prompt: Prompt, *, add_special: bool, param: str) -> list[TokenId]:
        """The ids of a prompt, of any length. A chat gets no BOS but its template's.

        Raises:
            InvalidRequest: with ``param``, if the prompt cannot be read.
        """
        if isinstance(prompt, TokenPrompt):
            return self._checked(prompt.tokens, param)
        try:
            if isinstance(prompt, TextPrompt):
                return self.tokenizer.encode(clean(prompt.text), add_special=add_special)
            return self.tokenizer.encode(self.template.render(_guarded(prompt, self.tokenizer.guard)), add_special=False)
        except InvalidRequest as error:
            error.param = error.param or param
            raise

    def for_generation(self, prompt: Prompt, *, add_special: bool, param: str) -> list[TokenId]:
        """The ids of a prompt that the model can continue: at least one, and room for one more.

        Raises:
            InvalidRequest: it is empty and the model has no BOS to begin with, or it cannot be read.
            ContextLengthExceeded: it fills the context or the memory.
        """
        tokens = self.tokens(prompt, add_special=add_special, param=param)
        if not tokens:
            bos = self.tokenizer.bos_id
            if bos is None or not isinstance(prompt, TextPrompt):
                raise InvalidRequest("The prompt must not be empty.", param=param)
            tokens = [bos]
        if len(tokens) >= self.context:
            raise ContextLengthExceeded(context=self.context, prompt=len(tokens), param=param)
        return tokens

    def _checked(self, tokens: tuple[TokenId, ...], param: str) -> list[TokenId]:
        for token in tokens:
            if not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise InvalidRequest(f"Token {token!r} is not between 0 and {self.vocab_size - 1}.", param=param)
        return list(tokens)


def _guarded(prompt: ChatPrompt, guard: Callable[[str], str]) -> ChatPrompt:
    return ChatPrompt(
        messages=tuple(_map_texts(message, guard, MAX_DEPTH) for message in prompt.messages),
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        template_arguments=_map_texts(prompt.template_arguments, guard, MAX_DEPTH),
    )


def _map_texts(value: Any, change: Callable[[str], str], depth: int) -> Any:
    """``value`` with every string in it changed, names included."""
    if isinstance(value, str):
        return change(value)
    if not isinstance(value, dict | list | tuple):
        return value
    if not depth:
        raise InvalidRequest(f"The messages are nested more than {MAX_DEPTH} levels deep.", param="messages")
    if isinstance(value, dict):
        return {change(str(name)): _map_texts(item, change, depth - 1) for name, item in value.items()}
    return [_map_texts(item, change, depth - 1) for item in value]
