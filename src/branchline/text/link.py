"""The ways from the HTTP process to a text side: in the same process, or across sockets. One port, two rivals.

Knows: which socket leads where. Refuses to know: what is said.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import zmq

from branchline.base.clock import MonotonicClock
from branchline.base.errors import Overloaded
from branchline.wire.client import TextClient
from branchline.wire.codec import Codec
from branchline.wire.host import MakeService, TextHost
from branchline.wire.messages import FromEngine, ModelFacts, ToClient, ToEngine, ToText
from branchline.wire.zmq import Addresses, AsyncPull, Context, Push

Message = TypeVar("Message")


class TextLink(Protocol):
    """The way to the text side, wherever it runs."""

    client: TextClient

    async def open(self, facts: ModelFacts) -> None: ...

    async def close(self) -> None: ...


class RemoteText:
    """The text side has a process of its own."""

    def __init__(self, addresses: Addresses) -> None:
        self._context: Context = zmq.Context()
        self._push = Push(self._context, addresses.to_text, Codec[ToText](ToText))
        self._pull = AsyncPull(self._context, addresses.to_client, Codec[ToClient](ToClient))
        self.client = TextClient(self._push.send, MonotonicClock())
        self._pumping = asyncio.create_task(pump(self._pull, self.client.deliver))

    async def open(self, facts: ModelFacts) -> None:
        """The process is ready, and so are we."""

    async def close(self) -> None:
        self._pumping.cancel()
        self._push.close()
        self._pull.close()
        self._context.term()


class LocalText:
    """The text side runs in this process; only the engine is elsewhere."""

    def __init__(self, addresses: Addresses, make: Callable[[ModelFacts], MakeService]) -> None:
        """``make`` may take its time: it runs in a thread."""
        self._context: Context = zmq.Context()
        self._push = Push(self._context, addresses.to_engine, Codec[ToEngine](ToEngine))
        self._pull = AsyncPull(self._context, addresses.from_engine, Codec[FromEngine](FromEngine))
        self._make = make
        self.client = TextClient(self._submit, MonotonicClock())
        self._host: TextHost | None = None
        self._pumping: asyncio.Task[None] | None = None

    async def open(self, facts: ModelFacts) -> None:
        self._host = TextHost(
            await asyncio.to_thread(self._make, facts),
            send_to_client=lambda message: self.client.deliver((message,)),
            send_to_engine=self._push.send,
        )
        self._pumping = asyncio.create_task(pump(self._pull, self._host.hear))

    async def close(self) -> None:
        if self._pumping is not None:
            self._pumping.cancel()
        if self._host is not None:
            await self._host.close()
        self._push.close()
        self._pull.close()
        self._context.term()

    def _submit(self, message: ToText) -> None:
        if self._host is None:
            raise Overloaded("The server is starting.")
        self._host.submit(message)


async def pump(source: AsyncPull[Message], deliver: Callable[[Sequence[Message]], None]) -> None:
    """Hand on what arrives, burst by burst."""
    while True:
        deliver(await source.receive())
