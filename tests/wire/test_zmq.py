"""Real sockets in one process: order, bursts, rubbish, limits, the private directory."""

import asyncio
import os
import stat
import subprocess
import sys
import threading
import time

import pytest
import uvloop
import zmq

from branchline.base.clock import NS_PER_S
from branchline.base.errors import ConfigError, InvalidRequest, Overloaded
from branchline.core.result import Output
from branchline.wire import codec as codec_module
from branchline.wire import zmq as wire_zmq
from branchline.wire.codec import MAX_MESSAGE_BYTES, Codec
from branchline.wire.messages import Cancel, Controlled, FromEngine, Outputs, ToEngine
from branchline.wire.zmq import HIGH_WATER_MESSAGES, AsyncPull, AsyncPush, PrivateDirectory, Push, ZmqInbox, ZmqOutbox


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def addresses():
    with PrivateDirectory() as directory:
        yield directory.addresses()


def collect(inbox, count, seconds=10.0):
    """Drain until so many messages are there."""
    end = time.monotonic() + seconds
    messages = []
    while len(messages) < count and time.monotonic() < end:
        inbox.wait(NS_PER_S // 10)
        messages += inbox.drain()
    return messages


@pytest.fixture
def raw_push(context):
    """A sender that sends any bytes."""
    sockets = []

    def connect(address):
        sockets.append(context.socket(zmq.PUSH))
        sockets[-1].connect(address)
        return sockets[-1]

    yield connect
    for socket in sockets:
        socket.close(linger=0)


# ---------------------------------------------------------------- the directory


def test_the_directory_is_private_and_goes_away():
    with PrivateDirectory() as directory:
        entry = os.lstat(directory.path)
        assert stat.S_IMODE(entry.st_mode) == 0o700
        assert entry.st_uid == os.geteuid()
        path = directory.path
    assert not os.path.exists(path)
    directory.close()


def test_sockets_are_for_their_owner_only(context, addresses):
    inbox = ZmqInbox(context, addresses.to_engine)
    path = addresses.to_engine.removeprefix("ipc://")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    inbox.close()


def test_the_directory_goes_at_exit_even_without_close():
    script = "from branchline.wire.zmq import PrivateDirectory; keep = PrivateDirectory(); print(keep.path)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip()
    assert not os.path.exists(done.stdout.strip())


def test_a_forked_copy_does_not_remove_it():
    script = (
        "import os, sys; from branchline.wire.zmq import PrivateDirectory; keep = PrivateDirectory(); pid = os.fork()\n"
        "if pid == 0: sys.exit(0)\n"
        "os.waitpid(pid, 0); print(os.path.isdir(keep.path))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_a_place_that_others_may_enter_is_refused(context, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    with pytest.raises(ConfigError, match="not private"):
        ZmqInbox(context, f"ipc://{shared}/to_engine")
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(private)
    with pytest.raises(ConfigError, match="not private"):
        ZmqInbox(context, f"ipc://{link}/to_engine")


def test_a_name_that_is_too_long_is_one_sentence(tmp_path):
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    with pytest.raises(ConfigError, match="too long"):
        PrivateDirectory(str(deep))
    assert list(deep.iterdir()) == []


# ---------------------------------------------------------------- engine side


def test_ten_thousand_messages_in_order(context, addresses):
    inbox = ZmqInbox(context, addresses.to_engine)

    def write():
        push = Push(context, addresses.to_engine, Codec(ToEngine))
        for i in range(10_000):
            while True:
                try:
                    push.send(Cancel(str(i)))
                    break
                except Overloaded:
                    time.sleep(0.001)
        push.close()

    writer = threading.Thread(target=write)
    writer.start()
    messages = collect(inbox, 10_000, seconds=30)
    writer.join()
    assert [message.request_id for message in messages] == [str(i) for i in range(10_000)]
    assert inbox.dropped == 0
    inbox.close()


def test_a_sender_may_come_before_its_receiver(context, addresses):
    push = Push(context, addresses.to_engine, Codec(ToEngine))
    push.send(Cancel("early"))
    inbox = ZmqInbox(context, addresses.to_engine)
    assert collect(inbox, 1) == [Cancel("early")]
    push.close()
    inbox.close()


def test_rubbish_is_counted_and_the_inbox_lives(context, addresses, raw_push):
    inbox = ZmqInbox(context, addresses.to_engine)
    socket = raw_push(addresses.to_engine)
    good = Codec(ToEngine).encode(Cancel("good"))
    rubbish = [b"", b"\xc1", good[:-1], os.urandom(1000), b"\x91" * 100_000, b"cos\nsystem\n(S'true'\ntR."]
    for data in rubbish:
        socket.send(data)
    socket.send_multipart([b"two", b"parts"])
    socket.send(good)
    assert collect(inbox, 1) == [Cancel("good")]
    assert inbox.dropped == len(rubbish) + 2
    inbox.close()


def test_a_long_message_is_counted_and_a_monstrous_one_cut_off(context, addresses, raw_push):
    inbox = ZmqInbox(context, addresses.to_engine)
    socket = raw_push(addresses.to_engine)
    socket.send(bytes(MAX_MESSAGE_BYTES + 1))
    socket.send(Codec(ToEngine).encode(Cancel("after long")))
    assert collect(inbox, 1) == [Cancel("after long")]
    assert inbox.dropped == 1
    socket.send(bytes(2 * MAX_MESSAGE_BYTES + 1))
    other = Push(context, addresses.to_engine, Codec(ToEngine))
    other.send(Cancel("after monster"))
    assert collect(inbox, 1) == [Cancel("after monster")]
    assert inbox.dropped == 1
    other.close()
    inbox.close()


def test_wait_ends_by_time_and_by_wake(context, addresses):
    inbox = ZmqInbox(context, addresses.to_engine)
    begin = time.monotonic()
    inbox.wait(30_000_000)
    assert time.monotonic() - begin >= 0.029
    inbox.wait(0)
    for _ in range(100_000):
        inbox.wake()  # never blocks, however often
    inbox.wait(None)
    sleeper = threading.Timer(0.05, inbox.wake)
    while inbox.drain():
        pass
    sleeper.start()
    inbox.wait(5 * NS_PER_S)
    assert time.monotonic() - begin < 4
    sleeper.join()
    inbox.close()


def test_a_full_outbox_waits_for_room_and_loses_nothing(context, addresses, monkeypatch):
    monkeypatch.setattr(wire_zmq, "HIGH_WATER_MESSAGES", 4)
    total = 400
    data = (0,) * 20_000
    pull = wire_zmq._Receiver(context, addresses.from_engine, Codec(FromEngine))
    counts = []
    all_read = threading.Event()

    def write():
        outbox = ZmqOutbox(context, addresses.from_engine)
        for i in range(total):
            outbox.publish([Output(str(i), tokens=data)])
        counts.append((outbox.held_up, outbox.dropped))
        all_read.wait(20)  # libzmq forgets what is in the kernel if a sender closes while its receiver is full
        outbox.close()

    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(0.3)
    assert writer.is_alive()  # held up: nobody reads
    got = []
    end = time.monotonic() + 20
    while len(got) < total and time.monotonic() < end:
        messages, _ = pull.read()
        got += [message.outputs[0].request_id for message in messages]
    all_read.set()
    writer.join()
    assert got == [str(i) for i in range(total)]
    held_up, dropped = counts[0]
    assert held_up > 0
    assert dropped == 0
    pull.close()


def test_a_full_outbox_that_must_not_wait_drops_and_counts(context, addresses, monkeypatch):
    monkeypatch.setattr(wire_zmq, "HIGH_WATER_MESSAGES", 2)
    outbox = ZmqOutbox(context, addresses.from_engine)
    waiter = threading.Timer(0.1, outbox.stop_waiting)
    waiter.start()
    begin = time.monotonic()
    for i in range(5):
        outbox.publish([Output(str(i))])
    assert time.monotonic() - begin < 2
    assert outbox.dropped == 3
    waiter.join()
    outbox.close()


def test_news_that_are_too_long_for_one_message_are_split(context, addresses, monkeypatch):
    pull = wire_zmq._Receiver(context, addresses.from_engine, Codec(FromEngine))
    outbox = ZmqOutbox(context, addresses.from_engine)
    monkeypatch.setattr(codec_module, "MAX_MESSAGE_BYTES", 100)
    outputs = [Output(f"{i:010}") for i in range(20)]
    outbox.publish([*outputs, Output("y" * 200)])
    outbox.reply(Controlled(call_id="z" * 200, done=True))
    outbox.reply(Controlled(call_id="end", done=True))
    got = []
    end = time.monotonic() + 10
    while (not got or not isinstance(got[-1], Controlled)) and time.monotonic() < end:
        got += pull.read()[0]
    parts = [message for message in got if isinstance(message, Outputs)]
    assert len(parts) > 1
    assert [output for part in parts for output in part.outputs] == outputs
    assert outbox.dropped == 2
    pull.close()
    outbox.close()


# ---------------------------------------------------------------- event loop side


def test_push_never_waits(context, addresses, monkeypatch):
    monkeypatch.setattr(wire_zmq, "HIGH_WATER_MESSAGES", 3)
    push = Push(context, addresses.to_engine, Codec(ToEngine))
    for i in range(3):
        push.send(Cancel(str(i)))
    with pytest.raises(Overloaded):
        push.send(Cancel("too many"))
    monkeypatch.setattr(codec_module, "MAX_MESSAGE_BYTES", 10)
    with pytest.raises(InvalidRequest):
        push.send(Cancel("too long"))
    assert push.dropped == 2
    push.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_burst_costs_one_wake_up(context, addresses, raw_push, run):
    count = HIGH_WATER_MESSAGES - 1  # more might find no room, and the sender sleeps in the thread that should read

    async def scenario():
        pull = AsyncPull(context, addresses.to_engine, Codec(ToEngine))
        socket = raw_push(addresses.to_engine)
        encoded = [Codec(ToEngine).encode(Cancel(str(i))) for i in range(count)]
        got, bursts = [], 0
        waiting = asyncio.ensure_future(pull.receive())
        await asyncio.sleep(0.01)  # the reader sleeps first
        for data in [b"rubbish", *encoded]:
            socket.send(data)
        while len(got) < count:
            got += await asyncio.wait_for(waiting, 10)
            bursts += 1
            waiting = asyncio.ensure_future(pull.receive())
        waiting.cancel()
        assert [message.request_id for message in got] == [str(i) for i in range(count)]
        assert bursts < count / 3
        assert pull.dropped == 1
        pull.close()

    run(scenario())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_nothing_is_lost_between_wake_ups(context, addresses, run):
    """The descriptor speaks only when the state changes: slow and quick senders, with and without a waiting reader."""

    async def scenario():
        pull = AsyncPull(context, addresses.to_engine, Codec(ToEngine))

        def write():
            push = Push(context, addresses.to_engine, Codec(ToEngine))
            for i in range(300):
                push.send(Cancel(str(i)))
                if i % 7 == 0:
                    time.sleep(0.001)
            push.close()

        writer = threading.Thread(target=write)
        writer.start()
        got = []
        while len(got) < 300:
            got += await asyncio.wait_for(pull.receive(), 10)
            if len(got) % 3 == 0:
                await asyncio.sleep(0.002)
        writer.join()
        assert [message.request_id for message in got] == [str(i) for i in range(300)]
        pull.close()

    run(scenario())


def test_unread_messages_do_not_spin_the_event_loop(context, addresses):
    async def scenario():
        pull = AsyncPull(context, addresses.to_engine, Codec(ToEngine))
        calls = 0
        settle = pull._receiver.settle

        def counted():
            nonlocal calls
            calls += 1
            settle()

        pull._receiver.settle = counted
        push = Push(context, addresses.to_engine, Codec(ToEngine))
        for i in range(50):
            push.send(Cancel(str(i)))
        await asyncio.sleep(0.2)
        assert calls <= 60
        assert len(await pull.receive()) == 50
        push.close()
        pull.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_an_async_push_keeps_what_finds_no_room(context, addresses, monkeypatch, run):
    monkeypatch.setattr(wire_zmq, "HIGH_WATER_MESSAGES", 3)

    async def scenario():
        push = AsyncPush(context, addresses.to_engine, Codec(ToEngine))
        await asyncio.wait_for(push.room(), 1)
        for i in range(500):
            push.send(Cancel(str(i)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(push.room(), 0.05)
        pull = AsyncPull(context, addresses.to_engine, Codec(ToEngine))
        got = []
        while len(got) < 500:
            got += await asyncio.wait_for(pull.receive(), 10)
        await asyncio.wait_for(push.room(), 1)
        assert [message.request_id for message in got] == [str(i) for i in range(500)]
        monkeypatch.setattr(codec_module, "MAX_MESSAGE_BYTES", 10)
        push.send(Cancel("too long"))
        assert push.dropped == 1
        push.close()
        pull.close()

    run(scenario())
