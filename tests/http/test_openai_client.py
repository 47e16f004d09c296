"""The ``openai`` package, unmodified, against the real server with a scripted text side."""

import asyncio

import openai
import pytest

from branchline.base.errors import ContextLengthExceeded
from branchline.wire.messages import Refused
from tests.support.live_server import live_server
from tests.support.scripted_text import WORDS

TEXT = "".join(WORDS)
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server():
    with live_server() as server:
        yield server
        server.wait_until(lambda: server.text.is_idle)


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="EMPTY", max_retries=0, timeout=10) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["org/tiny-model"]
    assert client.models.retrieve("tiny-model").id == "org/tiny-model"


def test_completion(client):
    answer = client.completions.create(model="default", prompt="a b", n=2, logprobs=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["a b" + TEXT] * 2
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_completion_stream(client):
    stream = client.completions.create(model="default", prompt="a", stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == TEXT
    assert chunks[-1].usage.completion_tokens == 5


def test_chat(client):
    answer = client.chat.completions.create(
        model="tiny-model", messages=HELLO, n=3, logprobs=True, top_logprobs=2, extra_body={"top_k": 5, "min_tokens": 1}
    )
    assert [choice.message.content for choice in answer.choices] == [TEXT] * 3
    assert answer.choices[2].logprobs.content[1].token == " wörld"
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def test_chat_stream(client):
    with client.chat.completions.stream(model="default", messages=HELLO) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == TEXT


def test_async_client(server):
    async def go():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="EMPTY", max_retries=0) as client:

            async def one():
                stream = await client.chat.completions.create(model="default", messages=HELLO, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one() for _ in range(16)))

    assert asyncio.run(go()) == [TEXT] * 16


def test_errors_become_the_right_classes(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="default", prompt="a", temperature=-1)
    assert bad.value.param == "temperature"


def test_context_overflow(client, server):
    error = ContextLengthExceeded(context=512, prompt=600)

    def refuse(request):
        server.text.live.pop(request.request_id)
        refusal = Refused(request_id=request.request_id, message=error.message, code=error.code, param=error.param)
        server.text.client.deliver([refusal])
        return ()

    server.text.script = refuse
    try:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens") as caught:
                client.completions.create(model="default", prompt="a", stream=stream)
            assert caught.value.code == "context_length_exceeded"
    finally:
        server.text.script = None


def test_leaving_a_stream(client, server):
    server.text.hold = True
    try:
        stream = client.completions.create(model="default", prompt="a", stream=True, n=2)
        next(iter(stream))
        stream.close()
        server.wait_until(lambda: server.text.is_idle)
    finally:
        server.text.hold = False


def test_keys():
    with live_server(api_keys=("secret",)) as server:
        with (
            openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        with openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0) as client:
            assert client.models.list()
