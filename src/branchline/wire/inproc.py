"""The engine's inbox and outbox without sockets: tests, the offline engine, the simulator.

Knows: a queue between threads of one process. Refuses to know: bytes.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from branchline.base.clock import NS_PER_S
from branchline.core.result import Output
from branchline.wire.messages import Controlled, FromEngine, Outputs, ToEngine, Told


class InprocInbox:
    """Any thread puts; the loop drains and waits."""

    def __init__(self) -> None:
        self._messages: deque[ToEngine] = deque()
        self._changed = threading.Condition()
        self._woken = False
        self.dropped = 0
        """Always 0 here: nothing has to be decoded."""

    def put(self, *messages: ToEngine) -> None:
        with self._changed:
            self._messages.extend(messages)
            self._changed.notify_all()

    def drain(self) -> list[ToEngine]:
        """Everything that has arrived, in order. Never blocks."""
        with self._changed:
            messages = list(self._messages)
            self._messages.clear()
            return messages

    def wait(self, timeout_ns: int | None) -> None:
        """Block until a message is there, :meth:`wake` was called or the time is over (``None``: for ever)."""
        timeout_s = None if timeout_ns is None else timeout_ns / NS_PER_S
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._woken, timeout_s)
            self._woken = False

    def wake(self) -> None:
        """End the present :meth:`wait`, or the next one. From any thread."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()


class InprocOutbox:
    """Hands every message to a callback, on the loop's thread."""

    def __init__(self, deliver: Callable[[FromEngine], None]) -> None:
        self._deliver = deliver
        self.dropped = 0

    def publish(self, outputs: Sequence[Output]) -> None:
        if outputs:
            self._deliver(Outputs(tuple(outputs)))

    def reply(self, answer: Controlled | Told) -> None:
        self._deliver(answer)

    def send(self, message: FromEngine) -> None:
        self._deliver(message)
