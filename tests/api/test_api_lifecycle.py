"""How calls end: refusals, failures, clients that leave or do not read. Nothing may stay in any map."""

import asyncio

import pytest

from branchline.api import exchange as exchange_module
from branchline.api import generate as generate_module
from branchline.base.errors import InvalidRequest, Overloaded
from branchline.base.finish import FinishReason
from branchline.core.result import Usage
from branchline.wire.messages import CancelText, Delta, Ended, Refused, Started
from tests.support.asgi import Caller, events, run, serving

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BODIES = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": [{"role": "user", "content": "hi"}]}}


def ended(request, reason, **fields):
    return Ended(request_id=request.request_id, reason=reason, usage=Usage(1, 0, 0), **fields)


def post_scripted(script, body, path=COMPLETIONS):
    async def go():
        async with serving() as (http, fake):
            fake.script = script
            return await http.post(path, json=body), fake

    return run(go())


ENDS = [
    (FinishReason.CANCELLED, {}, 499, "cancelled"),
    (FinishReason.WAITING_TIMEOUT, {}, 503, "timeout"),
    (FinishReason.RUNNING_TIMEOUT, {}, 504, "timeout"),
    (FinishReason.REJECTED, {"status": 429}, 429, "overloaded"),
    (FinishReason.REJECTED, {"status": 400, "message": "It can never fit."}, 400, None),
    (FinishReason.ERROR, {"status": 500}, 500, "engine_error"),
    (FinishReason.SHUTDOWN, {"status": 503}, 503, "shutdown"),
]


@pytest.mark.parametrize(("reason", "fields", "status", "code"), ENDS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("starts", [False, True])
def test_end_without_success_before_text(reason, fields, status, code, stream, starts):
    def script(request):
        if starts:
            yield Started(request.request_id, 1)
        yield ended(request, reason, **fields)

    response, _ = post_scripted(script, {"prompt": "a", "stream": stream})
    error = response.json()["error"]
    assert response.status_code == status
    assert error["code"] == code
    assert error["message"]
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert "finish_reason" not in response.text


@pytest.mark.parametrize(("reason", "fields", "status", "code"), ENDS)
def test_end_without_success_after_text(reason, fields, status, code):
    def script(request):
        yield Started(request.request_id, 1)
        yield Delta(request.request_id, "Hel", 1)
        yield ended(request, reason, text="lo", **fields)

    response, _ = post_scripted(script, {"prompt": "a", "stream": True})
    assert response.status_code == 200
    first, last = events(response.text)
    assert first["choices"][0]["text"] == "Hel"
    assert last["error"]["code"] == code
    whole, _ = post_scripted(script, {"prompt": "a"})
    assert whole.status_code == status


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_is_a_status(stream):
    def script(request):
        yield Refused(request_id=request.request_id, message="Too long.", code="context_length_exceeded", param="prompt")

    async def go():
        async with serving() as (http, fake):
            fake.script = lambda request: (fake.live.pop(request.request_id), *script(request))[1:]
            return await http.post(COMPLETIONS, json={"prompt": "a", "stream": stream})

    response = run(go())
    assert response.status_code == 400
    expected = {
        "message": "Too long.",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "context_length_exceeded",
    }
    assert response.json()["error"] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_one_refused_choice_ends_the_call(stream):
    async def go():
        async with serving() as (http, fake):

            def script(request):
                yield Started(request.request_id, 1)
                if request.request_id.endswith("-2"):
                    yield ended(request, FinishReason.REJECTED, status=429)
                yield Ended(request_id=request.request_id, reason=FinishReason.STOP, usage=Usage(1, 1, 0), text="x")

            fake.script = script
            fake.pause_s = 0.001
            return await http.post(COMPLETIONS, json={"prompt": "a", "n": 4, "stream": stream})

    response = run(go())
    if response.status_code == 200:  # another choice spoke first: the error is inside the stream
        assert stream
        assert events(response.text)[-1]["error"]["code"] == "overloaded"
    else:
        assert response.status_code == 429


def test_no_room_to_send_is_overload():
    async def go():
        async with serving() as (http, fake):

            def full(message):
                raise Overloaded("The queue is full.")

            fake.client._send = full
            return await http.post(COMPLETIONS, json={"prompt": "a", "n": 3})

    response = run(go())
    assert response.status_code == 429
    assert response.json()["error"]["type"] == "rate_limit_error"


def test_a_dead_engine_is_unavailable():
    async def go():
        async with serving() as (http, fake):
            fake.client.fail_all("The engine process ended with exit code 9.")
            answers = [await http.post(path, json=BODIES[path]) for path in BODIES]
            answers.append(await http.post("/tokenize", json={"prompt": "a"}))
            answers.append(await http.get("/health"))
            return answers

    for response in run(go()):
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "server_error"


def test_engine_dies_under_running_calls():
    async def go():
        async with serving(idle=False) as (http, fake):
            fake.hold = True
            whole = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "a"}))
            stream = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "a", "stream": True}))
            await fake.until(lambda: len(fake.live) == 2)
            await asyncio.sleep(0.05)
            fake.client.fail_all("gone")
            answers = await whole, await stream
            assert fake.client.live_count == 0
            for task in fake.live.values():
                task.cancel()
            return answers

    whole, stream = run(go())
    assert whole.status_code == 503
    assert events(stream.text)[-1]["error"]["code"] == "shutdown"


def test_an_unforeseen_error_shows_an_incident_and_nothing_else(caplog):
    async def go():
        async with serving() as (http, fake):

            def broken(message):
                raise ValueError("/home/secret 0xdeadbeef")

            fake.client._send = broken
            answers = [
                await http.post(COMPLETIONS, json={"prompt": "a"}),
                await http.post("/tokenize", json={"prompt": "a"}),
            ]
            fake.client._generations.clear()
            return answers

    for response in run(go()):
        assert response.status_code == 500
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        assert "secret" not in response.text
        incident = error["message"].split()[-1].rstrip(".")
        assert any(incident in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_leaves_cancels_every_choice(path, stream, n):
    async def go():
        async with serving() as (http, fake):
            fake.hold = True
            caller = Caller(http.app, path, BODIES[path] | {"stream": stream, "n": n})
            await fake.until(lambda: len(fake.live) == n)
            await asyncio.sleep(0.02)
            assert bool(caller.sent) == stream
            caller.gone.set()
            await caller.task
            await fake.until(lambda: fake.is_idle)
            assert sorted(fake.cancelled) == sorted(request.request_id for request in fake.requests)
            text = http.app.state.service.metrics.render().decode()
            assert f'branchline_choices_total{{reason="cancelled"}} {float(n)}' in text
            return caller, text

    caller, text = run(go())
    name = {COMPLETIONS: "completions", CHAT: "chat_completions"}[path]
    assert f'route="{name}",status="{200 if stream else 499}"' in text
    assert b'finish_reason":"' not in caller.body


def test_leaving_before_anything_came():
    async def go():
        async with serving() as (http, fake):
            fake.script = lambda request: []
            caller = Caller(http.app, COMPLETIONS, {"prompt": "a", "stream": True})
            await fake.until(lambda: fake.live)
            caller.gone.set()
            await caller.task
            assert caller.sent == []

    run(go())


def test_leaving_after_the_end_cancels_nothing():
    async def go():
        async with serving() as (http, fake):
            caller = Caller(http.app, COMPLETIONS, {"prompt": "a", "stream": True})
            await caller.task
            caller.gone.set()
            assert caller.body.endswith(b"data: [DONE]\n\n")
            assert fake.cancelled == []

    run(go())


def test_cancelling_the_handler_itself_passes_on():
    """A server that shuts down cancels its tasks: that is not a client that left."""

    async def go():
        async with serving() as (http, fake):
            fake.hold = True
            caller = Caller(http.app, COMPLETIONS, {"prompt": "a"})
            await fake.until(lambda: fake.live)
            caller.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller.task

    run(go())


def test_a_client_that_takes_nothing_is_treated_as_gone(monkeypatch):
    monkeypatch.setattr(exchange_module, "STALL_TIMEOUT_S", 0.05)

    async def go():
        async with serving() as (http, fake):
            fake.hold = True
            caller = Caller(http.app, COMPLETIONS, {"prompt": "a", "stream": True})
            caller.send_gate.clear()
            await fake.until(lambda: fake.live)
            caller.send_gate.set()
            await fake.until(lambda: caller.sent)
            caller.send_gate.clear()
            (request,) = fake.requests
            fake.say(request.request_id, "x")
            await caller.task
            assert fake.cancelled == [request.request_id]

    run(go())


def test_news_do_not_pile_up_without_bound(monkeypatch):
    monkeypatch.setattr(generate_module, "MAX_BACKLOG_EVENTS", 50)

    async def go():
        async with serving() as (http, fake):
            fake.hold = True
            caller = Caller(http.app, COMPLETIONS, {"prompt": "a", "stream": True})
            await fake.until(lambda: caller.sent and fake.live)
            caller.send_gate.clear()
            (request,) = fake.requests
            fake.say(request.request_id, "x")
            await asyncio.sleep(0.01)
            for _ in range(60):
                fake.say(request.request_id, "x")
            caller.send_gate.set()
            await caller.task
            assert fake.cancelled == [request.request_id]
            assert b"[DONE]" not in caller.body

    run(go())


def test_a_burst_is_one_send():
    async def go():
        async with serving() as (http, fake):
            fake.hold = True
            caller = Caller(http.app, COMPLETIONS, {"prompt": "a", "stream": True, "n": 2})
            await fake.until(lambda: len(fake.live) == 2 and caller.sent)
            await asyncio.sleep(0.02)
            before = len(caller.sent)
            for request in fake.requests:
                fake.client.deliver([Delta(request.request_id, str(i), 1) for i in range(10)])
            await asyncio.sleep(0.02)
            sent = caller.sent[before:]
            caller.gone.set()
            await caller.task
            return sent

    sent = run(go())
    assert len(sent) == 1
    assert sent[0]["body"].count(b"data: ") == 20


def test_the_answer_waits_until_every_choice_is_accepted():
    async def go():
        async with serving() as (http, fake):
            fake.script = lambda request: []
            caller = Caller(http.app, COMPLETIONS, {"prompt": "a", "stream": True, "n": 2})
            await fake.until(lambda: len(fake.live) == 2)
            first, second = [request.request_id for request in fake.requests]
            fake.client.deliver([Started(first, 1), Delta(first, "early", 1)])
            await asyncio.sleep(0.02)
            assert caller.sent == []
            fake.client.deliver([Started(second, 1)])
            await fake.until(lambda: len(caller.sent) == 2)
            assert caller.status == 200
            assert b"early" in caller.body
            caller.gone.set()
            await caller.task

    run(go())


def test_a_second_live_request_with_the_same_id_is_refused():
    """Ids are ours and unguessable; should two ever meet, the second loses and takes nothing with it."""

    async def go():
        async with serving() as (http, fake):
            await http.post(COMPLETIONS, json={"prompt": "a"})
            request = fake.requests[0]
            with fake.client.generate(request), pytest.raises(InvalidRequest):
                fake.client.generate(request)

    run(go())


def test_many_calls_at_once_with_random_departures():
    import random

    async def one(http, fake, rng):
        body = {"prompt": "a", "stream": rng.random() < 0.5, "n": rng.randint(1, 4)}
        caller = Caller(http.app, COMPLETIONS, body)
        if rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.02)
            caller.gone.set()
        await caller.task
        return caller

    async def go():
        rng = random.Random(1)
        async with serving() as (http, fake):
            fake.pause_s = 0.002
            callers = await asyncio.gather(*(one(http, fake, rng) for _ in range(80)))
            await fake.until(lambda: fake.is_idle and len(asyncio.all_tasks()) == 1)  # nothing is left but this task
            assert any(caller.status is None for caller in callers)
            cancels = [message for message in fake.received if isinstance(message, CancelText)]
            assert len(cancels) == len({message.request_id for message in cancels})
            return callers

    for caller in run(go()):
        if not caller.gone.is_set():
            assert caller.status == 200
