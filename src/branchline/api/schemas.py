"""The bodies that clients may send: names, types and sizes. Unknown keys are ignored, ``null`` is the same as absence.

Knows: what a field may hold. Refuses to know: how fields act together (``api.parse``) and what sampling allows
(``core.limits``, which the offline engine shares).
"""

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

MAX_CHOICES = 64
"""``n`` at most."""
MAX_SEQUENCES = 256
"""``n`` times the number of prompts at most."""

_INT31 = (1 << 31) - 1

TokenIdField: TypeAlias = Annotated[int, Meta(ge=0, le=_INT31)]
Name: TypeAlias = Annotated[str, Meta(max_length=256)]
TokenCount: TypeAlias = Annotated[int, Meta(ge=1, le=_INT31)]
TokenIds: TypeAlias = Annotated[list[TokenIdField], Meta(min_length=1)]
Alternatives: TypeAlias = Annotated[int, Meta(ge=0, le=20)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Usage in every chunk (an extension of vLLM)."""


class SamplingFields(msgspec.Struct, kw_only=True):
    """What completions and chat completions have in common."""

    model: Name | None = None
    max_tokens: TokenCount | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """-1 and 0: off."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-_INT31, le=_INT31)] | None = None
    user: Name | None = None
    """Whose share of the engine it uses under the policy ``fair``, if the server has no keys."""
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None
    """Seconds from arrival to the last token."""
    cache_salt: Name | None = None
    prompt_cache_key: Name | None = None
    # Accepted only where they change nothing: output that silently ignores a constraint is worse than an error.
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    use_beam_search: bool | None = None


class CompletionBody(SamplingFields, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | Annotated[list[TokenIdField | str | TokenIds], Meta(min_length=1)]
    echo: bool | None = None
    logprobs: Alternatives | None = None
    """0 is not "off": it asks for the chosen token alone."""
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    add_special_tokens: bool | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: Name
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    role: Name
    content: str | list[ContentPart] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None


Messages: TypeAlias = Annotated[list[Message], Meta(min_length=1, max_length=4096)]
TemplateArguments: TypeAlias = Annotated[dict[str, Any], Meta(max_length=64)]


class ChatBody(SamplingFields, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: TokenCount | None = None
    """Wins over ``max_tokens``."""
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    chat_template: Any = None
    """Refused: templates come from the operator."""
    tools: list[Any] | None = None
    """Refused until they are supported; an empty list is fine."""
    tool_choice: Any = None
    functions: list[Any] | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """``POST /tokenize``: a prompt or messages."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    chat_template: Any = None
    tools: list[Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """``POST /detokenize``."""

    model: Name | None = None
    tokens: list[TokenIdField]


class PinBody(msgspec.Struct, kw_only=True):
    """``POST /v1/cache/pin``: a prompt, token ids or messages, and for how long."""

    seconds: Annotated[float, Meta(ge=0, le=86400)]
    """0 removes the pin."""
    prompt: str | TokenIds | None = None
    messages: Messages | None = None
    tenant: Name | None = None
    """Of the requests that shall find it: the first 32 hexadecimal digits of the SHA-256 of their API key."""
    cache_salt: Name | None = None
    prompt_cache_key: Name | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    chat_template: Any = None
    tools: list[Any] | None = None
