"""The real server on a real socket, in a thread with its own loop, with a scripted text side behind it."""

import asyncio
import contextlib
import threading

import uvloop

from branchline.api.app import create_app
from branchline.api.serve import Stop, serve_app
from branchline.base.config import ServerConfig
from tests.support.scripted_text import FACTS, ScriptedText


class LiveServer:
    def __init__(self, **config):
        self.config = ServerConfig(port=0, **config)
        self.port = None
        self.text = None
        self.error = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def call(self, function, *arguments):
        """Run ``function`` in the server's loop and wait for its value."""

        async def inside():
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(inside(), self._loop).result(10)

    def wait_until(self, truth, timeout_s=5.0):
        asyncio.run_coroutine_threadsafe(self.text.until(truth, timeout_s), self._loop).result(timeout_s + 5)

    def start(self):
        self._thread.start()
        assert self._ready.wait(10)
        if self.error is not None:
            raise self.error

    def stop(self):
        """Ask for an end; twice means at once."""
        self._loop.call_soon_threadsafe(self._stop)

    def join(self, timeout_s=10):
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()

    def _run(self):
        try:
            uvloop.run(self._serve())
        except BaseException as error:
            self.error = error
            self._ready.set()

    async def _serve(self):
        self._loop = asyncio.get_running_loop()
        self._stop = Stop()
        self.text = ScriptedText()
        app = create_app(self.text.client, FACTS, self.config)
        await serve_app(app, self.config, on_ready=self._on_ready, stop=self._stop)

    def _on_ready(self, port):
        self.port = port
        self._ready.set()


@contextlib.contextmanager
def live_server(**config):
    server = LiveServer(**config)
    server.start()
    try:
        yield server
    finally:
        with contextlib.suppress(RuntimeError):  # its loop may be closed already
            server.stop()
            server.stop()
        server.join()
