"""The text side at work: preparation in a few threads, everything else on one event loop.

Usable inside the HTTP process and in a process of its own: where messages come from and go to is passed in.
Messages about one request are served in the order they came, however long its preparation takes; different requests
overtake each other. Refuses to know: sockets and how the process was started (``wire``).
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from branchline.text.side import Answer, Effects, Slow, TextSide, key_of
from branchline.wire.messages import FromEngine, Refused, ToClient, ToEngine, ToText

_log = logging.getLogger(__name__)


class _Line:
    """Messages about one id: the lock is granted in the order it was asked for."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.length = 0


class TextService:
    """One :class:`TextSide` on the running loop. The senders are called on that loop and must not block."""

    def __init__(
        self,
        side: TextSide,
        send_to_client: Callable[[ToClient], None],
        send_to_engine: Callable[[ToEngine], None],
        *,
        threads: int = 2,
    ) -> None:
        self._side = side
        self._send_to_client = send_to_client
        self._send_to_engine = send_to_engine
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._lines: dict[str, _Line] = {}
        """Per id, the messages that are being served or wait for it."""

    async def handle(self, message: ToText) -> None:
        """Serve a client's message; returns when its effects have been sent.

        Messages are ordered by the calls. To keep receiving meanwhile, run each call as a task.
        """
        async with self._turn_of(key_of(message)):
            if isinstance(message, Slow):
                self._send(self._side.admit(await self._prepare(message)))
            else:
                self._send(self._side.act(message))

    def hear(self, message: FromEngine) -> None:
        """Serve a message of the engine."""
        self._send(self._side.hear(message))

    def abandon(self, message: str) -> None:
        """The engine is gone: end every live request with an error that says so."""
        self._send(self._side.abandon(message))

    def close(self) -> None:
        """Drop preparations that have not begun, wait for the others and let the threads go."""
        self._pool.shutdown(cancel_futures=True)

    @property
    def live_count(self) -> int:
        """Requests in the text side's map, and ids with a message under way."""
        return self._side.live_count + len(self._lines)

    @contextlib.asynccontextmanager
    async def _turn_of(self, key: str) -> AsyncIterator[None]:
        line = self._lines.setdefault(key, _Line())
        line.length += 1
        try:
            async with line.lock:
                yield
        finally:
            line.length -= 1
            if not line.length:
                del self._lines[key]

    async def _prepare(self, message: Slow) -> Answer:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._side.prepare, message)
        except Exception:  # our own bug: it ends this request and no other
            _log.exception("preparing %s failed", key_of(message))
            return Refused(key_of(message), "The request could not be prepared.", 500, "server_error")

    def _send(self, effects: Effects) -> None:
        for to_engine in effects.to_engine:
            self._send_to_engine(to_engine)
        for to_client in effects.to_client:
            self._send_to_client(to_client)
