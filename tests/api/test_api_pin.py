"""``POST /v1/cache/pin``, and the request fields that the scheduler's policies read."""

import pytest

from branchline.base.config import ServerConfig
from branchline.base.finish import FinishReason
from branchline.core.result import Usage
from branchline.wire.messages import ChatPrompt, Ended, Generate, Pin, TextPrompt, TokenPrompt
from tests.support.asgi import run, serving

PATH = "/v1/cache/pin"
ADMIN = {"authorization": "Bearer admin"}
WITH_ADMIN = ServerConfig(admin_keys=("admin",))


def post(path, body, *, config=WITH_ADMIN, headers=ADMIN, done=True, script=None):
    async def go():
        async with serving(config=config) as (http, fake):
            fake.control_done = done
            fake.script = script or fake.script
            return await http.post(path, json=body, headers=headers), fake

    return run(go())


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"prompt": "a b"}, TextPrompt("a b")),
        ({"prompt": [3, 4]}, TokenPrompt((3, 4))),
        (
            {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False},
            ChatPrompt(messages=({"role": "user", "content": "hi"},), add_generation_prompt=False),
        ),
    ],
)
def test_a_prompt_is_pinned_for_a_while(fields, prompt):
    response, fake = post(PATH, {"seconds": 60, "tenant": "t", "cache_salt": "s", **fields})
    assert (response.status_code, response.json()) == (200, {"done": True, "message": "as you wish"})
    (pin,) = fake.received
    assert isinstance(pin, Pin)
    assert (pin.prompt, pin.seconds, pin.tenant, pin.salt) == (prompt, 60.0, "t", "s")


def test_what_cannot_be_pinned_is_a_conflict():
    response, _ = post(PATH, {"seconds": 60, "prompt": "a"}, done=False)
    assert (response.status_code, response.json()["error"]["message"]) == (409, "as you wish")


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a"}, {"seconds": 5}, {"seconds": -1, "prompt": "a"}, {"seconds": 10**9, "prompt": "a"},
        {"seconds": 5, "prompt": "a", "messages": [{"role": "user", "content": "hi"}]}, {"seconds": 5, "prompt": []},
    ],
)  # fmt: skip
def test_bodies_that_make_no_sense(body):
    response, fake = post(PATH, body)
    assert response.status_code == 400
    assert fake.received == []


@pytest.mark.parametrize(("config", "headers", "status"), [(None, {}, 403), (WITH_ADMIN, {}, 401)])
def test_only_admins_may_pin(config, headers, status):
    response, _ = post(PATH, {"seconds": 5, "prompt": "a"}, config=config, headers=headers)
    assert response.status_code == status


def requests(fake):
    return [message for message in fake.received if isinstance(message, Generate)]


def test_user_and_timeout_travel_with_the_request():
    _, fake = post("/v1/completions", {"prompt": "a", "user": "ann", "timeout": 2.5})
    (request,) = requests(fake)
    assert (request.user, request.timeout_s, request.tenant) == ("ann", 2.5, "")
    _, fake = post("/v1/completions", {"prompt": "a"})
    (request,) = requests(fake)
    assert (request.user, request.timeout_s) == ("", None)


@pytest.mark.parametrize("field", [{"timeout": 0}, {"timeout": -1}, {"timeout": 1e9}, {"user": "x" * 300}, {"user": 5}])
def test_fields_out_of_range(field):
    response, _ = post("/v1/completions", {"prompt": "a", **field})
    assert response.status_code == 400


@pytest.mark.parametrize(("estimate", "header"), [(7, "7"), (0, "1")])
def test_a_full_queue_says_when_to_come_back(estimate, header):
    def script(request):
        yield Ended(
            request_id=request.request_id, reason=FinishReason.REJECTED, usage=Usage(), status=429, retry_after_s=estimate
        )

    response, _ = post("/v1/completions", {"prompt": "a"}, script=script)
    assert (response.status_code, response.headers["retry-after"]) == (429, header)
