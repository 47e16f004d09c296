"""``/v1/chat/completions``: messages, limits, log probabilities, streams."""

import pytest

from tests.support.asgi import events, run, serving
from tests.support.scripted_text import WORDS

TEXT = "".join(WORDS)
HELLO = [{"role": "user", "content": "hi"}]


def post(body):
    async def go():
        async with serving() as (http, fake):
            return await http.post("/v1/chat/completions", json=body), fake

    return run(go())


def test_whole_answer():
    response, fake = post({"messages": HELLO})
    body = response.json()
    assert response.status_code == 200
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    request = fake.requests[0]
    assert request.param == "messages"
    assert request.sampling.max_tokens is None
    assert request.prompt.add_generation_prompt


def test_messages_as_the_template_sees_them():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": tru'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1", "extra": 1},
    ]
    response, fake = post({"messages": messages})
    assert response.status_code == 200
    assert fake.requests[0].prompt.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one\ntwo", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    )


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x"}] * 4097, "messages"),
    ],
)
def test_messages_that_are_none(messages, param):
    response, fake = post({"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not fake.requests


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_refusals_name_the_field(body, param):
    response, fake = post({"messages": HELLO} | body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not fake.requests


def test_harmless_forms_of_unsupported_fields():
    body = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "functions": None, "store": True}
    response, _ = post({"messages": HELLO} | body)
    assert response.status_code == 200


def test_newer_limit_wins():
    _, fake = post({"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 2})
    assert fake.requests[0].sampling.max_tokens == 2


def test_continuing_the_last_message():
    _, fake = post({"messages": HELLO, "continue_final_message": True, "chat_template_kwargs": {"thinking": False}})
    prompt = fake.requests[0].prompt
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)
    assert prompt.template_arguments == {"thinking": False}


def test_salt_from_either_name():
    _, fake = post({"messages": HELLO, "prompt_cache_key": "k"})
    assert fake.requests[0].salt == "k"


def test_logprobs():
    response, fake = post({"messages": HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 2})
    assert fake.requests[0].sampling.logprobs == 2
    first, second = response.json()["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("Hello", -0.5, list(b"Hello"))
    assert [entry["token"] for entry in first["top_logprobs"]] == ["Hello", "alt1"]
    assert bytes(second["bytes"]).decode() == " wörld"


def test_stream_begins_with_the_role_and_ends_once_per_choice():
    response, _ = post({"messages": HELLO, "n": 2, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, usage, done = events(response.text)
    assert done == "[DONE]"
    assert usage["usage"]["completion_tokens"] == 10
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index in range(2):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": "Hello"}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert "".join(choice["delta"].get("content", "") for choice in mine) == TEXT
        assert [choice["finish_reason"] for choice in mine] == [None] * 5 + ["stop"]
        assert mine[-1]["delta"] == {}


def test_stream_of_nothing_still_has_a_role():
    from branchline.base.finish import FinishReason
    from branchline.core.result import Usage
    from branchline.wire.messages import Ended, Started

    async def go():
        async with serving() as (http, fake):
            fake.script = lambda request: [
                Started(request.request_id, 3),
                Ended(request_id=request.request_id, reason=FinishReason.STOP, usage=Usage(3, 1, 0), token_count=1, stop=2),
            ]
            return await http.post("/v1/chat/completions", json={"messages": HELLO, "stream": True})

    first, last, _ = events(run(go()).text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == ("stop", 2)
