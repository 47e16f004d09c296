"""A client of OpenAI-compatible completion servers that costs little: the machine's time belongs to the server.

Standard-library streams, a parser in C for HTTP, one typed JSON decode per event. Every request has a connection of its own.
Knows: one exchange, and how long it took. Refuses to know: what is asked and how often.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import httptools
import msgspec

from branchline.base.errors import ConfigError

READ_BYTES = 1 << 16
MOST_ANSWER_BYTES = 1 << 20
"""Longest event, and longest answer that is not a stream."""
SHOWN_CHARACTERS = 200
CONNECT_TIMEOUT_S = 10.0


class RequestFailed(Exception):
    """One request has no result; the sentence says why. Counted by ``bench.drive``."""


class Unreachable(RequestFailed):
    """Nobody answers at this address."""


@dataclass(frozen=True, slots=True)
class Server:
    host: str
    port: int
    is_secure: bool
    path: str
    """What stands before ``/v1``."""
    api_key: str | None = None
    timeout_s: float = 600.0
    """From connecting to the last byte of an answer."""

    @classmethod
    def at(cls, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> "Server":
        """``url`` with or without ``/v1``.

        Raises:
            ConfigError: this is no http or https address.
        """
        try:
            parts = urlsplit(url)
            port, host = parts.port, parts.hostname
        except ValueError:
            port, host = None, None
        if host is None or parts.scheme not in ("http", "https") or not url.isascii() or not url.isprintable() or " " in url:
            raise ConfigError(f"{url!r} is not an address like http://127.0.0.1:8000")
        is_secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(host, port or (443 if is_secure else 80), is_secure, path, api_key, timeout_s)

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    ttft_s: float
    """From the start to the first text."""
    total_s: float
    output_tokens: int
    """As the server counts; pieces of text if it does not."""
    prompt_tokens: int


async def complete(server: Server, model: str, prompt: str, max_tokens: int, started_s: float | None = None) -> Completion:
    """One streamed greedy completion of exactly ``max_tokens``. ``started_s`` (of ``time.perf_counter``): when the request
    was due, if not now.

    Raises:
        RequestFailed: there is no complete answer in time.
    """
    started_s = time.perf_counter() if started_s is None else started_s
    body = {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    stream = _Stream()
    answer = await _exchange(server, "POST", "/v1/completions", msgspec.json.encode(body), stream)
    if answer.status != 200:
        raise RequestFailed(_refusal(answer.status, stream.rest))
    if not (stream.is_done or answer.is_complete):
        raise RequestFailed("the stream broke off")
    ended_s, usage, pieces = time.perf_counter(), stream.usage, stream.pieces
    return Completion(
        text="".join(pieces),
        ttft_s=(stream.first_s or ended_s) - started_s,
        total_s=ended_s - started_s,
        output_tokens=len(pieces) if usage.completion_tokens is None else usage.completion_tokens,
        prompt_tokens=usage.prompt_tokens or 0,
    )


async def first_model(server: Server) -> str:
    """The name the server gives its first model; ``default`` where it lists none.

    Raises:
        RequestFailed: it does not answer, or wants to know who asks.
    """
    document = _Document()
    answer = await _exchange(server, "GET", "/v1/models", b"", document)
    if answer.status in (401, 403):
        raise RequestFailed(_refusal(answer.status, document.body))
    try:
        return msgspec.json.decode(document.body, type=_Models).data[0].id
    except (msgspec.DecodeError, IndexError):
        return "default"


# ---------------------------------------------------------------- events of a stream


class _Choice(msgspec.Struct):
    text: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_decode_event = msgspec.json.Decoder(_Event).decode


class _Sink(Protocol):
    is_done: bool
    """Nothing more is wanted."""

    def take(self, status: int, data: bytes) -> None:
        """The next part of the body."""


class _Document:
    """An answer in one piece."""

    def __init__(self) -> None:
        self.is_done = False
        self.body = b""

    def take(self, status: int, data: bytes) -> None:
        self.body += data
        _require_short(self.body)


class _Stream:
    """Server-sent events, up to ``[DONE]``."""

    def __init__(self) -> None:
        self.is_done = False
        self.rest = b""
        """What no line end has followed yet; of a refusal: all of it."""
        self.pieces: list[str] = []
        self.first_s: float | None = None
        self.usage = _Usage()

    def take(self, status: int, data: bytes) -> None:
        self.rest += data
        if status == 200:
            *lines, self.rest = self.rest.split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and not self.is_done:
                    self._hear(line[5:].strip())
        _require_short(self.rest)

    def _hear(self, text: bytes) -> None:
        if text == b"[DONE]":
            self.is_done = True
            return
        try:
            event = _decode_event(text)
        except msgspec.DecodeError as error:
            raise RequestFailed(f"an event of the stream is not what OpenAI sends: {error}") from None
        if event.error:
            raise RequestFailed(f"the stream ended with an error: {_shown(event.error)}")
        self.usage = event.usage or self.usage
        for choice in event.choices or ():
            if choice.text:
                self.first_s = self.first_s or time.perf_counter()
                self.pieces.append(choice.text)


def _require_short(data: bytes) -> None:
    if len(data) > MOST_ANSWER_BYTES:
        raise RequestFailed(f"the answer has a part of more than {MOST_ANSWER_BYTES} bytes")


# ---------------------------------------------------------------- one exchange


class _Answer:
    """Where the HTTP parser puts what it reads. Its callbacks have the names that ``httptools`` looks for."""

    def __init__(self) -> None:
        self.is_complete = False
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    def feed(self, data: bytes) -> bytes:
        """What ``data`` holds of the body."""
        self._parser.feed_data(data)
        body, self._body = b"".join(self._body), []
        return body

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = True


async def _exchange(server: Server, method: str, path: str, body: bytes, sink: _Sink) -> _Answer:
    """Send a request and give the body of the answer to ``sink`` as it comes. An answer that breaks off just ends.

    Raises:
        RequestFailed: no connection, no HTTP, or not in time; or ``sink`` does not want it.
    """
    answer = _Answer()
    try:
        async with asyncio.timeout(server.timeout_s):
            reader, writer = await _connect(server)
            try:
                writer.write(_head(server, method, path, len(body)) + body)
                while not (answer.is_complete or sink.is_done) and (data := await reader.read(READ_BYTES)):
                    if part := answer.feed(data):
                        sink.take(answer.status, part)
            finally:
                writer.close()
    except TimeoutError:
        raise RequestFailed(f"no complete answer within {server.timeout_s:g} s") from None
    except httptools.HttpParserError:
        raise RequestFailed("the answer is not HTTP") from None
    except OSError as error:
        raise RequestFailed(f"the connection broke: {_reason(error)}") from None
    if answer.status == 0:
        raise RequestFailed("the connection was closed without an answer")
    return answer


async def _connect(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.create_default_context() if server.is_secure else None
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            return await asyncio.open_connection(server.host, server.port, ssl=context)
    except TimeoutError:
        raise Unreachable(f"{server.address} does not answer within {CONNECT_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise Unreachable(f"{server.address} cannot be reached: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    """Event loops wrap the system's word differently."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return (error.strerror or str(error) or type(error).__name__)[:SHOWN_CHARACTERS]


def _head(server: Server, method: str, path: str, body_bytes: int) -> bytes:
    lines = [
        f"{method} {server.path}{path} HTTP/1.1", f"Host: {server.address}", "Connection: close",
        "Content-Type: application/json", f"Content-Length: {body_bytes}",
    ]  # fmt: skip
    if server.api_key is not None:
        lines.append(f"Authorization: Bearer {server.api_key}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _refusal(status: int, body: bytes) -> str:
    try:
        error = msgspec.json.decode(body, type=_Event).error or body.decode(errors="replace")
    except msgspec.DecodeError:
        error = body.decode(errors="replace")
    return f"HTTP {status}: {_shown(error)}"


def _shown(error: Any) -> str:
    """The words of OpenAI's error object, or of whatever there is instead; on one line."""
    words = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(words).split())[:SHOWN_CHARACTERS]
