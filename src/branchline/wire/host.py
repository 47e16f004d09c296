"""Runs a text service between an engine's socket and a client, on one event loop: in the HTTP process or its own.

Knows: tasks, order, and how to answer in the engine's stead when its socket has no room. Refuses to know: text (the
service is a port), and where the client is.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from branchline.base.errors import RequestError
from branchline.base.finish import FinishReason
from branchline.core.result import Finish, Output, Usage
from branchline.wire.messages import (
    Ask,
    Cancel,
    Control,
    Controlled,
    FromEngine,
    Outputs,
    PinTokens,
    Submit,
    ToClient,
    ToEngine,
    Told,
    ToText,
)

_log = logging.getLogger(__name__)


class Service(Protocol):
    """What ``text.process.TextService`` is to us."""

    async def handle(self, message: ToText) -> None:
        """Serve a client's message; ordered by the calls."""

    def hear(self, message: FromEngine) -> None:
        """Serve a message of the engine."""

    def close(self) -> None: ...


MakeService = Callable[[Callable[[ToClient], None], Callable[[ToEngine], None]], Service]
"""From the two senders to a service, for example ``partial(TextService, side)``."""


class TextHost:
    """A service at work. Belongs to the running event loop."""

    def __init__(
        self, make: MakeService, *, send_to_client: Callable[[ToClient], None], send_to_engine: Callable[[ToEngine], None]
    ) -> None:
        """``send_to_engine`` may raise RequestError if there is no room: see ``wire.zmq.Push``."""
        self._push_to_engine = send_to_engine
        self._service = make(send_to_client, self._send_to_engine)
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, message: ToText) -> None:
        """Serve a client's message in the background. Never blocks: this is the ``send`` of a ``TextClient``."""
        task = asyncio.get_running_loop().create_task(self._service.handle(message))
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def hear(self, messages: Iterable[FromEngine]) -> None:
        """Serve what the engine sent, in order."""
        for message in messages:
            self._service.hear(message)

    async def close(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._service.close()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("serving a message failed", exc_info=error)

    def _send_to_engine(self, message: ToEngine) -> None:
        try:
            self._push_to_engine(message)
        except RequestError as error:
            # Later, because the service is in the middle of sending: its client must hear of the start before the end.
            asyncio.get_running_loop().call_soon(self._answer_for_engine, message, error)

    def _answer_for_engine(self, message: ToEngine, error: RequestError) -> None:
        """What the engine would say if it had heard the message and had no room for it."""
        match message:
            case Submit():
                finish = Finish(FinishReason.REJECTED, Usage(), error.message, error.status)
                self._service.hear(Outputs((Output(message.spec.request_id, finish=finish),)))
            case Control() | PinTokens():
                self._service.hear(Controlled(message.call_id, done=False, message=error.message))
            case Ask():
                self._service.hear(Told(message.call_id, None, error.message))
            case Cancel():
                pass  # the request runs to its own end, and the service swallows what still comes
