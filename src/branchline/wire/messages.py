"""Everything that crosses a process border, as closed msgspec structs. Never pickle, never an open type.

    client side (api, LLM class) ──ToText──▶ text side ──ToEngine──▶ engine
                                 ◀─ToClient─           ◀─FromEngine─

The text side owns tokenizer, template, detokenizer and stop strings. It may live in the HTTP process, in a process of
its own or in the process of the offline engine: the messages are the same.

Knows: shapes. Refuses to know: sockets (``wire.zmq``, ``wire.inproc``) and bytes (``wire.codec``).
"""

from typing import Any, Literal, TypeAlias

import msgspec

from branchline.base.finish import FinishReason
from branchline.base.ids import RequestId, TokenId
from branchline.core.request import Namespace, RequestSpec, SamplingParams
from branchline.core.result import Output, Usage
from branchline.core.stats import EngineStats

# ---------------------------------------------------------------- client -> text


class TextPrompt(msgspec.Struct, frozen=True, tag="text"):
    text: str


class TokenPrompt(msgspec.Struct, frozen=True, tag="tokens"):
    tokens: tuple[TokenId, ...]


class ChatPrompt(msgspec.Struct, frozen=True, tag="chat"):
    messages: tuple[dict[str, Any], ...]
    """Role and content, text parts already joined to a string."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_arguments: dict[str, Any] = {}


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """One choice to be generated. ``n`` choices are ``n`` of these with one ``group``."""

    request_id: RequestId
    prompt: Prompt
    sampling: SamplingParams
    param: str = "prompt"
    """Name of the field that carries the prompt, for error messages."""
    tenant: str = ""
    salt: str = ""
    user: str = ""
    timeout_s: float | None = None
    priority: int = 0
    group: RequestId = ""
    skip_special_tokens: bool = True
    include_stop: bool = False
    """Keep the matched stop string in the text."""
    echo: bool = False
    """The client wants the prompt's text back: ``Started`` carries it."""
    add_special_tokens: bool = True


class CancelText(msgspec.Struct, frozen=True, tag="cancel_text"):
    request_id: RequestId


class Tokenize(msgspec.Struct, frozen=True, kw_only=True, tag="tokenize"):
    call_id: str
    prompt: TextPrompt | ChatPrompt
    add_special_tokens: bool = True


class Detokenize(msgspec.Struct, frozen=True, kw_only=True, tag="detokenize"):
    call_id: str
    tokens: tuple[TokenId, ...]


class Control(msgspec.Struct, frozen=True, kw_only=True, tag="control"):
    """A word to the engine; the text side passes it on. ``Controlled`` answers with the same ``call_id``."""

    call_id: str
    verb: str
    """``pause``, ``continue``, ``flush``, ``drain``, ``abort_all`` or ``check``."""


class Pin(msgspec.Struct, frozen=True, kw_only=True, tag="pin"):
    """Keep what is cached of a prompt, whatever eviction would do. ``Controlled`` answers with the same ``call_id``."""

    call_id: str
    prompt: Prompt
    seconds: float
    """From now on; 0 removes the pin."""
    tenant: str = ""
    salt: str = ""
    add_special_tokens: bool = True


Subject: TypeAlias = Literal["requests", "request", "scheduler", "tree"]


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """A question about the engine's decisions; the text side passes it on. ``Told`` answers with the same ``call_id``."""

    call_id: str
    what: Subject
    request_id: RequestId = ""
    """For ``request``: of one request, or of the call whose choices they are."""
    tenant: str | None = None
    """For ``request``: show only what this tenant may see; ``None``: everything."""


ToText: TypeAlias = Generate | CancelText | Tokenize | Detokenize | Pin | Control | Ask

# ---------------------------------------------------------------- text -> client


class TextLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token with its text, its bytes and its log probability."""

    token: TokenId
    text: str
    data: bytes
    """The bytes of the token: several tokens may share one character."""
    logprob: float | None
    """``None`` for the first prompt token, which nothing predicts."""
    top: tuple[tuple[TokenId, str, bytes, float], ...] = ()


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The prompt is tokenized and on its way to the engine."""

    request_id: RequestId
    prompt_tokens: int
    prompt_text: str = ""
    """Only with ``echo``."""


class Delta(msgspec.Struct, frozen=True, tag="delta"):
    """More text. Never half a character, never something that may yet become a stop string. May be empty when only
    log probabilities or prompt log probabilities are news."""

    request_id: RequestId
    text: str
    token_count: int = 0
    """Tokens generated since the last news (their text may still be held back)."""
    logprobs: tuple[TextLogprob, ...] = ()
    prompt_logprobs: tuple[TextLogprob, ...] = ()


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The last news of a request. ``text`` is what had been held back."""

    request_id: RequestId
    reason: FinishReason
    usage: Usage
    text: str = ""
    token_count: int = 0
    logprobs: tuple[TextLogprob, ...] = ()
    prompt_logprobs: tuple[TextLogprob, ...] = ()
    stop: str | TokenId | None = None
    """What matched: a stop string or a stop token."""
    message: str = ""
    """For ends without success: a sentence that is safe to show."""
    status: int = 200
    retry_after_s: int = 0
    """For a full queue: when there may be room again, an estimate; 0: none."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A call that could not be served: the parts of a ``RequestError``."""

    request_id: RequestId
    """Or the ``call_id`` of a call."""
    message: str
    status: int = 400
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None


class Tokenized(msgspec.Struct, frozen=True, tag="tokenized"):
    call_id: str
    tokens: tuple[TokenId, ...]
    pieces: tuple[str, ...]


class Detokenized(msgspec.Struct, frozen=True, tag="detokenized"):
    call_id: str
    text: str


class Controlled(msgspec.Struct, frozen=True, tag="controlled"):
    call_id: str
    done: bool
    message: str = ""


class Told(msgspec.Struct, frozen=True, tag="told"):
    call_id: str
    body: bytes | None
    """JSON of a ``core.explain`` record; ``None``: there is no such request, or no answer."""
    message: str = ""
    """Why there is no answer, if that is so."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent by the engine several times a second, also while a step runs; never provoked by a request."""

    stats: EngineStats
    clock_ns: int
    """The engine's clock when it was sent."""
    live_texts: int = 0
    """Requests the text side has in its map (filled in by the text side as it passes the message on)."""


ToClient: TypeAlias = Started | Delta | Ended | Refused | Tokenized | Detokenized | Controlled | Told | Heartbeat

# ---------------------------------------------------------------- text -> engine


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    spec: RequestSpec


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """End a request wherever it is. Unknown ids are counted, not an error."""

    request_id: RequestId
    reason: FinishReason = FinishReason.CANCELLED
    """``STOP`` when the text side found a stop string."""


class PinTokens(msgspec.Struct, frozen=True, kw_only=True, tag="pin_tokens"):
    """A :class:`Pin`, tokenized."""

    call_id: str
    namespace: Namespace
    tokens: tuple[TokenId, ...]
    seconds: float


ToEngine: TypeAlias = Submit | Cancel | PinTokens | Control | Ask

# ---------------------------------------------------------------- engine -> text


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    outputs: tuple[Output, ...]


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, tag="model_facts"):
    """What the sides must agree on; sent once by the engine when it is ready."""

    name: str
    digest: str
    vocab_size: int
    context_length: int
    max_prompt_tokens: int
    """Longest prompt that can be served: what context and KV memory allow."""
    executor: str
    """For people: which executor runs and on which instruction set."""


FromEngine: TypeAlias = Outputs | Controlled | Told | Heartbeat | ModelFacts
