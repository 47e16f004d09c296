"""The client's bookkeeping: who waits for what, and that everyone hears an end."""

import asyncio

import pytest

from branchline.base.clock import ManualClock
from branchline.base.errors import EngineDead, InvalidRequest, Overloaded, RequestError
from branchline.base.finish import FinishReason
from branchline.core.request import SamplingParams
from branchline.core.result import Usage
from branchline.core.stats import EngineStats
from branchline.wire.client import TextClient
from branchline.wire.messages import (
    CancelText,
    Control,
    Controlled,
    Delta,
    Detokenize,
    Detokenized,
    Ended,
    Generate,
    Heartbeat,
    Refused,
    Started,
    TextPrompt,
    Tokenize,
    Tokenized,
)


def generate(request_id="r"):
    return Generate(request_id=request_id, prompt=TextPrompt("hello"), sampling=SamplingParams())


def ended(request_id="r", reason=FinishReason.STOP):
    return Ended(request_id=request_id, reason=reason, usage=Usage(3, 2, 0))


class Wire:
    """A client whose sent messages lie in a list."""

    def __init__(self):
        self.sent = []
        self.clock = ManualClock()
        self.client = TextClient(self.sent.append, self.clock)


@pytest.fixture
def wire():
    return Wire()


def test_news_come_in_order_until_the_end(wire):
    async def scenario():
        generation = wire.client.generate(generate())
        assert wire.sent == [generate()]
        news = [Started("r", 3), Delta("r", "a", 1), Delta("r", "b", 1), ended()]
        wire.client.deliver(news[:1])
        wire.client.deliver([*news[1:], Delta("r", "late", 1)])
        assert wire.client.live_count == 0
        assert [event async for event in generation] == news
        assert [event async for event in generation] == []
        assert wire.client.late_messages == 1
        generation.close()
        assert wire.sent == [generate()]

    asyncio.run(scenario())


def test_a_reader_sleeps_and_a_burst_wakes_it_once(wire):
    async def scenario():
        generation = wire.client.generate(generate())
        reader = asyncio.ensure_future(generation.burst())
        await asyncio.sleep(0)
        assert not reader.done()
        wire.client.deliver([Started("r", 3), Delta("r", "a", 1)])
        assert await reader == [Started("r", 3), Delta("r", "a", 1)]
        wire.client.deliver([ended()])
        assert await generation.burst() == [ended()]
        assert await generation.burst() == []

    asyncio.run(scenario())


def test_requests_do_not_hear_each_other(wire):
    async def scenario():
        first, second = wire.client.generate(generate("1")), wire.client.generate(generate("2"))
        wire.client.deliver([Delta("2", "two"), Delta("1", "one"), ended("2"), ended("1")])
        assert [event async for event in first] == [Delta("1", "one"), ended("1")]
        assert [event async for event in second] == [Delta("2", "two"), ended("2")]

    asyncio.run(scenario())


def test_leaving_early_cancels_once(wire):
    async def scenario():
        with wire.client.generate(generate()) as generation:
            wire.client.deliver([Started("r", 3), Delta("r", "a")])
            async for _ in generation:
                break
        generation.close()
        assert wire.sent == [generate(), CancelText("r")]
        assert wire.client.live_count == 0
        assert [event async for event in generation] == []

    asyncio.run(scenario())


def test_a_cancelled_task_leaves_nothing_behind(wire):
    async def read():
        with wire.client.generate(generate()) as generation:
            async for _ in generation:
                pass

    async def scenario():
        task = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert wire.client.live_count == 0
        assert wire.sent[-1] == CancelText("r")

    asyncio.run(scenario())


def test_cancel_still_hears_the_end(wire):
    async def scenario():
        generation = wire.client.generate(generate())
        wire.client.cancel("r")
        wire.client.cancel("nobody")
        assert wire.sent == [generate(), CancelText("r")]
        wire.client.deliver([ended(reason=FinishReason.CANCELLED)])
        assert [event.reason async for event in generation] == [FinishReason.CANCELLED]

    asyncio.run(scenario())


def test_one_id_one_request(wire):
    async def scenario():
        wire.client.generate(generate())
        with pytest.raises(InvalidRequest, match="running already"):
            wire.client.generate(generate())
        wire.client.deliver([ended()])
        wire.client.generate(generate())
        assert wire.client.live_count == 1

    asyncio.run(scenario())


def test_a_refusal_ends_a_request(wire):
    async def scenario():
        generation = wire.client.generate(generate())
        refused = Refused(request_id="r", message="too long", code="context_length_exceeded")
        wire.client.deliver([refused])
        assert [event async for event in generation] == [refused]
        assert wire.client.live_count == 0

    asyncio.run(scenario())


def test_no_room_is_a_refusal_and_a_lost_cancel_is_no_error():
    def send(_):
        raise Overloaded("full")

    async def scenario():
        client = TextClient(send, ManualClock())
        with client.generate(generate()) as generation:
            (event,) = [event async for event in generation]
        assert (event.status, event.kind, event.code, event.message) == (429, "rate_limit_error", "overloaded", "full")
        with pytest.raises(Overloaded):
            await client.control("pause")
        assert client.live_count == 0

    asyncio.run(scenario())


def test_a_cancel_that_finds_no_room_does_not_disturb_its_sender():
    sent = []

    def send(message):
        if isinstance(message, CancelText):
            raise Overloaded("full")
        sent.append(message)

    async def scenario():
        client = TextClient(send, ManualClock())
        client.generate(generate()).close()
        assert client.live_count == 0
        assert sent == [generate()]

    asyncio.run(scenario())


def test_an_answer_inside_send_is_heard():
    """The text side may live in this process and refuse before ``send`` returns."""
    refused = Refused(request_id="r", message="no")

    async def scenario():
        client = TextClient(lambda _: client.deliver([refused]), ManualClock())
        assert [event async for event in client.generate(generate())] == [refused]

    asyncio.run(scenario())


def test_calls_are_answered_by_their_own_ids(wire):
    def answer(message):
        match message:
            case Tokenize():
                return Tokenized(message.call_id, (1, 2), ("a", "b"))
            case Detokenize():
                return Detokenized(message.call_id, "ab")
            case Control():
                return Controlled(message.call_id, True, message.verb)

    async def scenario():
        calls = asyncio.gather(
            wire.client.tokenize(TextPrompt("ab")), wire.client.detokenize((1, 2)), wire.client.control("pause")
        )
        await asyncio.sleep(0)
        assert wire.client.live_count == 3
        wire.client.deliver(reversed([answer(message) for message in wire.sent]))
        tokenized, detokenized, controlled = await calls
        assert tokenized.tokens == (1, 2)
        assert detokenized.text == "ab"
        assert controlled.message == "pause"
        assert wire.client.live_count == 0

    asyncio.run(scenario())


def test_a_refused_call_raises_what_the_text_side_meant(wire):
    async def scenario():
        call = asyncio.ensure_future(wire.client.tokenize(TextPrompt("ab")))
        await asyncio.sleep(0)
        call_id = wire.sent[0].call_id
        wire.client.deliver([Refused(call_id, "bad", status=404, kind="k", code="c", param="p")])
        with pytest.raises(RequestError) as caught:
            await call
        error = caught.value
        assert (error.message, error.status, error.kind, error.code, error.param) == ("bad", 404, "k", "c", "p")
        assert RequestError("other").status == 400

    asyncio.run(scenario())


def test_a_call_without_an_answer_ends_in_time(wire):
    async def scenario():
        with pytest.raises(EngineDead, match=r"within 0\.01 seconds"):
            await wire.client.control("pause", timeout_s=0.01)
        wire.client.deliver([Controlled(wire.sent[0].call_id, True)])
        assert wire.client.late_messages == 1
        assert wire.client.live_count == 0

    asyncio.run(scenario())


def test_an_answer_of_the_wrong_kind_is_not_taken(wire):
    async def scenario():
        call = asyncio.ensure_future(wire.client.control("pause"))
        await asyncio.sleep(0)
        wire.client.deliver([Detokenized(wire.sent[0].call_id, "text")])
        with pytest.raises(EngineDead, match="Detokenized"):
            await call

    asyncio.run(scenario())


def test_heartbeats_are_kept_with_the_time_of_arrival(wire):
    assert wire.client.latest is None
    assert wire.client.latest_ns is None
    wire.clock.advance(7)
    beat = Heartbeat(stats=EngineStats(steps=3), clock_ns=99)
    wire.client.deliver([Heartbeat(stats=EngineStats(steps=2), clock_ns=98), beat])
    assert wire.client.latest == beat
    assert wire.client.latest_ns == 7


def test_when_the_engine_has_gone_everyone_hears_it(wire):
    async def scenario():
        waiting = wire.client.generate(generate("1"))
        call = asyncio.ensure_future(wire.client.control("pause"))
        await asyncio.sleep(0)
        assert not wire.client.is_dead
        wire.client.fail_all("The engine process was killed by SIGKILL.")
        wire.client.fail_all("The engine process was killed by SIGKILL.")
        with pytest.raises(EngineDead, match="SIGKILL"):
            await call
        later = wire.client.generate(generate("2"))
        sent = len(wire.sent)
        for generation in (waiting, later):
            (event,) = [event async for event in generation]
            assert (event.reason, event.status) == (FinishReason.SHUTDOWN, 503)
            generation.close()
        with pytest.raises(EngineDead, match="SIGKILL"):
            await wire.client.tokenize(TextPrompt("a"))
        assert wire.client.is_dead
        assert wire.client.live_count == 0
        assert len(wire.sent) == sent

    asyncio.run(scenario())
