"""uvicorn's httptools protocol with the bounds it lacks: size of a head, time for a head, number of connections.

Knows: bytes that have not become a request yet. Refuses to know: everything after the head (``api.app``).
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from branchline.api.app import MAX_HEADER_BYTES, MAX_TARGET_BYTES
from branchline.api.errors import ApiError, body_of

MAX_CONNECTIONS = 1024
HEAD_TIMEOUT_S = 10.0


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(503, "Too many connections.")
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        was_in_head = self._head_timer is not None
        super().data_received(data)
        if was_in_head and self._head_timer is not None:  # the whole of ``data`` belongs to an unfinished head
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEADER_BYTES + MAX_TARGET_BYTES:
                self._refuse(431, "The headers are too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_is_here()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What the parser could not read. ``msg`` is uvicorn's own sentence."""
        self._refuse(400, "The request is not valid HTTP.")

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_bytes = 0
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_here(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self._head_bytes:
            self._refuse(408, "The headers did not arrive in time.")
        else:
            self.transport.close()

    def _refuse(self, status: int, sentence: str) -> None:
        self._head_is_here()
        if self.transport.is_closing():
            return
        body = body_of(ApiError(status, sentence))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
