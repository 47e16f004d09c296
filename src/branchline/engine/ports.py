"""The two ends of the loop: where messages come from and where news go. `wire.zmq` and `wire.inproc` stand behind them."""

from collections.abc import Sequence
from typing import Protocol

from branchline.core.result import Output
from branchline.wire.messages import Controlled, ToEngine, Told


class Inbox(Protocol):
    def drain(self) -> list[ToEngine]:
        """Everything that has arrived, in order. Never blocks."""

    def wait(self, timeout_ns: int | None) -> None:
        """Sleep until there is something to drain or the time is over."""


class Outbox(Protocol):
    def publish(self, outputs: Sequence[Output]) -> None:
        """News of one turn, in order."""

    def reply(self, answer: Controlled | Told) -> None: ...
