"""The parent's side of child processes: start, hear that they are ready, notice their end, end them.

Knows: processes, pipes, exit codes. Refuses to know: what is said over the sockets.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec

from branchline.base.config import EngineConfig
from branchline.base.errors import ConfigError, EngineDead
from branchline.wire.child import EngineSettings, Failed, Report, Start, TextSettings
from branchline.wire.messages import ModelFacts
from branchline.wire.zmq import Addresses

_REAP_POLL_S = 0.01
_KILL_WAIT_S = 0.8


def start_engine(config: EngineConfig, addresses: Addresses, cache_dir: str) -> "Child":
    settings = EngineSettings(config=config, addresses=addresses, cache_dir=cache_dir)
    return Child("engine", ["-m", "branchline.engine.process"], settings)


def start_text(settings: TextSettings) -> "Child":
    return Child("text", ["-m", "branchline.engine.text_process"], settings)


class Child:
    """One child process. Make it on the main thread (the kernel kills it when the thread that made it ends), while an
    event loop runs; all methods belong to that loop."""

    def __init__(self, name: str, arguments: Sequence[str], settings: EngineSettings | TextSettings) -> None:
        """``arguments`` follow the name of the Python interpreter."""
        self.name = name
        death_read, self._death_write = os.pipe()
        self._report_read, report_write = os.pipe()
        start = Start(
            parent_pid=os.getpid(), death_fd=death_read, report_fd=report_write, settings=_encode_settings(settings)
        )
        with _interrupts_held_back():
            self._process = subprocess.Popen(
                [*_interpreter(), *arguments], stdin=subprocess.PIPE, pass_fds=(death_read, report_write)
            )
        os.close(death_read)
        os.close(report_write)
        self._hand_over(start)
        self._received = b""
        self._has_reported = asyncio.Event()
        self._has_hung_up = asyncio.Event()
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._report_read, self._hear)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """As a shell would say it: 128 + number of the signal that killed it. ``None`` while it lives."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def obituary(self) -> str:
        """One sentence on its end."""
        code = self._process.poll()
        if code is None:
            return f"The {self.name} process is running."
        if code < 0:
            return f"The {self.name} process was killed by {signal.Signals(-code).name}."
        return f"The {self.name} process ended with exit code {code}."

    async def wait_ready(self, timeout_s: float) -> ModelFacts:
        """Raises:
        ConfigError, ModelError: the child's own sentence; it has ended with exit code 78.
        EngineDead: it ended without a word or took too long.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_reported.wait()
        except TimeoutError:
            raise EngineDead(f"The {self.name} process was not ready within {timeout_s:g} seconds.") from None
        report = self._report()
        if isinstance(report, ModelFacts):
            return report
        await self.ended()
        if isinstance(report, Failed):
            raise report.to_error()
        raise EngineDead(self.obituary)

    async def ended(self) -> int:
        """Wait for its end; the exit code as in :attr:`exit_code`."""
        await self._has_hung_up.wait()
        while (code := self.exit_code) is None:
            await asyncio.sleep(_REAP_POLL_S)
        return code

    def terminate(self) -> None:
        """Ask it to stop."""
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Let go of the pipes; a child that still lives ends by that. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._report_read)
        os.close(self._report_read)
        os.close(self._death_write)
        self._has_hung_up.set()

    def _hand_over(self, start: Start) -> None:
        stdin = self._process.stdin
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it is dead already: its report pipe will tell
                stdin.write(msgspec.json.encode(start))
                stdin.close()

    def _hear(self) -> None:
        data = os.read(self._report_read, 1 << 16)
        self._received += data
        if not data:
            self._loop.remove_reader(self._report_read)
            self._has_hung_up.set()
        if not data or b"\n" in self._received:
            self._has_reported.set()

    def _report(self) -> Report | None:
        """What it said, if it was a whole line."""
        line, end, _ = self._received.partition(b"\n")
        return msgspec.json.decode(line, type=Report) if end else None


async def watch(children: Sequence[Child]) -> Child:
    """Wait until any of them ends, however it ends; returns that one."""
    waits = {asyncio.ensure_future(child.ended()): child for child in children}
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return waits[done.pop()]


async def stop(children: Sequence[Child], grace_s: float = 2.0) -> None:
    """End them all: SIGTERM, after ``grace_s`` SIGKILL. Takes at most ``grace_s`` and a second. Idempotent."""
    for child in children:
        child.terminate()
    living = await _still_alive(children, grace_s)
    for child in living:
        child.kill()
    await _still_alive(living, _KILL_WAIT_S)
    for child in children:
        child.close()


async def _still_alive(children: Sequence[Child], timeout_s: float) -> list[Child]:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for child in children:
                await child.ended()
    return [child for child in children if child.exit_code is None]


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """A child is born with Ctrl-C blocked and so has time to decide that it ignores it; ours arrives a little later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _interpreter() -> list[str]:
    """Python, looking for modules in the current directory only if we do so too."""
    places = {os.path.abspath(place) for place in sys.path}
    return [sys.executable] if os.getcwd() in places else [sys.executable, "-P"]


def _encode_settings(settings: EngineSettings | TextSettings) -> msgspec.Raw:
    try:
        return msgspec.Raw(msgspec.json.encode(settings))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"a setting cannot be passed on: {error}") from None
