"""An application on an ASGI transport, and an ASGI client that can leave."""

import asyncio
import contextlib
import json

import httpx

from branchline.api.app import create_app
from branchline.base.config import ServerConfig
from tests.support.scripted_text import FACTS, ScriptedText

BASE = "http://127.0.0.1:8000"


def run(coroutine):
    """Run a test's coroutine under a time limit."""

    async def limited():
        async with asyncio.timeout(30):
            return await coroutine

    return asyncio.run(limited())


@contextlib.asynccontextmanager
async def serving(*, config=None, fake=None, idle=True, **options):
    """``(http client, fake)``. At the end nothing may be left in any map."""
    fake = fake or ScriptedText()
    app = create_app(fake.client, FACTS, config or ServerConfig(), clock=fake.clock, **options)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url=BASE) as http:
        http.app = app
        yield http, fake
    if idle:
        await fake.until(lambda: fake.is_idle)


def events(text):
    """Data of a server-sent stream; ``[DONE]`` as it is."""
    frames = [frame for frame in text.split("\n\n") if frame]
    assert all(frame.startswith("data: ") for frame in frames)
    return [frame[6:] if frame[6:] == "[DONE]" else json.loads(frame[6:]) for frame in frames]


class Caller:
    """Speaks ASGI by hand: sees every message, and may leave or read slowly."""

    def __init__(self, app, path, body, headers=()):
        self.sent = []
        self.gone = asyncio.Event()
        self.send_gate = asyncio.Event()
        self.send_gate.set()
        self._body = json.dumps(body).encode()
        self._has_read = False
        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 1),
            "headers": [(b"host", b"127.0.0.1:8000"), *headers], "asgi": {"version": "3.0"},
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self):
        if not self._has_read:
            self._has_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        await self.send_gate.wait()
        self.sent.append(message)

    @property
    def status(self):
        return next((m["status"] for m in self.sent if m["type"] == "http.response.start"), None)

    @property
    def body(self):
        return b"".join(m.get("body", b"") for m in self.sent if m["type"] == "http.response.body")
