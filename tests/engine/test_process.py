"""Real processes around a fake engine: readiness, ends of every kind, no orphans."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import zmq

from branchline.base.config import EngineConfig
from branchline.base.errors import ConfigError, EngineDead, ModelError
from branchline.core.request import RequestSpec, SamplingParams
from branchline.engine.launch import Child, stop, watch
from branchline.wire.child import EngineSettings
from branchline.wire.codec import Codec
from branchline.wire.messages import (
    Cancel,
    Control,
    Controlled,
    FromEngine,
    Heartbeat,
    ModelFacts,
    Outputs,
    Submit,
    ToEngine,
)
from branchline.wire.zmq import AsyncPull, PrivateDirectory, Push
from tests.support import fake_engine, fake_parent

READY_S = 30


class Rig:
    """One fake engine and the two sockets of its text side."""

    def __init__(self, context, directory, model):
        addresses = directory.addresses()
        self.context = context
        self.pull = AsyncPull(context, addresses.from_engine, Codec(FromEngine))
        self.push = Push(context, addresses.to_engine, Codec(ToEngine))
        settings = EngineSettings(config=EngineConfig(model=model), addresses=addresses, cache_dir=directory.path)
        self.child = Child("engine", [fake_engine.PATH], settings)
        self.addresses = addresses

    async def hear(self, kind, seconds=10):
        """Messages up to the first of a kind."""
        heard = []
        async with asyncio.timeout(seconds):
            while not any(isinstance(message, kind) for message in heard):
                heard += await self.pull.receive()
        return heard


@contextlib.asynccontextmanager
async def rig(model="echo"):
    context = zmq.Context()
    with PrivateDirectory() as directory:
        it = Rig(context, directory, model)
        try:
            yield it
        finally:
            await stop([it.child], grace_s=0.5)
            it.pull.close()
            it.push.close()
            context.destroy(linger=0)


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_gone(pid, seconds=3.0):
    end = time.monotonic() + seconds
    while not is_gone(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return is_gone(pid)


# ---------------------------------------------------------------- a normal life


def test_ready_serve_heartbeat_stop(capfd):
    async def scenario():
        async with rig() as it:
            assert await it.child.wait_ready(READY_S) == fake_engine.FACTS
            spec = RequestSpec(request_id="r", prompt=(5, 6, 7), sampling=SamplingParams(), max_new_tokens=3, seed=1)
            it.push.send(Submit(spec))
            it.push.send(Control(call_id="c", verb="pause"))
            heard = await it.hear(Controlled)
            assert isinstance(heard[0], ModelFacts)
            outputs = [output for message in heard if isinstance(message, Outputs) for output in message.outputs]
            assert [output.tokens for output in outputs] == [(5,), (6,), (7,), ()]
            assert outputs[-1].finish is not None
            beats = [message for message in await it.hear(Heartbeat) if isinstance(message, Heartbeat)]
            assert beats[0].stats.turns > 0
            assert beats[0].clock_ns > 0
            assert it.child.exit_code is None
            begin = time.monotonic()
            await stop([it.child])
            assert time.monotonic() - begin < 1.9
            assert it.child.exit_code == 0
            assert it.child.obituary == "The engine process ended with exit code 0."

    asyncio.run(scenario())
    assert capfd.readouterr().err == "closed\n"


def test_heartbeats_come_while_nothing_else_happens():
    async def scenario():
        async with rig() as it:
            await it.child.wait_ready(READY_S)
            begin = time.monotonic()
            beats = []
            while len(beats) < 4:
                beats += [message for message in await it.hear(Heartbeat) if isinstance(message, Heartbeat)]
            assert time.monotonic() - begin < 4
            assert [beat.clock_ns for beat in beats] == sorted(beat.clock_ns for beat in beats)

    asyncio.run(scenario())


def test_rubbish_in_the_socket_is_reported_by_the_heartbeat():
    async def scenario():
        async with rig() as it:
            await it.child.wait_ready(READY_S)
            socket = it.context.socket(zmq.PUSH)
            socket.connect(it.addresses.to_engine)
            for data in (b"rubbish", b"\xc1", b""):
                socket.send(data)
            socket.close(linger=1000)
            dropped = 0
            async with asyncio.timeout(10):
                while dropped < 3:
                    (*_, beat) = (m for m in await it.hear(Heartbeat) if isinstance(m, Heartbeat))
                    dropped = beat.stats.dropped_messages
            assert dropped == 3
            it.push.send(Cancel("r"))
            await it.hear(Outputs)

    asyncio.run(scenario())


# ---------------------------------------------------------------- it cannot start


@pytest.mark.parametrize(
    ("model", "error", "sentence"),
    [
        ("bad-config", ConfigError, "these settings contradict each other"),
        ("bad-model", ModelError, "this model cannot be read"),
    ],
)
def test_a_refusal_to_start_is_one_sentence(model, error, sentence, capfd):
    async def scenario():
        async with rig(model) as it:
            with pytest.raises(error, match=sentence):
                await it.child.wait_ready(READY_S)
            assert it.child.exit_code == 78

    asyncio.run(scenario())
    assert capfd.readouterr().err == f"branchline engine: {sentence}\n"


def test_a_crash_at_start_shows_its_traceback(capfd):
    async def scenario():
        async with rig("crash") as it:
            with pytest.raises(EngineDead, match="exit code 70"):
                await it.child.wait_ready(READY_S)

    asyncio.run(scenario())
    shown = capfd.readouterr().err
    assert shown.startswith("branchline engine: unexpected error")
    assert "RuntimeError: nobody expected this" in shown


def test_slow_to_build_is_noticed_and_stopped():
    async def scenario():
        async with rig("slow") as it:
            with pytest.raises(EngineDead, match=r"not ready within 0\.2 seconds"):
                await it.child.wait_ready(0.2)
            begin = time.monotonic()
            await stop([it.child])
            assert time.monotonic() - begin < 3
            assert it.child.exit_code is not None

    asyncio.run(scenario())


def test_started_by_hand_it_explains_itself():
    done = subprocess.run([sys.executable, fake_engine.PATH], check=False, input=b"hello", capture_output=True)
    assert done.returncode == 78
    assert done.stderr.count(b"\n") == 1
    assert b"started by `branchline serve`" in done.stderr


# ---------------------------------------------------------------- unexpected ends


def test_a_killed_child_is_noticed():
    async def scenario():
        async with rig() as it:
            await it.child.wait_ready(READY_S)
            os.kill(it.child.pid, signal.SIGKILL)
            begin = time.monotonic()
            assert await asyncio.wait_for(watch([it.child]), 3) is it.child
            assert time.monotonic() - begin < 1
            assert it.child.exit_code == 137
            assert it.child.obituary == "The engine process was killed by SIGKILL."
            await stop([it.child])
            await stop([it.child])
            assert time.monotonic() - begin < 3

    asyncio.run(scenario())


@pytest.mark.parametrize("verb", ["crash", "bad-stats"])
def test_a_crash_anywhere_ends_the_process(verb, capfd):
    async def scenario():
        async with rig() as it:
            await it.child.wait_ready(READY_S)
            it.push.send(Control(call_id="c", verb=verb))
            await asyncio.wait_for(watch([it.child]), 3)
            assert it.child.exit_code == 70

    asyncio.run(scenario())
    assert "RuntimeError" in capfd.readouterr().err


@pytest.mark.parametrize("model", ["deaf", "seized"])
def test_a_child_that_does_not_listen_is_killed(model):
    async def scenario():
        async with rig(model) as it:
            await it.child.wait_ready(READY_S)
            begin = time.monotonic()
            await stop([it.child], grace_s=0.3)
            assert time.monotonic() - begin < 3
            assert it.child.exit_code == 137

    asyncio.run(scenario())


def test_interrupts_are_the_parents_business_and_a_storm_stops_once(capfd):
    async def scenario():
        async with rig() as it:
            await it.child.wait_ready(READY_S)
            for _ in range(50):
                os.kill(it.child.pid, signal.SIGINT)
            it.push.send(Control(call_id="c", verb="pause"))
            await it.hear(Controlled)
            for _ in range(200):
                it.child.terminate()
            assert await asyncio.wait_for(it.child.ended(), 3) == 0

    asyncio.run(scenario())
    assert capfd.readouterr().err == "closed\n"


def test_the_first_of_several_children_is_noticed():
    async def scenario():
        async with rig() as first, rig() as second:
            await asyncio.gather(first.child.wait_ready(READY_S), second.child.wait_ready(READY_S))
            second.child.kill()
            assert await asyncio.wait_for(watch([first.child, second.child]), 3) is second.child
            assert first.child.exit_code is None
            await stop([first.child, second.child])
            assert (first.child.exit_code, second.child.exit_code) == (0, 137)

    asyncio.run(scenario())


# ---------------------------------------------------------------- no orphans


def test_a_closed_death_pipe_ends_the_child():
    async def scenario():
        async with rig() as it:
            await it.child.wait_ready(READY_S)
            it.child.close()
            assert await asyncio.wait_for(it.child.ended(), 3) == 69

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("model", "number"), [("echo", signal.SIGKILL), ("echo", signal.SIGTERM), ("seized", signal.SIGKILL)]
)
def test_a_killed_parent_leaves_no_orphan(model, number):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen(
        [sys.executable, fake_parent.__file__, fake_engine.PATH, model],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with parent:
        pid, path = parent.stdout.readline().split()
        assert not is_gone(int(pid))
        parent.send_signal(number)
        parent.wait()
        assert wait_gone(int(pid))
    assert os.stat(path).st_mode & 0o777 == 0o700  # only its creator may remove it, and it had no time
    for name in os.listdir(path):
        os.unlink(os.path.join(path, name))
    os.rmdir(path)
