import asyncio
import threading

from branchline.base.finish import FinishReason
from branchline.text.process import TextService
from branchline.wire.messages import Cancel, CancelText, Ended, Refused, Started, Submit, TextPrompt, Tokenize
from tests.support.texts import generate, make_side, news


class Gate:
    """A text side whose preparation of one request waits until it is let through."""

    def __init__(self, side, slow_id):
        self._side = side
        self._slow_id = slow_id
        self.open = threading.Event()
        self.thread_names = set()

    def prepare(self, message):
        self.thread_names.add(threading.current_thread().name)
        if getattr(message, "request_id", None) == self._slow_id:
            self.open.wait(10)
        if getattr(message, "request_id", None) == "broken":
            raise RuntimeError("a bug")
        return self._side.prepare(message)

    def __getattr__(self, name):
        return getattr(self._side, name)


def run(scenario):
    async def main():
        gate = Gate(make_side()[0], "slow")
        sent = []
        service = TextService(gate, sent.append, sent.append)
        try:
            await asyncio.wait_for(scenario(service, gate, sent), 20)
        finally:
            gate.open.set()
            service.close()

    asyncio.run(main())


def kinds(sent):
    return [type(item) for item in sent]


def test_a_request_from_beginning_to_end():
    async def scenario(service, gate, sent):
        await service.handle(generate())
        assert kinds(sent) == [Submit, Started]
        service.hear(news("r", (72,), finish=FinishReason.LENGTH))
        assert isinstance(sent[-1], Ended)
        assert service.live_count == 0
        assert all(name.startswith("tokenizer") for name in gate.thread_names)

    run(scenario)


def test_a_slow_request_holds_up_nobody_else():
    async def scenario(service, gate, sent):
        slow = asyncio.create_task(service.handle(generate("slow")))
        await asyncio.sleep(0)
        await service.handle(generate("quick"))
        await service.handle(Tokenize(call_id="c", prompt=TextPrompt("x")))
        assert [getattr(item, "request_id", "") for item in sent] == ["", "quick", ""]
        assert service.live_count == 2
        gate.open.set()
        await slow
        assert sent[-1] == Started("slow", 1)

    run(scenario)


def test_messages_about_one_request_keep_their_order():
    async def scenario(service, gate, sent):
        messages = [generate("slow"), CancelText("slow"), generate("slow")]
        tasks = [asyncio.create_task(service.handle(message)) for message in messages]
        await asyncio.sleep(0.05)
        assert sent == []
        gate.open.set()
        await asyncio.gather(*tasks)
        to_client = [type(item) for item in sent if isinstance(item, Started | Ended | Refused)]
        assert to_client == [Started, Ended, Refused]  # the engine has not finished the first one

    run(scenario)


def test_a_cancelled_call_lets_the_next_one_through():
    async def scenario(service, gate, sent):
        first = asyncio.create_task(service.handle(generate("slow")))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(service.handle(CancelText("slow")))
        third = asyncio.create_task(service.handle(CancelText("slow")))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        gate.open.set()
        await asyncio.gather(first, third)
        assert kinds(sent) == [Submit, Started, Cancel, Ended]  # the third waited for the first all the same

    run(scenario)


def test_a_bug_in_preparation_ends_one_request(caplog):
    async def scenario(service, gate, sent):
        await service.handle(generate("broken"))
        assert [(type(item), item.status) for item in sent] == [(Refused, 500)]
        await service.handle(generate("next"))
        assert isinstance(sent[-1], Started)

    run(scenario)
    assert "broken" in caplog.text
    assert "hello" not in caplog.text


def test_a_dead_engine_is_told_to_everyone():
    async def scenario(service, gate, sent):
        await service.handle(generate())
        service.abandon("The engine is gone.")
        assert (sent[-1].reason, sent[-1].status) == (FinishReason.ERROR, 503)
        assert service.live_count == 0

    run(scenario)
