"""``/v1/completions``: prompts, choices, echo, log probabilities, streams."""

import pytest

from branchline.wire.messages import TextPrompt, TokenPrompt
from tests.support.asgi import events, run, serving
from tests.support.scripted_text import WORDS

TEXT = "".join(WORDS)


def post(body, path="/v1/completions"):
    async def go():
        async with serving() as (http, fake):
            response = await http.post(path, json=body)
            return response, fake

    return run(go())


def test_whole_answer():
    response, fake = post({"prompt": "a b c", "max_tokens": 50})
    body = response.json()
    assert response.status_code == 200
    assert body["id"].startswith("cmpl-")
    assert len(body["id"]) == 37
    assert (body["object"], body["model"]) == ("text_completion", "org/tiny-model")
    assert body["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop", "stop_reason": None}]
    assert body["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
    assert fake.requests[0].group == ""
    assert response.headers["x-request-id"]


def test_sixteen_tokens_by_default():
    _, fake = post({"prompt": "a"})
    assert fake.requests[0].sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a b", [TextPrompt("a b")]),
        (["a", "b c"], [TextPrompt("a"), TextPrompt("b c")]),
        ([1, 2, 3], [TokenPrompt((1, 2, 3))]),
        ([[1, 2], [3]], [TokenPrompt((1, 2)), TokenPrompt((3,))]),
    ],
)
def test_shapes_of_prompts(prompt, expected):
    response, fake = post({"prompt": prompt})
    assert response.status_code == 200
    assert [request.prompt for request in fake.requests] == expected
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(len(expected)))


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], [1, "a"], ["a", [1]], [[1], 2], 5, {}, True, [True], [-1], [2**31], [[1.5]]]
)
def test_prompts_that_are_none(prompt):
    response, fake = post({"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["param"].startswith("prompt")
    assert not fake.requests


def test_choices_are_prompts_times_n():
    response, fake = post({"prompt": ["a b", "c"], "n": 3, "max_tokens": 2, "seed": 7})
    body = response.json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 12
    assert [request.sampling.seed for request in fake.requests] == [7, 8, 9, 7, 8, 9]
    assert {request.group for request in fake.requests} == {body["id"]}
    assert len({request.request_id for request in fake.requests}) == 6


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 65}, "n"),
        ({"n": 0}, "n"),
        ({"prompt": ["a"] * 65, "n": 4}, "n"),
        ({"n": 100_000_000}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": "text"}, "response_format"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"logit_bias": {"1000": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1, "01": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop_token_ids": [1000]}, "stop_token_ids"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"model": 5}, "model"),
    ],
)
def test_refusals_name_the_field(body, param):
    response, fake = post({"prompt": "a"} | body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not fake.requests


def test_fields_reach_the_sampler():
    body = {
        "prompt": "a", "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {"5": -100, "6": 2.5},
        "seed": 3, "stop": ["x", "y"], "stop_token_ids": [8], "ignore_eos": True, "cache_salt": "s", "priority": -3,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "add_special_tokens": False, "unknown": [1, {}],
        "best_of": 1, "suffix": None, "user": "u",
    }  # fmt: skip
    response, fake = post(body)
    assert response.status_code == 200
    request = fake.requests[0]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature, sampling.top_p) == (9, 2, 0.5, 0.9)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (4, 0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.seed) == (0.2, 0.3, 3)
    assert sampling.logit_bias == ((5, -100.0), (6, 2.5))
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (("x", "y"), (8,), True)
    assert (sampling.logprobs, sampling.prompt_logprobs) == (None, None)
    assert (request.salt, request.priority, request.include_stop) == ("s", -3, True)
    assert (request.skip_special_tokens, request.add_special_tokens) == (False, False)


def test_null_is_the_default():
    _, plain = post({"prompt": "a"})
    fields = (
        "temperature",
        "top_p",
        "n",
        "stop",
        "logprobs",
        "seed",
        "stream",
        "logit_bias",
        "stream_options",
        "echo",
        "model",
    )
    _, nulls = post({"prompt": "a"} | dict.fromkeys(fields))
    assert plain.requests[0].sampling == nulls.requests[0].sampling


def test_echo():
    response, _ = post({"prompt": "a b ", "echo": True, "max_tokens": 1})
    assert response.json()["choices"][0]["text"] == "a b Hello"


def test_logprobs_of_the_output():
    response, _ = post({"prompt": "a b", "max_tokens": 3, "logprobs": 2})
    logprobs = response.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Hello", " wörld", " and"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] == {"Hello": -0.5, "alt1": -1.5}
    assert logprobs["text_offset"] == [0, 5, 11]


def test_no_alternatives_is_not_no_logprobs():
    response, fake = post({"prompt": "a b", "max_tokens": 1, "logprobs": 0})
    assert fake.requests[0].sampling.logprobs == 0
    assert response.json()["choices"][0]["logprobs"]["top_logprobs"] == [{"Hello": -0.5}]


def test_echo_with_logprobs_covers_the_prompt():
    """What lm-eval sends and reads."""
    response, fake = post(
        {"prompt": [[7, 8], [9]], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1}
    )
    first, second = response.json()["choices"]
    assert fake.requests[0].sampling.prompt_logprobs == 1
    assert first["text"] == "<7><8>Hello"
    assert first["logprobs"]["tokens"] == ["<7>", "<8>", "Hello"]
    assert first["logprobs"]["token_logprobs"] == [None, -1.0, -0.5]
    assert first["logprobs"]["top_logprobs"][0] is None
    assert first["logprobs"]["top_logprobs"][2] == {"Hello": -0.5}
    assert first["logprobs"]["text_offset"] == [0, 3, 6]
    assert len(second["logprobs"]["tokens"]) == 2


def test_stream_joins_to_the_whole():
    response, _ = post({"prompt": "a", "stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(response.text)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in [*chunks, usage]}) == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5


def test_stream_without_usage():
    response, _ = post({"prompt": "a", "stream": True})
    chunks = events(response.text)[:-1]
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_usage_on_every_chunk():
    response, _ = post({"prompt": "a b", "stream": True, "stream_options": {"continuous_usage_stats": True}})
    chunks = events(response.text)[:-1]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 5]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {2}


def test_every_choice_of_a_stream_ends_once():
    response, _ = post({"prompt": ["a", "b"], "n": 2, "stream": True, "max_tokens": 2})
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    texts, ends = {}, {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        if choice["finish_reason"]:
            ends[choice["index"]] = ends.get(choice["index"], 0) + 1
    assert texts == dict.fromkeys(range(4), "Hello wörld")
    assert ends == dict.fromkeys(range(4), 1)


def test_stream_with_echo_and_logprobs():
    response, _ = post({"prompt": [5, 6], "echo": True, "logprobs": 1, "stream": True, "max_tokens": 2})
    chunks = events(response.text)[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "<5><6>Hello wörld"
    rows = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [token for part in rows for token in part["tokens"]] == ["<5>", "<6>", "Hello", " wörld"]
    assert [offset for part in rows for offset in part["text_offset"]] == [0, 3, 6, 11]
