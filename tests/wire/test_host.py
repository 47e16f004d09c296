"""The host between an engine's socket and a client, around a service of paper."""

import asyncio
import logging

from branchline.base.errors import Overloaded
from branchline.base.finish import FinishReason
from branchline.core.request import RequestSpec, SamplingParams
from branchline.wire.host import TextHost
from branchline.wire.messages import (
    Cancel,
    CancelText,
    Control,
    Controlled,
    Generate,
    Outputs,
    Started,
    Submit,
    TextPrompt,
)


class PaperService:
    """Submits what is generated, passes on cancels and controls, remembers what it hears."""

    def __init__(self, send_to_client, send_to_engine):
        self.send_to_client = send_to_client
        self.send_to_engine = send_to_engine
        self.heard = []
        self.is_closed = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def handle(self, message):
        await self.gate.wait()
        match message:
            case Generate(request_id="broken"):
                raise RuntimeError("a bug")
            case Generate():
                spec = RequestSpec(
                    request_id=message.request_id, prompt=(1,), sampling=message.sampling, max_new_tokens=1, seed=0
                )
                self.send_to_engine(Submit(spec))
                self.send_to_client(Started(message.request_id, 1))
            case CancelText():
                self.send_to_engine(Cancel(message.request_id))
            case Control():
                self.send_to_engine(message)

    def hear(self, message):
        self.heard.append(message)
        self.send_to_client(message)

    def close(self):
        self.is_closed = True


class Stage:
    def __init__(self, send_to_engine=None):
        self.to_client = []
        self.to_engine = []

        def make(send_to_client, send_to_engine):
            self.service = PaperService(send_to_client, send_to_engine)
            return self.service

        self.host = TextHost(
            make, send_to_client=self.to_client.append, send_to_engine=send_to_engine or self.to_engine.append
        )


def generate(request_id="r"):
    return Generate(request_id=request_id, prompt=TextPrompt("hello"), sampling=SamplingParams())


async def turns(count=5):
    for _ in range(count):
        await asyncio.sleep(0)


def test_messages_are_served_in_order():
    async def scenario():
        stage = Stage()
        for message in (generate("a"), CancelText("a"), generate("b")):
            stage.host.submit(message)
        assert stage.to_engine == []  # submit only takes note
        await turns()
        assert [type(message) for message in stage.to_engine] == [Submit, Cancel, Submit]
        assert stage.to_client == [Started("a", 1), Started("b", 1)]
        await stage.host.close()
        assert stage.service.is_closed

    asyncio.run(scenario())


def test_what_the_engine_says_is_heard_in_order():
    async def scenario():
        stage = Stage()
        news = [Outputs(()), Controlled(call_id="c", done=True)]
        stage.host.hear(news)
        assert stage.service.heard == news
        await stage.host.close()

    asyncio.run(scenario())


def test_without_room_the_host_answers_for_the_engine():
    def full(_):
        raise Overloaded("The server is too busy.")

    async def scenario():
        stage = Stage(full)
        for message in (generate("a"), Control(call_id="c", verb="pause"), CancelText("a")):
            stage.host.submit(message)
        await turns()
        started, outputs, controlled = stage.to_client  # the end comes after the start; a cancel needs no answer
        assert started == Started("a", 1)
        finish = outputs.outputs[0].finish
        assert (finish.reason, finish.status, finish.message) == (FinishReason.REJECTED, 429, "The server is too busy.")
        assert controlled == Controlled(call_id="c", done=False, message="The server is too busy.")
        await stage.host.close()

    asyncio.run(scenario())


def test_a_bug_in_one_message_is_logged_and_the_next_is_served(caplog):
    async def scenario():
        stage = Stage()
        stage.host.submit(generate("broken"))
        stage.host.submit(generate("b"))
        await turns()
        assert stage.to_client == [Started("b", 1)]
        await stage.host.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert "serving a message failed" in caplog.text
    assert "a bug" in caplog.text


def test_close_gives_up_what_is_under_way():
    async def scenario():
        stage = Stage()
        stage.service.gate.clear()
        stage.host.submit(generate("a"))
        await turns()
        await asyncio.wait_for(stage.host.close(), 1)
        assert stage.to_engine == []
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())
