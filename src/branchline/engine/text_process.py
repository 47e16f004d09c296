"""The text side's own process (``--text-workers 1``): ``python -m branchline.engine.text_process``, started by
``engine.launch``.

Knows: sockets and the order of starting (the engine says what model it has, then the tokenizer is built), and the concrete
parts of a text side: a second composition root. Refuses to know: tokens and text (``text.side``).
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import uvloop
import zmq

from branchline.base.errors import ConfigError
from branchline.wire.child import Lifeline, TextSettings, run
from branchline.wire.codec import Codec
from branchline.wire.host import MakeService, TextHost
from branchline.wire.messages import FromEngine, ModelFacts, ToClient, ToEngine, ToText
from branchline.wire.zmq import AsyncPull, AsyncPush, Context, Message, Push

Build = Callable[[TextSettings, ModelFacts], MakeService]


def serve(build: Build, settings: TextSettings, lifeline: Lifeline) -> None:
    """Serve until SIGTERM."""
    uvloop.run(_serve(build, settings, lifeline))


async def _serve(build: Build, settings: TextSettings, lifeline: Lifeline) -> None:
    context: Context = zmq.Context()
    addresses = settings.addresses
    from_engine = AsyncPull(context, addresses.from_engine, Codec[FromEngine](FromEngine))
    to_engine = Push(context, addresses.to_engine, Codec[ToEngine](ToEngine))
    from_client = AsyncPull(context, addresses.to_text, Codec[ToText](ToText))
    to_client = AsyncPush(context, addresses.to_client, Codec[ToClient](ToClient))
    try:
        facts, early = await _hear_facts(from_engine)
        make = build(settings, facts)
        host = TextHost(make, send_to_client=to_client.send, send_to_engine=to_engine.send)
        host.hear(early)
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        lifeline.on_stop(partial(_set_from_thread, loop, stopped))
        lifeline.ready(facts)
        await _first_of(
            stopped.wait(),
            _pump(from_engine, host.hear, to_client.room),
            _pump(from_client, partial(_submit_all, host), to_client.room),
        )
        await host.close()
    finally:
        for socket in (from_engine, to_engine, from_client, to_client):
            socket.close()
        context.term()


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)


async def _hear_facts(from_engine: AsyncPull[FromEngine]) -> tuple[ModelFacts, Sequence[FromEngine]]:
    """The engine's first message, and what came with it."""
    while True:
        messages = await from_engine.receive()
        for position, message in enumerate(messages):
            if isinstance(message, ModelFacts):
                return message, messages[position + 1 :]


def _submit_all(host: TextHost, messages: Sequence[ToText]) -> None:
    for message in messages:
        host.submit(message)


async def _pump(
    pull: AsyncPull[Message], take: Callable[[Sequence[Message]], None], room: Callable[[], Awaitable[None]]
) -> None:
    """Reads no more while the HTTP process does not: what is not read fills the engine's socket and holds it up."""
    while True:
        take(await pull.receive())
        await room()


async def _first_of(*waits: Awaitable[object]) -> None:
    """Until one of them is over; raises what it raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def build_service(settings: TextSettings, facts: ModelFacts) -> MakeService:
    """The text side of a model, wherever it is to run. Takes a second or so.

    Raises:
        ModelError: the tokenizer or the template cannot be used.
        ConfigError: the template file cannot be read.
    """
    # Imported only now: tokenizers take a while to load, and the ties to the parent must hold by then.
    from branchline.models.source import open_checkpoint
    from branchline.text.build import build_text_side
    from branchline.text.process import TextService

    checkpoint = open_checkpoint(settings.model, settings.cache_dir, _say_nothing)
    template = None if settings.chat_template is None else read_template(settings.chat_template)
    return partial(TextService, build_text_side(checkpoint, facts, template=template))


def read_template(path: str) -> str:
    """Raises ConfigError if the file cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {path} cannot be read: {error}") from None


def _say_nothing(_: str) -> None:
    """Progress of opening the model: the engine has told it already."""


def main() -> int:
    return run("text", TextSettings, partial(serve, build_service))


if __name__ == "__main__":
    sys.exit(main())
