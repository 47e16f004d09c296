"""Three processes: a client here, a text process and an engine process, both fakes inside real shells."""

import asyncio
import contextlib
import time

import pytest
import uvloop
import zmq

from branchline.base.clock import MonotonicClock
from branchline.base.config import EngineConfig
from branchline.base.errors import ConfigError
from branchline.base.finish import FinishReason
from branchline.core.request import SamplingParams
from branchline.engine.launch import Child, stop, watch
from branchline.engine.text_process import read_template
from branchline.wire.child import EngineSettings, TextSettings
from branchline.wire.client import TextClient
from branchline.wire.codec import Codec
from branchline.wire.messages import Delta, Ended, Generate, Started, TextPrompt, ToClient, ToText
from branchline.wire.zmq import AsyncPull, PrivateDirectory, Push
from tests.support import fake_engine, fake_text

READY_S = 30


class Trio:
    def __init__(self, context, directory):
        addresses = directory.addresses()
        self.pull = AsyncPull(context, addresses.to_client, Codec(ToClient))
        self.push = Push(context, addresses.to_text, Codec(ToText))
        self.client = TextClient(self.push.send, MonotonicClock())
        engine = EngineSettings(config=EngineConfig(model="echo"), addresses=addresses, cache_dir=directory.path)
        text = TextSettings(model=None, chat_template=None, addresses=addresses, cache_dir=directory.path)
        self.engine = Child("engine", [fake_engine.PATH], engine)
        self.text = Child("text", [fake_text.PATH], text)
        self.reading = asyncio.ensure_future(self.read())

    @property
    def children(self):
        return [self.engine, self.text]

    async def read(self):
        while True:
            self.client.deliver(await self.pull.receive())

    async def text_of(self, request_id, prompt):
        request = Generate(request_id=request_id, prompt=TextPrompt(prompt), sampling=SamplingParams())
        with self.client.generate(request) as generation:
            return [event async for event in generation]


@contextlib.asynccontextmanager
async def trio():
    context = zmq.Context()
    with PrivateDirectory() as directory:
        it = Trio(context, directory)
        try:
            facts = await asyncio.gather(*(child.wait_ready(READY_S) for child in it.children))
            assert facts == [fake_engine.FACTS, fake_engine.FACTS]
            yield it
        finally:
            await stop(it.children, grace_s=1.0)
            it.reading.cancel()
            await asyncio.gather(it.reading, return_exceptions=True)
            it.pull.close()
            it.push.close()
            context.destroy(linger=0)


def test_a_request_travels_through_three_processes_and_back():
    async def scenario():
        async with trio() as it:
            started, *deltas, ended = await it.text_of("r", "hello")
            assert started == Started("r", 5)
            assert deltas == [Delta("r", letter, 1) for letter in "hello"]
            assert isinstance(ended, Ended)
            assert ended.reason is FinishReason.LENGTH
            assert (await it.client.tokenize(TextPrompt("ab"))).tokens == (97, 98)
            assert (await it.client.detokenize((97, 98))).text == "ab"
            assert (await it.client.control("pause")).message == "pause"
            while it.client.latest is None:
                await asyncio.sleep(0.05)
            assert it.client.live_count == 0
            await stop(it.children)
            assert [child.exit_code for child in it.children] == [0, 0]

    uvloop.run(scenario())


def test_many_requests_keep_their_own_order():
    async def scenario():
        async with trio() as it:
            words = {f"r{i}": f"word {i} " * 5 for i in range(200)}
            answers = await asyncio.gather(*(it.text_of(*pair) for pair in words.items()))
            for word, events in zip(words.values(), answers, strict=True):
                assert "".join(event.text for event in events if isinstance(event, Delta)) == word
            assert it.client.late_messages == 0

    uvloop.run(scenario())


def test_a_client_that_does_not_read_loses_nothing():
    """Back-pressure through both processes: far more news than the high-water marks of all sockets hold."""

    async def scenario():
        async with trio() as it:
            it.reading.cancel()
            prompt = "x" * 30_000
            reader = asyncio.ensure_future(it.text_of("r", prompt))
            await asyncio.sleep(1.0)
            it.reading = asyncio.ensure_future(it.read())
            events = await asyncio.wait_for(reader, 20)
            assert sum(len(event.text) for event in events if isinstance(event, Delta)) == 30_000

    uvloop.run(scenario())


@pytest.mark.parametrize("victim", ["engine", "text"])
def test_when_one_dies_everything_is_over_in_time(victim):
    async def scenario():
        async with trio() as it:
            getattr(it, victim).kill()
            begin = time.monotonic()
            dead = await asyncio.wait_for(watch(it.children), 3)
            assert dead.name == victim
            it.client.fail_all(dead.obituary)
            (event,) = await it.text_of("r", "hello")
            assert event.status == 503
            assert event.message == f"The {victim} process was killed by SIGKILL."
            await stop(it.children)
            assert time.monotonic() - begin < 3
            assert sorted(child.exit_code for child in it.children) == [0, 137]

    uvloop.run(scenario())


def test_a_template_that_cannot_be_read_is_one_sentence(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }}", encoding="utf-8")
    assert read_template(str(path)) == "{{ messages }}"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_template(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_template(str(tmp_path / "none"))
