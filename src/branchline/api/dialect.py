"""The JSON shapes of OpenAI's two generation APIs, as bytes.

A stream costs one JSON encode per event: what does not change is put together once per call. Knows: shapes. Refuses to
know: HTTP, when bytes are sent (``api.generate``).
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from branchline.api.errors import body_of
from branchline.base.errors import RequestError
from branchline.base.ids import TokenId
from branchline.core.result import Usage
from branchline.wire.messages import TextLogprob

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What is the same in all parts of one answer."""

    id: str
    created: int
    """Wall-clock seconds."""
    model: str


class Offsets:
    """Where each token begins in the text, in characters. A token inside a character begins where the character does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def next(self, data: bytes) -> int:
        start = self._characters
        self._characters += len(self._decoder.decode(data))
        return start


class Dialect(Protocol):
    """Shape of one API. Stateless: what a choice must remember is passed in."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    wants_logprobs: bool

    def before_text(self, index: int, *, is_first: bool) -> bytes:
        """Beginning of a choice in a chunk, up to its text."""

    after_text: bytes
    """From the text to the log probabilities."""

    def before_reason(self, index: int) -> bytes:
        """A choice without news but its finish reason."""

    def logprobs(self, entries: Sequence[TextLogprob], offsets: Offsets) -> dict[str, Any]:
        """Log probabilities of some tokens in a row."""

    def choice(self, index: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """A choice of a whole answer, without its finish reason."""


class CompletionDialect:
    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"
    after_text = b',"logprobs":'

    def __init__(self, wants_logprobs: bool) -> None:
        self.wants_logprobs = wants_logprobs

    def before_text(self, index: int, *, is_first: bool) -> bytes:
        return b'{"index":%d,"text":' % index

    def before_reason(self, index: int) -> bytes:
        return b'{"index":%d,"text":"","logprobs":null,"finish_reason":' % index

    def logprobs(self, entries: Sequence[TextLogprob], offsets: Offsets) -> dict[str, Any]:
        """Parallel arrays; the first prompt token has null for both."""
        return {
            "tokens": [_name(entry.text, entry.data) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [_alternatives(entry) for entry in entries],
            "text_offset": [offsets.next(entry.data) for entry in entries],
        }

    def choice(self, index: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs}


class ChatDialect:
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    after_text = b'},"logprobs":'

    def __init__(self, wants_logprobs: bool) -> None:
        self.wants_logprobs = wants_logprobs

    def before_text(self, index: int, *, is_first: bool) -> bytes:
        """The role travels with the first text, so that the first chunk a client sees is the first token."""
        role = b'"role":"assistant",' if is_first else b""
        return b'{"index":%d,"delta":{%b"content":' % (index, role)

    def before_reason(self, index: int) -> bytes:
        return b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":' % index

    def logprobs(self, entries: Sequence[TextLogprob], offsets: Offsets) -> dict[str, Any]:
        return {"content": [_chat_entry(entry) for entry in entries], "refusal": None}

    def choice(self, index: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": index, "message": {"role": "assistant", "content": text}, "logprobs": logprobs}


class Frames:
    """Server-sent events of one call."""

    def __init__(self, dialect: Dialect, envelope: Envelope, *, include_usage: bool) -> None:
        fields = b'"id":%b,"object":%b,"created":%d,"model":%b' % (
            _encode(envelope.id),
            _encode(dialect.chunk_object),
            envelope.created,
            _encode(envelope.model),
        )
        self._dialect = dialect
        self._head = b"data: {" + fields + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def text(
        self, index: int, text: str, logprobs: dict[str, Any] | None, *, is_first: bool, usage: dict[str, Any] | None = None
    ) -> bytes:
        """More text of one choice."""
        parts = (
            self._head,
            self._dialect.before_text(index, is_first=is_first),
            _encode(text),
            self._dialect.after_text,
            b"null" if logprobs is None else _encode(logprobs),
            b',"finish_reason":null}',
            self._end(usage),
        )
        return b"".join(parts)

    def finish(self, index: int, reason: str, stop: str | TokenId | None, *, usage: dict[str, Any] | None = None) -> bytes:
        """The last chunk of one choice. It carries no text: clients drop the text of such chunks."""
        start = self._head + self._dialect.before_reason(index)
        return start + _encode(reason) + b',"stop_reason":' + _encode(stop) + b"}" + self._end(usage)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk of the call: no choices, the usage of all of them."""
        return self._head + self._end(usage)

    def _end(self, usage: dict[str, Any] | None) -> bytes:
        return self._tail if usage is None else b'],"usage":' + _encode(usage) + b"}\n\n"


def error_frame(error: RequestError) -> bytes:
    """An error after the answer has begun."""
    return b"data: " + body_of(error) + b"\n\n"


def whole(dialect: Dialect, envelope: Envelope, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> bytes:
    return _encode(
        {
            "id": envelope.id,
            "object": dialect.whole_object,
            "created": envelope.created,
            "model": envelope.model,
            "choices": choices,
            "usage": usage,
        }
    )


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _name(text: str, data: bytes) -> str:
    """A token's text; tokens that are no whole characters are spelled as bytes, so that different tokens differ."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return text or data.decode()


def _alternatives(entry: TextLogprob) -> dict[str, float] | None:
    """The most likely tokens and the chosen one, most likely first."""
    if entry.logprob is None:
        return None
    names = {_name(text, data): logprob for _, text, data, logprob in entry.top}
    names.setdefault(_name(entry.text, entry.data), entry.logprob)
    return names


def _chat_entry(entry: TextLogprob) -> dict[str, Any]:
    top = [{"token": _name(text, data), "logprob": logprob, "bytes": list(data)} for _, text, data, logprob in entry.top]
    return {"token": _name(entry.text, entry.data), "logprob": entry.logprob, "bytes": list(entry.data), "top_logprobs": top}
