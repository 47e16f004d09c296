"""Models, tokens, health, admin, metrics, version, OpenAPI."""

import pytest

from branchline.api.routes import TABLE
from branchline.base.clock import NS_PER_S, ManualClock
from branchline.base.config import ServerConfig
from branchline.base.version import __version__
from tests.support.asgi import run, serving
from tests.support.scripted_text import ScriptedText

ADMIN = {"authorization": "Bearer admin"}
WITH_ADMIN = ServerConfig(admin_keys=("admin",))


def request(method, path, *, fake_setup=None, config=None, idle=True, **arguments):
    async def go():
        async with serving(config=config, idle=idle) as (http, fake):
            if fake_setup:
                fake_setup(fake)
            return await http.request(method, path, **arguments), fake

    return run(go())


def test_models():
    response, _ = request("GET", "/v1/models")
    (model,) = response.json()["data"]
    assert response.json()["object"] == "list"
    assert (model["id"], model["object"], model["owned_by"], model["max_model_len"]) == (
        "org/tiny-model", "model", "branchline", 512,
    )  # fmt: skip
    assert isinstance(model["created"], int)
    for name in ("org/tiny-model", "tiny-model", "default"):
        assert request("GET", f"/v1/models/{name}")[0].json()["id"] == "org/tiny-model"
    missing, _ = request("GET", "/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_served_name():
    response, _ = request("GET", "/v1/models", config=ServerConfig(served_model_name="mine"))
    assert response.json()["data"][0]["id"] == "mine"


def test_tokenize_and_detokenize():
    response, _ = request("POST", "/tokenize", json={"prompt": "a b c"})
    assert response.json() == {"count": 3, "max_model_len": 512, "tokens": [10, 11, 12], "token_strs": None}
    body = {"messages": [{"role": "user", "content": "x"}], "return_token_strs": True}
    response, fake = request("POST", "/tokenize", json=body)
    assert response.json()["token_strs"] == ["t20"]
    assert fake.received[-1].add_special_tokens is False
    response, _ = request("POST", "/detokenize", json={"tokens": [1, 2]})
    assert response.json() == {"prompt": "1 2"}


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, {"messages": []}])
def test_tokenize_needs_one_of_two(body):
    assert request("POST", "/tokenize", json=body)[0].status_code == 400


def test_detokenize_knows_the_vocabulary():
    assert request("POST", "/detokenize", json={"tokens": [1000]})[0].status_code == 400


def test_health_is_about_the_process():
    response, fake = request("GET", "/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert fake.received == []


def test_version():
    assert request("GET", "/version")[0].json() == {"version": __version__}


def readiness(*, beats=None, wait_s=0.0, dead=False, draining=False, step_timeout_s=10.0):
    async def go():
        fake = ScriptedText(ManualClock(1000 * NS_PER_S))
        async with serving(fake=fake, step_timeout_s=step_timeout_s) as (http, _):
            if beats is not None:
                fake.beat(**beats)
            fake.clock.advance(int(wait_s * NS_PER_S))
            if dead:
                fake.client.fail_all("gone")
            http.app.state.service.is_draining = draining
            response = await http.get("/ready")
            assert fake.received == []  # a probe enqueues nothing
            return response.status_code, response.json()["reason"]

    return run(go())


def test_ready():
    assert readiness() == (503, "starting")
    assert readiness(beats={"steps": 5, "running": 3}) == (200, "ready")
    assert readiness(beats={}, wait_s=2.9) == (200, "ready")
    assert readiness(beats={}, wait_s=3.1) == (503, "no_heartbeat")
    assert readiness(beats={}, dead=True) == (503, "engine_gone")
    assert readiness(beats={}, draining=True) == (503, "draining")
    assert readiness(beats={"draining": True}) == (503, "draining")


def test_a_long_step_is_fine_until_its_limit():
    assert readiness(beats={"step_started_ns": 991 * NS_PER_S}) == (200, "ready")
    assert readiness(beats={"step_started_ns": 989 * NS_PER_S}) == (503, "step_stuck")
    assert readiness(beats={"step_started_ns": 991 * NS_PER_S}, wait_s=2) == (503, "step_stuck")


@pytest.mark.parametrize(
    ("path", "verb"),
    [
        ("/flush_cache", "flush"), ("/pause_generation", "pause"), ("/continue_generation", "continue"), ("/drain", "drain"),
        ("/abort_all", "abort_all"),
    ],
)  # fmt: skip
def test_admin_verbs(path, verb):
    response, fake = request("POST", path, config=WITH_ADMIN, headers=ADMIN)
    assert (response.status_code, response.json()["done"]) == (200, True)
    assert [message.verb for message in fake.received] == [verb]


def test_a_verb_that_cannot_be_done():
    def busy(fake):
        fake.control_done = False

    response, _ = request("POST", "/flush_cache", config=WITH_ADMIN, headers=ADMIN, fake_setup=busy)
    assert (response.status_code, response.json()["error"]["message"]) == (409, "busy")


def test_a_drained_server_refuses_generation_and_nothing_else():
    async def go():
        async with serving(config=WITH_ADMIN) as (http, fake):
            fake.beat()
            await http.post("/drain", headers=ADMIN)
            completion = await http.post("/v1/completions", json={"prompt": "a"})
            return completion, await http.get("/ready"), await http.get("/v1/models")

    completion, ready, models = run(go())
    assert (completion.status_code, completion.json()["error"]["code"]) == (503, "draining")
    assert completion.headers["retry-after"]
    assert ready.status_code == 503
    assert models.status_code == 200


def test_openapi_says_what_the_table_says():
    document = request("GET", "/openapi.json")[0].json()
    operations = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert operations == {(endpoint.method, endpoint.path.replace(":path", "")) for endpoint in TABLE}
    body = document["components"]["schemas"]["CompletionBody"]
    assert "prompt" in body["required"]
    assert body["properties"]["n"]["anyOf"][0]["maximum"] == 64
