"""How a child process begins, reports and ends. Both sides of the agreement stand here.

    parent ── settings, one JSON record on stdin, then end of file ──▶ child      (nothing secret in argv)
    parent ── death pipe, never written: its end is the parent's ────▶ child      (exit at once)
    child  ── report pipe: one JSON line, then open until it ends ───▶ parent     (its end is the child's)

Knows: pipes, signals, exit codes. Refuses to know: what the child does, and who starts it (``engine.launch``).
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Literal, NoReturn, TypeAlias, TypeVar

import msgspec

from branchline.base.config import EngineConfig
from branchline.base.errors import ConfigError, ModelError
from branchline.wire.messages import ModelFacts
from branchline.wire.zmq import Addresses

EXIT_SOFTWARE = os.EX_SOFTWARE
"""70: an error nobody expected; its traceback is on stderr."""
EXIT_CONFIG = os.EX_CONFIG
"""78: settings or a model that cannot be served; one sentence on stderr."""
EXIT_ORPHANED = os.EX_UNAVAILABLE
"""69: the parent has gone."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_STOP_SIGNALS = {signal.SIGTERM}

Settings = TypeVar("Settings")


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    config: EngineConfig
    addresses: Addresses
    cache_dir: str


class TextSettings(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None
    chat_template: str | None
    """File of a chat template that replaces the model's."""
    addresses: Addresses
    cache_dir: str


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What a child reads from stdin."""

    parent_pid: int
    death_fd: int
    report_fd: int
    settings: msgspec.Raw


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The child cannot start, in words for the operator."""

    kind: Literal["config", "model"]
    message: str

    def to_error(self) -> ConfigError | ModelError:
        return ConfigError(self.message) if self.kind == "config" else ModelError(self.message)


Report: TypeAlias = ModelFacts | Failed


class Lifeline:
    """The child's ties to its parent."""

    def __init__(self, start: Start) -> None:
        """Arms everything that ends this process: call it early, on the main thread."""
        self._report_fd = start.report_fd
        self._stop: Callable[[], None] = _leave_quietly
        self.is_ready = False
        os.set_inheritable(start.report_fd, False)
        os.set_inheritable(start.death_fd, False)
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)  # for all threads to come; one thread takes it
        watch(self._obey, "signals")
        watch(lambda: _die_with_parent(start.death_fd), "death pipe")
        _die_by_kernel(start.parent_pid)

    def ready(self, facts: ModelFacts) -> None:
        self.is_ready = True
        self._report(facts)

    def failed(self, failure: Failed) -> None:
        self._report(failure)

    def on_stop(self, stop: Callable[[], None]) -> None:
        """``stop`` is called once, on a thread of its own, at the first SIGTERM; the rest of a storm is swallowed. Before
        this call SIGTERM ends the process at once."""
        self._stop = stop

    def _obey(self) -> None:
        signal.sigwait(_STOP_SIGNALS)
        self._stop()

    def _report(self, report: Report) -> None:
        try:
            os.write(self._report_fd, msgspec.json.encode(report) + b"\n")
        except BrokenPipeError:
            os._exit(EXIT_ORPHANED)


def run(name: str, settings_type: type[Settings], body: Callable[[Settings, Lifeline], None]) -> int:
    """Main function of a child: ``body`` runs until it is told to stop. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    lifeline: Lifeline | None = None
    try:
        start = _read_start()
        lifeline = Lifeline(start)
        _set_name(f"branchline-{name}"[:15])
        body(_decode(start.settings, settings_type), lifeline)
    except (ConfigError, ModelError) as error:
        if lifeline is None or not lifeline.is_ready:
            return _refuse(name, error, lifeline)
        return _crash(name)
    except Exception:
        return _crash(name)
    return os.EX_OK


def watch(body: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread whose failure is the failure of the process: no half-dead children."""

    def guarded() -> None:
        try:
            body()
        except BaseException:
            os._exit(_crash(name))

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


def _read_start() -> Start:
    return _decode(sys.stdin.buffer.read(), Start)


def _decode(data: bytes | msgspec.Raw, kind: type[Settings]) -> Settings:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"this program is started by `branchline serve`: its settings are not valid ({error})") from None


def _refuse(name: str, error: ConfigError | ModelError, lifeline: Lifeline | None) -> int:
    _say(f"branchline {name}: {error}\n")
    if lifeline is not None:
        lifeline.failed(Failed("config" if isinstance(error, ConfigError) else "model", str(error)))
    return EXIT_CONFIG


def _crash(name: str) -> int:
    _say(f"branchline {name}: unexpected error, the process ends\n{traceback.format_exc()}")
    return EXIT_SOFTWARE


def _say(text: str) -> None:
    """One write, so that the lines of several processes do not mix."""
    with contextlib.suppress(OSError):  # nobody listens: the exit code speaks
        os.write(sys.stderr.fileno(), text.encode(errors="replace"))


def _leave_quietly() -> NoReturn:
    os._exit(os.EX_OK)


def _die_with_parent(death_fd: int) -> NoReturn:
    while os.read(death_fd, 1):
        pass
    os._exit(EXIT_ORPHANED)


def _die_by_kernel(parent_pid: int) -> None:
    """On Linux the kernel kills us when the thread that started us ends, even if no Python code can run any more."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        os._exit(EXIT_ORPHANED)


def _set_name(name: str) -> None:
    """The name that ``ps`` and ``top`` show."""
    if sys.platform == "linux":
        _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def _prctl(option: int, argument: int | ctypes.c_char_p) -> None:
    """Failure is no harm: the death pipe does the same more slowly, and the name is for people."""
    ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)
