"""Routes that explain: who may ask, under which names, and what comes back. The access matrix is in test_api_access."""

import pytest

from branchline.base.config import ServerConfig
from tests.support.asgi import run, serving

USERS = ServerConfig(host="0.0.0.0", api_keys=("one", "two"), admin_keys=("boss",))


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("path", "what"), [("/v1/requests", "requests"), ("/v1/scheduler", "scheduler"), ("/v1/cache/tree", "tree")]
)
def test_answers_are_passed_on_as_they_are(path, what):
    async def go():
        async with serving() as (http, fake):
            fake.told[what, ""] = b'{"some":"json"}'
            response = await http.get(path)
            return response, fake.asked

    response, asked = run(go())
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {"some": "json"}
    assert [(ask.what, ask.tenant) for ask in asked] == [(what, None)]


def test_lists_are_closed_as_soon_as_there_is_a_key():
    async def go(config, headers):
        async with serving(config=config) as (http, fake):
            fake.told["requests", ""] = b"{}"
            return (await http.get("/v1/requests", headers=headers)).status_code

    assert run(go(ServerConfig(), {})) == 200
    assert run(go(ServerConfig(api_keys=("one",)), bearer("one"))) == 403
    assert run(go(ServerConfig(admin_keys=("boss",)), {})) == 401
    assert run(go(ServerConfig(admin_keys=("boss",)), bearer("boss"))) == 200
    assert run(go(ServerConfig(host="0.0.0.0", allow_unauthenticated=True), {})) == 403


def test_one_request_and_an_unknown_one():
    async def go():
        async with serving() as (http, fake):
            fake.told["request", "cmpl-1"] = b'{"id":"cmpl-1"}'
            return [await http.get(f"/v1/requests/{name}") for name in ("cmpl-1", "cmpl-2", "a%20b", "x" * 200)]

    known, *unknown = run(go())
    assert known.json() == {"id": "cmpl-1"}
    assert [response.status_code for response in unknown] == [404, 404, 404]
    assert unknown[0].json()["error"]["code"] == "request_not_found"


def test_a_call_is_found_by_its_x_request_id_while_it_waits():
    async def go():
        async with serving() as (http, fake):
            response = await http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine"})
            call_id = response.json()["id"]
            fake.told["request", call_id] = b"{}"
            found = await http.get("/v1/requests/mine")
            return call_id, found, fake.asked

    call_id, found, asked = run(go())
    assert found.status_code == 200
    assert [ask.request_id for ask in asked] == [call_id]


def test_with_keys_a_user_asks_as_a_tenant_and_an_admin_about_everybody():
    async def go():
        async with serving(config=USERS) as (http, fake):
            for key in ("one", "two"):
                await http.post("/v1/completions", json={"prompt": "a"}, headers=bearer(key) | {"x-request-id": "same"})
            for key in ("one", "two", "boss"):
                await http.get("/v1/requests/same", headers=bearer(key))
            ids = [request.request_id.removesuffix("-0") for request in fake.requests]
            return ids, [request.tenant for request in fake.requests], fake.asked

    ids, tenants, asked = run(go())
    assert [(ask.request_id, ask.tenant) for ask in asked] == [(ids[0], tenants[0]), (ids[1], tenants[1]), ("same", None)]


def test_an_admin_key_alone_makes_users_nobody():
    """Without a key for users everybody is the tenant of no name, and sees no ids of others."""

    async def go():
        async with serving(config=ServerConfig(admin_keys=("boss",))) as (http, fake):
            await http.get("/v1/requests/x")
            return fake.asked

    assert run(go())[0].tenant == ""


def test_a_dead_engine_is_a_503():
    async def go():
        async with serving() as (http, fake):
            fake.client.fail_all("gone")
            return await http.get("/v1/scheduler")

    assert run(go()).status_code == 503


def test_metrics_show_causes_and_misses():
    async def go():
        async with serving() as (http, fake):
            fake.beat(waiting=3, waiting_causes={"kv_short": 1, "behind": 2}, missed_tokens={"evicted": 40})
            return (await http.get("/metrics")).text

    text = run(go())
    assert 'branchline_waiting_requests_by_cause{cause="behind"} 2.0' in text
    assert 'branchline_waiting_requests_by_cause{cause="row_cap"} 0.0' in text
    assert 'branchline_missed_prompt_tokens_total{reason="evicted"} 40.0' in text
