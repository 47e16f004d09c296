"""The client against a small server: what is sent, what is measured, and every way it can go wrong."""

import asyncio

import pytest

from branchline.base.errors import ConfigError
from branchline.bench.client import RequestFailed, Server, Unreachable, complete, first_model
from tests.support.sse_server import DONE, EVENT, SseServer, refusal, stream_of


def ask(script, *, timeout_s=5.0, api_key=None, path=""):
    async def go():
        async with SseServer(script) as server:
            there = Server.at(server.url + path, timeout_s=timeout_s, api_key=api_key)
            return await complete(there, "tiny", "Hello", 3), server

    return asyncio.run(go())


def test_a_completion_is_counted_and_timed():
    completion, server = ask(lambda body: [0.02, EVENT % b"one", 0.02, *stream_of([" two", " three"])])
    assert completion.text == "one two three"
    assert (completion.prompt_tokens, completion.output_tokens) == (7, 2)  # the server's word counts
    assert 0.02 <= completion.ttft_s <= completion.total_s - 0.02
    assert server.bodies == [
        {
            "model": "tiny", "prompt": "Hello", "max_tokens": 3, "temperature": 0, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
    ]  # fmt: skip
    assert server.heads[0].startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "Authorization" not in server.heads[0]


def test_pieces_are_counted_where_the_server_does_not_count():
    completion, _ = ask(lambda body: [EVENT % b"a", EVENT % b"b", EVENT % b"", DONE])
    assert (completion.output_tokens, completion.prompt_tokens) == (2, 0)


def test_events_may_be_cut_anywhere():
    whole = b": comment\r\n\r\n" + b"".join(stream_of(["é".encode().decode("latin-1"), " b"])).replace(b"\n", b"\r\n")
    for width in (1, 2, 7, 1000):
        completion, _ = ask(lambda body, w=width: [whole[i : i + w] for i in range(0, len(whole), w)])
        assert completion.output_tokens == 2
        assert completion.text.endswith(" b")


def test_a_stream_may_end_without_done():
    completion, _ = ask(lambda body: stream_of(["a"])[:-1])
    assert completion.text == "a"


def test_what_comes_after_done_is_not_waited_for():
    completion, _ = ask(lambda body: [*stream_of(["a"]), 60], timeout_s=30)
    assert completion.total_s < 20


def test_key_and_path_are_passed_on():
    _, server = ask(lambda body: stream_of(["a"]), api_key="sk-1", path="/gate/v1/")
    assert server.heads[0].startswith("POST /gate/v1/completions ")
    assert "Authorization: Bearer sk-1\r\n" in server.heads[0]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (lambda body: refusal(429, "Too busy.\nLater."), r"^HTTP 429: Too busy\. Later\.$"),
        (lambda body: b"HTTP/1.1 502 Bad\r\nContent-Length: 4\r\n\r\noops", "^HTTP 502: oops$"),
        (
            lambda body: [b'data: {"error": {"message": "The engine has gone."}}\n\n', DONE],
            "with an error: The engine has gone",
        ),
        (lambda body: [EVENT % b"a", -1], "broke off"),
        (lambda body: [b"data: {nonsense\n\n", DONE], "not what OpenAI sends"),
        (lambda body: b"SMTP ready\r\n\r\n", "not HTTP"),
        (lambda body: b"", "without an answer"),
        (lambda body: [b"data: " + b"x" * (1 << 21), DONE], "more than 1048576 bytes"),
    ],
)
def test_failures_are_one_sentence(script, words):
    with pytest.raises(RequestFailed, match=words):
        ask(script)


def test_patience_ends():
    with pytest.raises(RequestFailed, match=r"within 0\.1 s"):
        ask(lambda body: [EVENT % b"a", 30, DONE], timeout_s=0.1)


def test_nobody_there():
    with pytest.raises(Unreachable, match=r"^127\.0\.0\.1:1 cannot be reached: .*refused"):
        asyncio.run(complete(Server.at("http://127.0.0.1:1"), "m", "p", 1))


@pytest.mark.parametrize(("models", "name"), [(["a", "b"], "a"), ([], "default")])
def test_the_first_model(models, name):
    async def go():
        async with SseServer(stream_of, models=models) as server:
            return await first_model(Server.at(server.url))

    assert asyncio.run(go()) == name


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:99999", "http://a\r\nX: y", "http://a b"])
def test_addresses_are_checked(url):
    with pytest.raises(ConfigError, match="is not an address"):
        Server.at(url)


def test_addresses_are_understood():
    assert Server.at("https://h/v1").path == ""
    assert Server.at("https://h").port == 443
    assert Server.at("http://[::1]:8000/x/").address == "[::1]:8000"
