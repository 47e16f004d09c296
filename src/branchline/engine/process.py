"""The engine's own process: ``python -m branchline.engine.process``, started by ``engine.launch``.

Knows: sockets, signals, heartbeat. Refuses to know: how an engine is built (``engine.build``) and what it does.
"""

import contextlib
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec
import zmq

from branchline.base.clock import Clock, MonotonicClock
from branchline.base.config import EngineConfig
from branchline.base.errors import Overloaded
from branchline.core.stats import EngineStats
from branchline.wire.child import EngineSettings, Lifeline, run, watch
from branchline.wire.codec import Codec
from branchline.wire.messages import FromEngine, Heartbeat, ModelFacts
from branchline.wire.zmq import Context, Push, ZmqInbox, ZmqOutbox

HEARTBEATS_PER_S = 4


class Engine(Protocol):
    """What this process needs of an engine."""

    @property
    def facts(self) -> ModelFacts: ...

    def run(self) -> None:
        """Serve until :meth:`stop` is called."""

    def stop(self) -> None:
        """From any thread."""

    def stats(self) -> EngineStats:
        """From any thread."""

    def close(self) -> None: ...


class Build(Protocol):
    def __call__(
        self, config: EngineConfig, *, cache_dir: str, inbox: ZmqInbox, outbox: ZmqOutbox, clock: Clock
    ) -> Engine: ...


def serve(build: Build, settings: EngineSettings, lifeline: Lifeline) -> None:
    """Build an engine between its sockets and run it until SIGTERM."""
    context: Context = zmq.Context()
    clock = MonotonicClock()
    inbox = ZmqInbox(context, settings.addresses.to_engine)
    outbox = ZmqOutbox(context, settings.addresses.from_engine)
    try:
        engine = build(settings.config, cache_dir=settings.cache_dir, inbox=inbox, outbox=outbox, clock=clock)
        try:
            lifeline.on_stop(lambda: _stop(engine, inbox, outbox))
            outbox.send(engine.facts)
            lifeline.ready(engine.facts)
            _run_with_heartbeat(
                engine, context, settings.addresses.from_engine, partial(_photograph, engine, inbox, outbox, clock)
            )
        finally:
            engine.close()
    finally:
        inbox.close()
        outbox.close()
        context.term()


def _stop(engine: Engine, inbox: ZmqInbox, outbox: ZmqOutbox) -> None:
    engine.stop()
    outbox.stop_waiting()
    inbox.wake()


def _run_with_heartbeat(engine: Engine, context: Context, address: str, photograph: Callable[[], Heartbeat]) -> None:
    over = threading.Event()
    heart = watch(lambda: _beat(context, address, photograph, over), "heartbeat")
    try:
        engine.run()
    finally:
        over.set()
        heart.join()


def _beat(context: Context, address: str, photograph: Callable[[], Heartbeat], over: threading.Event) -> None:
    """A heartbeat never waits for room: a late one is worth nothing."""
    push = Push(context, address, Codec[FromEngine](FromEngine))
    is_over = False
    while not is_over:
        with contextlib.suppress(Overloaded):
            push.send(photograph())
        is_over = over.wait(1 / HEARTBEATS_PER_S)
    push.close()


def _photograph(engine: Engine, inbox: ZmqInbox, outbox: ZmqOutbox, clock: Clock) -> Heartbeat:
    stats = engine.stats()
    dropped = stats.dropped_messages + inbox.dropped + outbox.dropped
    return Heartbeat(stats=msgspec.structs.replace(stats, dropped_messages=dropped), clock_ns=clock.now_ns())


def _build(config: EngineConfig, *, cache_dir: str, inbox: ZmqInbox, outbox: ZmqOutbox, clock: Clock) -> Engine:
    # Imported only now: arrays and kernels take a while to load, and the ties to the parent must hold by then.
    from branchline.engine.build import build_engine

    return build_engine(config, cache_dir=cache_dir, inbox=inbox, outbox=outbox, clock=clock)


def main() -> int:
    return run("engine", EngineSettings, partial(serve, _build))


if __name__ == "__main__":
    sys.exit(main())
