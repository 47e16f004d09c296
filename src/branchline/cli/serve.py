"""`branchline serve [MODEL]`: the HTTP process, parent of the engine process and, with `--text-workers 1`, of a text
process. It lives and dies with its children.

Knows: who starts and stops whom, in which order. Refuses to know: HTTP (`api`), tokens (`text`), plans (`engine`).
"""

import argparse
import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

import uvloop

from branchline.api.app import create_app
from branchline.api.auth import check_exposure
from branchline.api.readiness import HEARTBEAT_LIMIT_S
from branchline.api.serve import FAREWELL_S, Stop, listen, serve_app
from branchline.base.config import EngineConfig, Environment, ServerConfig
from branchline.cli.options import add_engine_options, add_server_options, engine_settings, server_settings
from branchline.engine.build import announce
from branchline.engine.launch import Child, start_engine, start_text, stop, watch
from branchline.engine.text_process import build_service
from branchline.text.link import LocalText, RemoteText, TextLink
from branchline.wire.child import EXIT_SOFTWARE, TextSettings
from branchline.wire.client import TextClient
from branchline.wire.messages import ModelFacts
from branchline.wire.zmq import PrivateDirectory

START_TIMEOUT_S = 3600.0
"""A large model on a slow disk takes its time; a child that fails says so at once."""

log = logging.getLogger("branchline")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="GGUF file, Hugging Face folder or hf:org/name (default: the embedded SmolLM2-135M-Instruct)",
    )  # fmt: skip
    add_server_options(parser)
    add_engine_options(parser)


def run(options: argparse.Namespace) -> int:
    environment = Environment.read()
    engine = EngineConfig(**engine_settings(options))
    server = ServerConfig(**server_settings(options), api_keys=environment.api_keys, admin_keys=environment.admin_keys)
    check_exposure(server)
    logging.basicConfig(level=server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return uvloop.run(_serve(engine, server, environment.cache_dir))


async def _serve(engine: EngineConfig, server: ServerConfig, cache_dir: str) -> int:
    listener = listen(server)  # first of all: if the port is taken, nothing needs to be loaded
    halt = Stop()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(listener.close)
        stack.enter_context(halt.on_signals())
        addresses = stack.enter_context(PrivateDirectory()).addresses()
        text = TextSettings(model=engine.model, chat_template=server.chat_template, addresses=addresses, cache_dir=cache_dir)
        children = [start_engine(engine, addresses, cache_dir)]
        stack.push_async_callback(stop, children)
        link: TextLink
        if server.text_workers:
            children.append(start_text(text))
            link = RemoteText(addresses)
        else:
            link = LocalText(addresses, partial(build_service, text))
        stack.push_async_callback(link.close)
        starting = asyncio.create_task(_start(children, link))
        if not await _first_of(starting, halt.asked()):
            starting.cancel()
            return 0
        facts = await starting
        app = create_app(link.client, facts, server, step_timeout_s=engine.step_timeout_s)
        serving = asyncio.create_task(
            serve_app(app, server, on_ready=partial(_say_ready, server, facts), stop=halt, listener=listener)
        )
        if await _first_of(serving, watch(children)):
            await serving
            return 0
        return await _give_up(children, link.client, serving, halt)


async def _start(children: Sequence[Child], link: TextLink) -> ModelFacts:
    """Returns when every process is ready to serve and the engine has been heard: ``/ready`` is true from the start."""
    facts, *_ = [await child.wait_ready(START_TIMEOUT_S) for child in children]
    await link.open(facts)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_heard(link.client), HEARTBEAT_LIMIT_S)
    return facts


async def _heard(client: TextClient) -> None:
    while client.latest is None:
        await asyncio.sleep(0.002)


async def _give_up(children: Sequence[Child], client: TextClient, serving: "asyncio.Task[None]", halt: Stop) -> int:
    """A child has gone: tell every client, close, and end with a code that says so."""
    dead = next(child for child in children if child.exit_code is not None)
    log.error("%s The server ends.", dead.obituary)
    client.fail_all("The engine has gone.")
    halt()
    halt()
    await asyncio.wait([serving], timeout=FAREWELL_S)
    return EXIT_SOFTWARE


async def _first_of(task: "asyncio.Task[Any]", rival: Coroutine[Any, Any, Any]) -> bool:
    """Wait for either; True if ``task`` is done. What lost is cancelled, but for a task that has to end in order."""
    other = asyncio.create_task(rival)
    await asyncio.wait([task, other], return_when=asyncio.FIRST_COMPLETED)
    other.cancel()
    return task.done()


def _say_ready(server: ServerConfig, facts: ModelFacts, port: int) -> None:
    host = f"[{server.host}]" if ":" in server.host else server.host
    name = server.served_model_name or facts.name
    announce(f"{name} is served on http://{host}:{port}/v1 with the {facts.executor} executor")
