"""Runs the application on exactly one TCP socket until somebody says stop.

    stop once:   refuse new work, let running requests finish for ``drain_timeout_s``, end the rest with an error, close
    stop twice:  close now

Knows: sockets and the order of an orderly end. Refuses to know: processes and exit codes (``cli``).
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from branchline.api.protocol import BoundedProtocol
from branchline.api.service import Service
from branchline.base.config import ServerConfig
from branchline.base.errors import ConfigError

KEEP_ALIVE_S = 75
FAREWELL_S = 2.0
"""Time for the error events of requests that outlived the drain."""
_BACKLOG = 1024
_POLL_S = 0.05

_log = logging.getLogger("branchline.api")


class Stop:
    """A request to stop, and how urgent it is. Calls are counted: the second means now."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self.is_urgent = False

    def __call__(self) -> None:
        self.is_urgent = self._asked.is_set()
        self._asked.set()

    async def asked(self) -> None:
        await self._asked.wait()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM call this object inside the block. Only for the main thread."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    """Signals belong to whoever runs us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(config: ServerConfig) -> socket.socket:
    """The one listening socket; port 0 lets the system choose.

    Raises:
        ConfigError: the address is taken or is not of this machine.
    """
    try:
        found = socket.getaddrinfo(config.host.strip("[]"), config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot resolve {config.host}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {config.host} port {config.port}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


async def serve_app(
    app: Starlette,
    config: ServerConfig,
    *,
    on_ready: Callable[[int], None],
    stop: Stop,
    listener: socket.socket | None = None,
) -> None:
    """Serve until ``stop`` is called; returns when all connections are closed.

    ``on_ready`` hears the real port once connections are accepted.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    service: Service = app.state.service
    listener = listener or listen(config)
    port = listener.getsockname()[1]
    server = _Server(_uvicorn_config(app, config))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not (server.started or serving.done()):
            await asyncio.sleep(0.002)
        if not serving.done():
            on_ready(port)
            await _asked_or_over(stop, serving)
            await _finish_requests(service, config.drain_timeout_s, stop)
    finally:
        server.should_exit = True
        server.force_exit = stop.is_urgent
        await serving
        listener.close()


def _uvicorn_config(app: Starlette, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=config.log_level,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=None,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(FAREWELL_S),
        backlog=_BACKLOG,
    )


async def _asked_or_over(stop: Stop, serving: "asyncio.Task[None]") -> None:
    asked = asyncio.create_task(stop.asked())
    try:
        await asyncio.wait([serving, asked], return_when=asyncio.FIRST_COMPLETED)
    finally:
        asked.cancel()


async def _finish_requests(service: Service, timeout_s: float, stop: Stop) -> None:
    """Refuse new requests and wait for the running ones; what is left after the time is ended with an error."""
    await service.begin_drain()
    await _until_idle(service, timeout_s, stop)
    if service.client.live_count and not stop.is_urgent:
        _log.warning("%d requests did not finish in time and are ended", service.client.live_count)
        await service.abort_running()
        await _until_idle(service, FAREWELL_S, stop)


async def _until_idle(service: Service, timeout_s: float, stop: Stop) -> None:
    """Polls: nothing is waited for that a hung engine could withhold, or that a second stop could not end."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while service.client.live_count and loop.time() < deadline and not stop.is_urgent:
        await asyncio.sleep(_POLL_S)
