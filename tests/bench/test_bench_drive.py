"""Closed and open loops against a small server."""

import asyncio
import itertools
from collections import Counter

from branchline.bench import drive
from branchline.bench.arrivals import Arrival
from branchline.bench.client import Server
from branchline.bench.drive import NEVER_SENT, TOO_MANY, closed_loop, open_loop
from branchline.bench.workloads import Turn
from tests.support.sse_server import SseServer, refusal, stream_of

HELLO = (Turn("hello", 2),)


def run(script, load):
    async def go():
        async with SseServer(script) as server:
            return await load(Server.at(server.url, timeout_s=5)), server

    return asyncio.run(go())


def test_a_closed_loop_sends_everything_with_so_many_clients():
    conversations = [(Turn(f"prompt {n}", 2),) for n in range(12)]
    tally, server = run(lambda body: [0.05, *stream_of(["a", "b"])], lambda there: closed_loop(there, "m", conversations, 4))
    assert len(tally.completions) == 12
    assert tally.failed == 0
    assert server.most_open == 4
    assert sorted(body["prompt"] for body in server.bodies) == sorted(f"prompt {n}" for n in range(12))


def test_each_turn_begins_with_what_was_said():
    conversation = (Turn("User: one\nAssistant:", 5), Turn("User: two\nAssistant:", 6))
    _, server = run(lambda body: stream_of([" yes"]), lambda there: closed_loop(there, "m", [conversation], 3))
    assert [(body["prompt"], body["max_tokens"]) for body in server.bodies] == [
        ("User: one\nAssistant:", 5),
        ("User: one\nAssistant: yes\nUser: two\nAssistant:", 6),
    ]


def test_a_failure_ends_its_conversation_alone():
    def script(body):
        return refusal(500, "Broken.") if "bad" in body["prompt"] else stream_of(["a"])

    conversations = [(Turn("bad", 1), Turn("x", 1), Turn("y", 1)), (Turn("good", 1), Turn("z", 1))]
    tally, server = run(script, lambda there: closed_loop(there, "m", conversations, 1))
    assert tally.failures == Counter({"HTTP 500: Broken.": 1, NEVER_SENT: 2})
    assert (len(tally.completions), tally.failed, len(server.bodies)) == (2, 3, 3)


def test_an_open_loop_does_not_wait_for_answers():
    arrivals = [Arrival(0.02 * n, HELLO) for n in range(5)]
    tally, server = run(lambda body: [0.5, *stream_of(["a", "b"])], lambda there: open_loop(there, "m", arrivals))
    assert len(tally.completions) == 5
    assert server.most_open == 5
    assert tally.wall_s >= 0.58


def test_an_open_loop_is_bounded(monkeypatch):
    monkeypatch.setattr(drive, "MOST_IN_FLIGHT", 3)
    conversation = (Turn("a", 1), Turn("b", 1))
    tally, server = run(
        lambda body: [0.2, *stream_of(["a"])], lambda there: open_loop(there, "m", [Arrival(0.0, conversation)] * 5)
    )
    assert tally.failures == Counter({TOO_MANY: 4})
    assert (len(tally.completions), server.most_open) == (6, 3)


def test_requests_are_timed_from_when_they_are_due():
    answers = itertools.chain([[0.3, *stream_of(["a"])]], itertools.repeat(stream_of(["a"])))
    conversation = (Turn("a", 1), Turn("b", 1))
    tally, _ = run(lambda body: next(answers), lambda there: open_loop(there, "m", [Arrival(0.0, conversation)]))
    slow, quick = tally.completions
    assert slow.ttft_s >= 0.3
    assert quick.ttft_s < slow.ttft_s  # a later turn is due when the one before is answered
