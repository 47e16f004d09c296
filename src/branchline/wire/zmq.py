"""One-way PUSH/PULL sockets over ``ipc://`` in a private directory.

    HTTP process  Push ───▶ to_text ▶ AsyncPull   text side   Push ────▶ to_engine ▶ ZmqInbox   engine
             AsyncPull ◀ to_client ◀─ AsyncPush          AsyncPull ◀ from_engine ◀── ZmqOutbox

The receiver binds, senders connect, in any order. A socket belongs to one thread.

Memory is bounded and nobody waits in a circle:

    Push        never waits: at the high-water mark it raises Overloaded and counts a drop
    AsyncPush   keeps what finds no room and lets its owner wait for :meth:`AsyncPush.room` before it reads more
    ZmqOutbox   waits for room (losing tokens would spoil a text), unless told to wait no longer: back-pressure on the
                loop. The text side never waits for the engine and the HTTP side for neither: no circle.
    receivers   read in bursts; what is not a message is counted and dropped; a sender of monstrous messages is cut off

Refuses to know: what messages mean.
"""

import asyncio
import contextlib
import os
import select
import shutil
import stat
import tempfile
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Generic, Self, TypeAlias, TypeVar, cast

import msgspec
import zmq

from branchline.base.errors import ConfigError, InvalidRequest, Overloaded
from branchline.core.result import Output
from branchline.wire.codec import MAX_MESSAGE_BYTES, Codec
from branchline.wire.messages import Controlled, FromEngine, Outputs, ToEngine, Told

HIGH_WATER_MESSAGES = 2048
"""Messages that may wait on each end of a socket."""
BURST_MESSAGES = 1024
"""Messages read at once before others have their turn."""
LINGER_MS = 500
"""How long a closed socket goes on sending what it holds."""
_MAX_ADDRESS_BYTES = 107  # sockaddr_un.sun_path of Linux, without its final NUL
_ROOM_POLL_MS = 100

Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]
Message = TypeVar("Message")


class Addresses(msgspec.Struct, frozen=True):
    """Where each receiver binds. ``to_text`` and ``to_client`` are used only if the text side has its own process."""

    to_engine: str
    from_engine: str
    to_text: str
    to_client: str


class PrivateDirectory:
    """A fresh directory that only its owner may enter; removed when closed, at exit at the latest, by its creator."""

    def __init__(self, parent: str | None = None) -> None:
        """Raises ConfigError if the directory is not ours alone, or its name leaves no room for socket names."""
        self.path = tempfile.mkdtemp(prefix="branchline-", dir=parent)
        self._remove = weakref.finalize(self, _remove_own, self.path, os.getpid())
        try:
            check_private(self.path)
            for address in msgspec.structs.astuple(self.addresses()):
                _require_short(address)
        except ConfigError:
            self.close()
            raise

    def addresses(self) -> Addresses:
        return Addresses(*(f"ipc://{self.path}/{name}" for name in Addresses.__struct_fields__))

    def close(self) -> None:
        self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_private(path: str) -> None:
    """Raises ConfigError unless ``path`` is a real directory (no link) that is ours, with mode 0700."""
    entry = os.lstat(path)
    if not stat.S_ISDIR(entry.st_mode) or entry.st_uid != os.geteuid() or stat.S_IMODE(entry.st_mode) != 0o700:
        raise ConfigError(f"the directory for sockets {path} is not private: it must be ours, with mode 0700")


def _require_short(address: str) -> None:
    if len(os.fsencode(address.removeprefix("ipc://"))) > _MAX_ADDRESS_BYTES:
        raise ConfigError(f"the directory for temporary files has too long a name for sockets: {address}")


def _remove_own(path: str, creator_pid: int) -> None:
    if os.getpid() == creator_pid:
        shutil.rmtree(path, ignore_errors=True)


def _open(context: Context, kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
    # The codec counts what is too long; libzmq cuts off whoever sends twice as much, before the memory is taken.
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_MESSAGE_BYTES)
    return socket


def _bind(context: Context, address: str) -> zmq.Socket[bytes]:
    """A PULL socket whose file only the owner may open, in a directory that is checked once more."""
    path = address.removeprefix("ipc://")
    check_private(os.path.dirname(path))
    socket = _open(context, zmq.PULL)
    socket.bind(address)
    os.chmod(path, 0o600)
    return socket


def _connect(context: Context, address: str) -> zmq.Socket[bytes]:
    socket = _open(context, zmq.PUSH)
    socket.connect(address)
    return socket


class _Receiver(Generic[Message]):
    """What both kinds of receiver share: a bound socket read without waiting."""

    def __init__(self, context: Context, address: str, codec: Codec[Message]) -> None:
        self._socket = _bind(context, address)
        self._codec = codec

    @property
    def dropped(self) -> int:
        """Messages that were not messages."""
        return self._codec.dropped

    def read(self) -> tuple[list[Message], bool]:
        """What has arrived, in order, and whether there may be more of it (the burst was cut short)."""
        messages: list[Message] = []
        for _ in range(BURST_MESSAGES):
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages, False
            message = self._codec.decode(data)
            if message is not None:
                messages.append(message)
        return messages, True

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For pollers only."""
        return self._socket

    @property
    def fd(self) -> int:
        """Readable when the state of the socket has changed, until somebody looks (:meth:`read`, :meth:`settle`)."""
        return cast("int", self._socket.getsockopt(zmq.FD))

    def settle(self) -> None:
        """Look at the state, so that :attr:`fd` is quiet until it changes again."""
        self._socket.getsockopt(zmq.EVENTS)

    def close(self) -> None:
        self._socket.close()


class ZmqInbox:
    """The engine's ears. Everything but :meth:`wake` belongs to the loop's thread."""

    def __init__(self, context: Context, address: str) -> None:
        self._receiver = _Receiver(context, address, Codec[ToEngine](ToEngine))
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(self._receiver.socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    @property
    def dropped(self) -> int:
        return self._receiver.dropped

    def drain(self) -> list[ToEngine]:
        """What has arrived, in order, ``BURST_MESSAGES`` at most. Never blocks."""
        return self._receiver.read()[0]

    def wait(self, timeout_ns: int | None) -> None:
        """Block until something has arrived, :meth:`wake` was called or the time is over (``None``: for ever).

        The time is rounded up to milliseconds.
        """
        timeout_ms = None if timeout_ns is None else max(0, -(-timeout_ns // 1_000_000))
        for ready, _ in self._poller.poll(timeout_ms):
            if ready == self._wake_read:
                os.read(self._wake_read, select.PIPE_BUF)

    def wake(self) -> None:
        """End the present :meth:`wait`, or the next one. From any thread or signal handler."""
        with contextlib.suppress(BlockingIOError):  # full: it will wake anyway
            os.write(self._wake_write, b"\0")

    def close(self) -> None:
        self._receiver.close()
        os.close(self._wake_read)
        os.close(self._wake_write)


class ZmqOutbox:
    """The engine's voice. Everything but :meth:`stop_waiting` belongs to the loop's thread."""

    def __init__(self, context: Context, address: str) -> None:
        self._socket = _connect(context, address)
        self._codec = Codec[FromEngine](FromEngine)
        self._waits = True
        self.dropped = 0
        """Messages lost: too long, or no room after :meth:`stop_waiting`."""
        self.held_up = 0
        """Messages that had to wait for room."""

    def publish(self, outputs: Sequence[Output]) -> None:
        """The news of one step, in one message (in several if it is too long for one)."""
        if not outputs:
            return
        try:
            data = self._codec.encode(Outputs(tuple(outputs)))
        except InvalidRequest:
            self._publish_halves(outputs)
        else:
            self._push(data)

    def reply(self, answer: Controlled | Told) -> None:
        self.send(answer)

    def send(self, message: FromEngine) -> None:
        try:
            data = self._codec.encode(message)
        except InvalidRequest:
            self.dropped += 1
        else:
            self._push(data)

    def stop_waiting(self) -> None:
        """From now on drop and count what finds no room: the engine is about to end. From any thread."""
        self._waits = False

    def close(self) -> None:
        self._socket.close()

    def _publish_halves(self, outputs: Sequence[Output]) -> None:
        middle = len(outputs) // 2
        if middle == 0:
            self.dropped += 1
            return
        self.publish(outputs[:middle])
        self.publish(outputs[middle:])

    def _push(self, data: bytes) -> None:
        if _try_push(self._socket, data):
            return
        self.held_up += 1
        while self._waits:
            if self._socket.poll(_ROOM_POLL_MS, zmq.POLLOUT) and _try_push(self._socket, data):
                return
        self.dropped += 1


class Push(Generic[Message]):
    """A sender that never waits: requests, cancels, heartbeats. Belongs to one thread."""

    def __init__(self, context: Context, address: str, codec: Codec[Message]) -> None:
        self._socket = _connect(context, address)
        self._codec = codec
        self.dropped = 0

    def send(self, message: Message) -> None:
        """Raises Overloaded if the receiver is so far behind that there is no room, InvalidRequest if the message
        cannot be encoded. Both are counted in ``dropped``."""
        try:
            data = self._codec.encode(message)
        except InvalidRequest:
            self.dropped += 1
            raise
        if not _try_push(self._socket, data):
            self.dropped += 1
            raise Overloaded("The server is too busy to take another request. Please try again later.")

    def close(self) -> None:
        self._socket.close()


def _try_push(socket: zmq.Socket[bytes], data: bytes) -> bool:
    try:
        socket.send(data, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


class AsyncPull(Generic[Message]):
    """A receiver for an event loop (asyncio's or uvloop's): all that has arrived costs one wake-up."""

    def __init__(self, context: Context, address: str, codec: Codec[Message]) -> None:
        """Needs a running event loop."""
        self._receiver = _Receiver(context, address, codec)
        self._loop = asyncio.get_running_loop()
        self._fd = self._receiver.fd
        self._news = asyncio.Event()
        self._more = False
        self._loop.add_reader(self._fd, self._notice)

    @property
    def dropped(self) -> int:
        return self._receiver.dropped

    async def receive(self) -> list[Message]:
        """Wait for messages; returns at least one, ``BURST_MESSAGES`` at most, in order. One caller at a time."""
        if self._more:
            await asyncio.sleep(0)  # a flood must not starve the other tasks
        while True:
            # libzmq signals this descriptor only when its state changes: read until it is empty, then wait.
            self._news.clear()
            messages, self._more = self._receiver.read()
            if messages:
                return messages
            if not self._more:
                await self._news.wait()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._receiver.close()

    def _notice(self) -> None:
        self._receiver.settle()
        self._news.set()


class AsyncPush(Generic[Message]):
    """A sender for an event loop that loses nothing: what finds no room waits here, in order."""

    def __init__(self, context: Context, address: str, codec: Codec[Message]) -> None:
        """Needs a running event loop."""
        self._socket = _connect(context, address)
        self._codec = codec
        self._backlog: deque[bytes] = deque()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._loop = asyncio.get_running_loop()
        self._fd = cast("int", self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._flush)
        self.dropped = 0
        """Messages that could not be encoded."""

    def send(self, message: Message) -> None:
        """Never waits. Who sends without end awaits :meth:`room` in between: that bounds the backlog."""
        try:
            self._backlog.append(self._codec.encode(message))
        except InvalidRequest:
            self.dropped += 1
        else:
            self._flush()

    async def room(self) -> None:
        """Wait until all that was sent has found room."""
        await self._has_room.wait()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.close()

    def _flush(self) -> None:
        self._socket.getsockopt(zmq.EVENTS)  # quiets the descriptor until the state changes again
        while self._backlog and _try_push(self._socket, self._backlog[0]):
            self._backlog.popleft()
        if self._backlog:
            self._has_room.clear()
        else:
            self._has_room.set()
