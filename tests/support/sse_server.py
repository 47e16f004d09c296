"""A completions server out of nothing: streams scripted bytes, remembers what it was asked."""

import asyncio
import contextlib
import json

EVENT = b'data: {"choices": [{"index": 0, "text": "%s"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": %d, "completion_tokens": %d}}\n\n'
DONE = b"data: [DONE]\n\n"


def stream_of(words, prompt_tokens=7):
    """The body of a complete answer with one event a word."""
    return [*(EVENT % word.encode() for word in words), USAGE % (prompt_tokens, len(words)), DONE]


def refusal(status, words):
    body = json.dumps({"error": {"message": words, "type": "x"}}).encode()
    return b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


class SseServer:
    """``script(body)`` gives what to send for a request: raw bytes, or a list of pieces to be sent as a chunked stream.
    A negative number among the pieces breaks the connection, another one is a pause in seconds."""

    def __init__(self, script, models=("tiny",)):
        self.script = script
        self.models = models
        self.heads = []
        self.bodies = []
        self.open_now = self.most_open = 0
        self._tasks = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await self._answer(reader, writer)
                await writer.drain()
        finally:
            self.open_now -= 1
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        if head.startswith("GET"):
            body = json.dumps({"object": "list", "data": [{"id": name} for name in self.models]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            return
        self.bodies.append(json.loads(await reader.readexactly(length)))
        answer = self.script(self.bodies[-1])
        if isinstance(answer, bytes):
            writer.write(answer)
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in answer:
            if isinstance(piece, bytes):
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
            elif piece < 0:
                return
            else:
                await asyncio.sleep(piece)
        writer.write(b"0\r\n\r\n")
