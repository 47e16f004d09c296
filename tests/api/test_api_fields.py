"""Every field with every kind of nonsense: 200 or 400, never anything else, and error bodies that tell nothing."""

import json
import re

import pytest

from tests.support.asgi import run, serving

NUMBERS = [
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "n", "seed", "priority", "logprobs", "best_of", "top_logprobs", "max_completion_tokens",
]  # fmt: skip
OTHERS = [
    "prompt", "messages", "model", "stop", "stop_token_ids", "logit_bias", "stream", "stream_options", "echo", "suffix",
    "user",
    "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens", "response_format", "tools",
    "tool_choice", "cache_salt", "prompt_cache_key", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "metadata", "store", "functions", "guided_json", "tokens", "x" * 300, "\u0000", "__class__",
]  # fmt: skip
RAW = [
    "null", "true", "false", '"5"', '""', "-1", "0", "1", "0.5", "-0.0", "1e-9", "1e308", "2147483648",
    "9223372036854775807", "9223372036854775808", "1" + "0" * 400, "1e400", "-1e400", "NaN", "Infinity",
    "[]", "{}", "[1]", '["a"]', '{"a":1}', '[null]',
    '[[1]]', '{"1":1}', '"\\ud800"', '"\\u0000"', '"' + "A" * 5000 + '"', "[" * 200 + "]" * 200,
]  # fmt: skip
ROUTES = {
    "/v1/completions": {"prompt": "a b"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"prompt": "a b"},
    "/detokenize": {"tokens": [1, 2]},
}
LEAKS = re.compile(
    r"/home|/root|/usr|/tmp|site-packages|Traceback|0x[0-9a-f]{6}|<class|object at|\.py\b|branchline\.|msgspec"
)


def check_error(text):
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] is None or isinstance(error["code"], str)
    assert not LEAKS.search(text), text
    assert len(text) < 700
    assert "A" * 65 not in text


def with_field(base, field, raw):
    fields = [f"{json.dumps(key)}:{json.dumps(value)}" for key, value in base.items() if key != field]
    return "{" + ",".join([*fields, f"{json.dumps(field)}:{raw}"]) + "}"


@pytest.mark.parametrize("path", ROUTES)
def test_every_field(path):
    async def go():
        async with serving() as (http, fake):
            seen = set()
            for field in NUMBERS + OTHERS:
                for raw in RAW:
                    response = await http.post(path, content=with_field(ROUTES[path], field, raw))
                    seen.add(response.status_code)
                    allowed = (200, 404) if field == "model" else (200,)
                    if response.status_code not in allowed:
                        assert response.status_code == 400, (field, raw, response.text)
                        check_error(response.text)
                await fake.until(lambda: fake.is_idle)
            assert {200, 400} <= seen

    run(go())


BODIES = [
    b"", b"{", b"[]", b"null", b"\xff\xfe", b"not json", b'{"prompt":"a"}garbage', b"\x00" * 100,
    b'{"prompt":"a","prompt":"b"}',
    b'{"prompt":' + b"[" * 10_000, b'{"prompt":"\xed\xa0\x80"}', b"a=b&c=d", b'{"prompt":"' + b"A" * 1000,
]  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:16]))
def test_raw_bodies(path, body):
    async def go():
        async with serving() as (http, _):
            return await http.post(path, content=body)

    response = run(go())
    assert response.status_code == 400
    check_error(response.text)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json"}, 200),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "Application/JSON"}, 200),
        ({}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-encoding": "gzip"}, 415),
        ({"content-encoding": "identity"}, 200),
    ],
)
def test_content_headers(headers, status):
    async def go():
        async with serving() as (http, _):
            return await http.post("/v1/completions", content=b'{"prompt":"a"}', headers=headers)

    response = run(go())
    assert response.status_code == status
    if status != 200:
        check_error(response.text)


def body_of(size):
    start, end = b'{"prompt":"', b'"}'
    return start + b"a" * (size - len(start) - len(end)) + end


@pytest.mark.parametrize(("size", "status"), [(999, 200), (1000, 200), (1001, 413)])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_size_of_the_body(size, status, is_chunked):
    from branchline.base.config import ServerConfig

    async def pieces():
        body = body_of(size)
        for start in range(0, size, 100):
            yield body[start : start + 100]

    async def go():
        async with serving(config=ServerConfig(max_body_bytes=1000)) as (http, _):
            return await http.post("/v1/completions", content=pieces() if is_chunked else body_of(size))

    response = run(go())
    assert response.status_code == status
    if status == 413:
        check_error(response.text)
        assert response.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("org/tiny-model", 200), ("tiny-model", 200), ("default", 200), (None, 200), ("TINY-MODEL", 404), ("", 404),
        ("../../etc/passwd", 404), ("a\u0000b", 404), ("gpt-4", 404), ("tiny-model/..", 404),
    ],
)  # fmt: skip
def test_model_names(name, status):
    async def go():
        async with serving() as (http, _):
            return await http.post("/v1/completions", json={"prompt": "a", "model": name})

    response = run(go())
    assert response.status_code == status
    if status == 404:
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(("sent", "is_kept"), [("abc-1", True), ("x" * 129, False), ("a b", False), ('"><script>', False)])
def test_request_ids(sent, is_kept):
    async def go():
        async with serving() as (http, _):
            return await http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": sent})

    assert (run(go()).headers["x-request-id"] == sent) is is_kept
