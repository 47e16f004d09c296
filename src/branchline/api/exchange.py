"""One request and its answer: the only place that speaks ASGI for handlers.

Knows: reading a body within limits, answering once, streaming with back-pressure, noticing that the client left.
Refuses to know: routes, keys, what is in a body.
"""

import asyncio
import re
import secrets
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from branchline.api.auth import Caller
from branchline.api.body import decode
from branchline.api.dialect import error_frame
from branchline.api.errors import ApiError, ClientGone, Header, body_of, headers_of
from branchline.base.errors import RequestError

BODY_TIMEOUT_S = 60.0
STALL_TIMEOUT_S = 30.0
"""A client that takes nothing for so long is treated as gone."""
_LARGE_BODY_BYTES = 64 << 10
"""Longer bodies are parsed off the event loop."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
_JSON: Header = (b"content-type", b"application/json")
_CLOSE: Header = (b"connection", b"close")
_STREAM: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

T = TypeVar("T")


class Exchange:
    """Created by the gate for each routed request. ``caller`` is set once, when the gate has let it in."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, caller: Caller, max_body_bytes: int) -> None:
        self.caller = caller
        self.path_params: dict[str, Any] = scope.get("path_params", {})
        self.status = 0
        """Status of the answer; 0 before it has begun, 499 if the client left first."""
        self._headers: Sequence[Header] = scope["headers"]
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        self._request_id = request_id_of(self._headers)
        self._is_complete = False

    @property
    def request_id(self) -> str:
        """What the answer says in ``x-request-id``."""
        return self._request_id.decode("ascii")

    # ------------------------------------------------------------ in

    async def json(self, kind: type[T]) -> T:
        """The body as a ``kind``.

        Raises:
            RequestError: 400, 408, 413 or 415.
            ClientGone: the client left while sending.
        """
        self._check_content()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await self._read()
        except TimeoutError:
            raise ApiError(408, "The body did not arrive in time.", headers=[_CLOSE]) from None
        if len(body) > _LARGE_BODY_BYTES:
            return await asyncio.to_thread(decode, body, kind)
        return decode(body, kind)

    def _check_content(self) -> None:
        for name, value in self._headers:
            if name == b"content-type" and value.partition(b";")[0].strip().lower() != b"application/json":
                raise ApiError(415, "The body must be application/json.", headers=[_CLOSE])
            if name == b"content-encoding" and value.strip().lower() != b"identity":
                raise ApiError(415, "Compressed bodies are not accepted.", headers=[_CLOSE])
            if name == b"content-length" and value.isdigit() and int(value[:20]) > self._max_body_bytes:
                raise self._too_large()

    async def _read(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._max_body_bytes} bytes.", headers=[_CLOSE])

    def departure(self) -> "Departure":
        """``async with exchange.departure(): ...`` is left with ClientGone at once when the client goes."""
        return Departure(self)

    async def wait_for_departure(self) -> bool:
        """False if the answer was complete first."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        return not self._is_complete

    # ------------------------------------------------------------ out

    async def reply(self, status: int, body: bytes, headers: Sequence[Header] = (_JSON,)) -> None:
        """A whole answer."""
        await self._start(status, (*headers, (b"content-length", b"%d" % len(body))))
        await self.write(body, more=False)

    async def reply_json(self, value: Any, status: int = 200) -> None:
        await self.reply(status, msgspec.json.encode(value))

    async def begin_stream(self) -> None:
        """Commit to a stream of server-sent events."""
        await self._start(200, _STREAM)

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Part of a begun answer. Waits while the client is slow.

        Raises:
            ClientGone: it took nothing for ``STALL_TIMEOUT_S``.
        """
        self._is_complete = not more
        try:
            async with asyncio.timeout(STALL_TIMEOUT_S):
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise ClientGone from None

    async def fail(self, error: RequestError) -> None:
        """An error as the answer, or as the end of a stream that has begun."""
        if self._is_complete:
            return
        if self.status:
            await self.write(error_frame(error), more=False)
        else:
            await self.reply(error.status, body_of(error), (_JSON, *headers_of(error)))

    def mark_gone(self) -> None:
        """Nobody hears the answer: 499 for the books, unless it had begun."""
        self.status = self.status or 499

    async def _start(self, status: int, headers: Sequence[Header]) -> None:
        self.status = status
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [(b"x-request-id", self._request_id), *headers]}
        )


class Departure:
    """Cancels the task inside its block when the client leaves, as ``asyncio.timeout`` does when time is up."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._is_gone = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("departures are noticed inside a task only")
        self._task = task
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if self._is_gone and kind is asyncio.CancelledError and self._task.uncancel() == 0:
            raise ClientGone from None

    async def _watch(self) -> None:
        if await self._exchange.wait_for_departure():
            self._is_gone = True
            self._task.cancel()


def request_id_of(headers: Sequence[Header]) -> bytes:
    """The client's own ``x-request-id`` if it is short and plain, else a fresh one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value
    return secrets.token_hex(16).encode()
