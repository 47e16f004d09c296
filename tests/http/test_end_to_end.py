"""The whole server on the default model: real processes, real sockets, the real client library."""

import asyncio
import json
import random

import httpx
import openai
import pytest

from tests.support.server import Server

WORDS = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state", "family",
    "student", "group", "country", "problem",
]  # fmt: skip


def words(count: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


@pytest.fixture(scope="module")
def server(default_checkpoint):
    with Server("--pages", "1024", "--max-running", "16") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_capital_of_france(client):
    answer = client.completions.create(model="default", prompt="The capital of France is", max_tokens=8, temperature=0)
    assert "Paris" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)


def test_a_stream_says_the_same_as_a_whole_answer(client):
    ask = {
        "model": "default",
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_logprobs_have_one_row_per_token(client):
    chat = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    rows = chat.choices[0].logprobs.content
    assert len(rows) == chat.usage.completion_tokens
    for row in rows:
        assert row.logprob == pytest.approx(row.top_logprobs[0].logprob)
        assert len(row.top_logprobs) == 3
        assert row.logprob <= 0
    text = client.completions.create(model="default", prompt="One two three", max_tokens=4, temperature=0, logprobs=2)
    logprobs = text.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 4
    assert "".join(logprobs.tokens) == text.choices[0].text


def test_n_choices_differ_unless_seeded_alike(client):
    answer = client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "Tell me a story."}], max_tokens=10, temperature=1, n=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    seeded = [
        client.completions.create(model="default", prompt="Once", max_tokens=10, temperature=1, seed=5).choices[0].text
        for _ in range(2)
    ]
    assert seeded[0] == seeded[1]


def test_the_async_client(server):
    async def ask():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            whole, stream = await asyncio.gather(
                client.completions.create(model="default", prompt="The sky is", max_tokens=8, temperature=0),
                client.completions.create(model="default", prompt="The sky is", max_tokens=8, temperature=0, stream=True),
            )
            return whole.choices[0].text, "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    whole, streamed = asyncio.run(ask())
    assert whole == streamed != ""


def test_stop_strings_end_the_text_before_them(client):
    ask = {"model": "default", "prompt": "1, 2, 3, 4, 5,", "max_tokens": 20, "temperature": 0}
    free = client.completions.create(**ask).choices[0].text
    stop = free[4:8]
    stopped = client.completions.create(**ask, stop=[stop]).choices[0]
    assert stopped.text == free[: free.index(stop)]
    assert stopped.finish_reason == "stop"


def test_prompts_in_all_four_forms(server):
    tokens = server.post("/tokenize", prompt="The sky is").json()["tokens"]
    asked = [
        server.post("/v1/completions", prompt=prompt, max_tokens=4, temperature=0).json()["choices"]
        for prompt in ("The sky is", ["The sky is", "The sky is"], tokens, [tokens, tokens])
    ]
    texts = {choice["text"] for choices in asked for choice in choices}
    assert len(texts) == 1
    assert [len(choices) for choices in asked] == [1, 2, 1, 2]


def test_evaluation_harnesses_score_prompts(server):
    """What lm-eval sends: batches of token ids, echo, logprobs, one token."""
    first = server.post("/tokenize", prompt="The capital of France is Paris").json()["tokens"]
    second = server.post("/tokenize", prompt="Two and two is").json()["tokens"]
    answer = server.post(
        "/v1/completions", prompt=[first, second], max_tokens=1, temperature=0, echo=True, logprobs=1, seed=1
    ).json()
    for choice, prompt in zip(sorted(answer["choices"], key=lambda c: c["index"]), (first, second), strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(prompt) + 1
        assert logprobs["token_logprobs"][0] is None
        assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
        assert logprobs["text_offset"][0] == 0
        assert "".join(logprobs["tokens"]) == choice["text"]
    again = server.post("/v1/completions", prompt=[first], max_tokens=1, temperature=0, echo=True, logprobs=1).json()
    assert again["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(
        answer["choices"][0]["logprobs"]["token_logprobs"], abs=1e-4
    )


def test_the_second_of_two_requests_hits_what_they_share(server):
    shared = server.post("/tokenize", prompt=words(520, seed=3)).json()["tokens"][:500]
    cached = [
        server.post("/v1/completions", prompt=[*shared, *tail], max_tokens=2, temperature=0).json()["usage"]
        for tail in ([11, 12, 13], [21, 22, 23])
    ]
    assert cached[1]["prompt_tokens_details"]["cached_tokens"] >= 484


def test_a_prompt_longer_than_the_context_is_refused_in_the_usual_words(server, client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="default", prompt=[5] * 9000, max_tokens=4)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 8192 tokens" in caught.value.message
    nearly = server.post("/v1/completions", prompt=[5] * 8192, max_tokens=4)
    assert nearly.status_code == 400


def test_detokenize_is_the_inverse_of_tokenize(server):
    text = "Grüße, 世界! 🙂 def f(x):\n\treturn x"
    tokens = server.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    assert server.post("/detokenize", tokens=tokens).json()["prompt"] == text


def test_sixty_four_at_once_with_random_aborts_leave_nothing_behind(server):
    async def one(client: httpx.AsyncClient, index: int) -> str:
        rng = random.Random(index)
        body = {
            "prompt": words(60, seed=index % 4) + words(rng.randint(1, 80), seed=index), "max_tokens": rng.randint(4, 24),
            "temperature": 0, "ignore_eos": True, "stream": rng.random() < 0.7, "n": rng.choice([1, 1, 2]),
        }  # fmt: skip
        patience = rng.choice([None, None, 0.05, 0.5, 2.0])
        try:
            async with asyncio.timeout(patience):
                response = await client.post("/v1/completions", json=body)
                response.raise_for_status()
                if not body["stream"]:
                    choices = json.loads(response.text)["choices"]
                    assert all(choice["finish_reason"] == "length" for choice in choices)
                return "done"
        except TimeoutError:
            return "aborted"

    async def everyone():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(one(client, index) for index in range(64)))

    outcomes = asyncio.run(everyone())
    assert outcomes.count("done") > 10
    assert outcomes.count("aborted") > 10
    at_rest(server)
    assert server.admin("/flush_cache").status_code == 200
    metrics = server.wait_for(lambda m: m['branchline_pages{state="tree"}'] == 0)  # the next heartbeat tells
    assert metrics['branchline_pages{state="free"}'] == metrics["branchline_pages_capacity"] == 1024


def at_rest(server) -> dict[str, float]:
    """Every page free or in the tree, no locks, no rows, empty maps in every process."""
    metrics = server.wait_for(
        lambda m: (
            m["branchline_running_requests"] + m["branchline_waiting_requests"] == 0
            and sum(value for name, value in m.items() if name.startswith("branchline_live_requests")) == 0
        )
    )
    assert metrics["branchline_locked_nodes"] == metrics["branchline_slots_used"] == 0
    free, tree = metrics['branchline_pages{state="free"}'], metrics['branchline_pages{state="tree"}']
    assert free + tree == metrics["branchline_pages_capacity"]
    assert metrics["branchline_evictable_pages"] == tree
    return metrics


def test_pause_holds_and_continue_goes_on(server):
    assert server.admin("/pause_generation").status_code == 200
    with httpx.Client(base_url=server.url, timeout=1.0) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2})
    assert httpx.get(server.url + "/ready").json()["paused"]
    assert server.admin("/continue_generation").status_code == 200
    assert server.post("/v1/completions", prompt="Hello", max_tokens=2).status_code == 200
