"""The socketless inbox and outbox."""

import threading
import time

from branchline.base.clock import NS_PER_S
from branchline.core.result import Output
from branchline.wire.inproc import InprocInbox, InprocOutbox
from branchline.wire.messages import Cancel, Controlled, Outputs


def test_order_is_kept_and_drain_empties():
    inbox = InprocInbox()
    inbox.put(Cancel("a"), Cancel("b"))
    inbox.put(Cancel("c"))
    assert [message.request_id for message in inbox.drain()] == ["a", "b", "c"]
    assert inbox.drain() == []


def test_many_threads_lose_nothing():
    inbox = InprocInbox()
    writers = [threading.Thread(target=lambda w=w: [inbox.put(Cancel(f"{w}:{i}")) for i in range(500)]) for w in range(4)]
    for writer in writers:
        writer.start()
    got = []
    while len(got) < 2000:
        inbox.wait(NS_PER_S)
        got += [message.request_id for message in inbox.drain()]
    for writer in writers:
        writer.join()
    for w in range(4):
        assert [name for name in got if name.startswith(f"{w}:")] == [f"{w}:{i}" for i in range(500)]


def test_wait_ends_by_message_by_wake_and_by_time():
    inbox = InprocInbox()
    inbox.put(Cancel("a"))
    inbox.wait(None)
    inbox.drain()
    inbox.wake()
    inbox.wait(None)
    begin = time.monotonic()
    inbox.wait(20_000_000)  # the wake was used up
    assert time.monotonic() - begin >= 0.019


def test_wake_reaches_a_sleeper():
    inbox = InprocInbox()
    sleeper = threading.Thread(target=inbox.wait, args=(None,))
    sleeper.start()
    inbox.wake()
    sleeper.join(timeout=5)
    assert not sleeper.is_alive()


def test_the_outbox_hands_over_at_once():
    got = []
    outbox = InprocOutbox(got.append)
    outbox.publish([])
    outbox.publish([Output("a"), Output("b")])
    outbox.reply(Controlled(call_id="c", done=True))
    assert got == [Outputs((Output("a"), Output("b"))), Controlled(call_id="c", done=True)]
