"""Keys, roles, hosts and the table of routes."""

import pytest
from starlette.routing import Route

from branchline.api.app import Gate, create_app
from branchline.api.auth import Access, check_exposure
from branchline.api.routes import TABLE, pair
from branchline.base.config import ServerConfig
from branchline.base.errors import ConfigError, InvariantBroken
from tests.support.asgi import run, serving
from tests.support.scripted_text import FACTS, ScriptedText

OPEN_WORLD = {"host": "0.0.0.0", "api_keys": ("user-key",), "admin_keys": ("admin-key",)}


def path_of(endpoint):
    return endpoint.path.replace("{name:path}", "default")


def call(endpoint, *, config=None, headers=(), host=None):
    async def go():
        async with serving(config=config) as (http, fake):
            fake.beat()
            content = b"{}" if endpoint.method == "POST" else None
            headers_ = [*headers, ("host", host)] if host is not None else list(headers)
            return await http.request(endpoint.method, path_of(endpoint), content=content, headers=headers_)

    return run(go())


def endpoint_of(access):
    return [endpoint for endpoint in TABLE if endpoint.access is access]


def test_only_the_table_is_mounted():
    app = create_app(ScriptedText().client, FACTS, ServerConfig())
    mounted = []
    for route in app.routes:
        assert isinstance(route, Route)
        assert isinstance(route.endpoint, Gate)
        assert route.methods - {"HEAD"} == {route.endpoint.endpoint.method}
        mounted.append(route.endpoint.endpoint)
    assert tuple(mounted) == TABLE


def test_a_handler_without_a_route_is_an_error():
    handlers = {endpoint.name: None for endpoint in TABLE}
    assert len(pair(handlers)) == len(TABLE)
    with pytest.raises(InvariantBroken):
        pair(handlers | {"backdoor": None})
    with pytest.raises(InvariantBroken):
        pair(dict.fromkeys(list(handlers)[1:]))


def test_access_classes_are_as_decided():
    public = {endpoint.path for endpoint in endpoint_of(Access.PUBLIC)}
    admin = {endpoint.path for endpoint in endpoint_of(Access.ADMIN)}
    assert public == {"/health", "/ready"}
    assert admin == {"/v1/cache/pin", "/flush_cache", "/pause_generation", "/continue_generation", "/drain", "/abort_all"}
    insight = {endpoint.path for endpoint in endpoint_of(Access.INSIGHT)}
    assert insight == {"/v1/requests", "/v1/scheduler", "/v1/cache/tree"}
    others = [endpoint for endpoint in TABLE if endpoint.path.startswith("/v1/") and endpoint.path not in insight | admin]
    assert all(endpoint.access is Access.USER for endpoint in others)


@pytest.mark.parametrize("endpoint", TABLE, ids=lambda e: e.name)
@pytest.mark.parametrize("key", [None, "wrong", "user-key", "admin-key"])
@pytest.mark.parametrize("form", ["bearer", "x-api-key"])
def test_matrix(endpoint, key, form):
    headers = []
    if key is not None:
        headers = [("authorization", f"Bearer {key}")] if form == "bearer" else [("x-api-key", key)]
    response = call(endpoint, config=ServerConfig(**OPEN_WORLD), headers=headers)
    allowed = {
        Access.PUBLIC: {None, "wrong", "user-key", "admin-key"},
        Access.USER: {"user-key", "admin-key"},
        Access.METRICS: {"user-key", "admin-key"},
        Access.INSIGHT: {"admin-key"},
        Access.ADMIN: {"admin-key"},
    }[endpoint.access]
    if key in allowed:
        assert response.status_code not in (401, 403)
    elif key == "user-key":
        assert response.status_code == 403
    else:
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"


def test_wrong_missing_and_malformed_keys_look_alike():
    config = ServerConfig(**OPEN_WORLD)
    models = TABLE[2]
    variants = [[], [("authorization", "Bearer nope")], [("authorization", "Basic dXNlcg==")], [("authorization", "Bearer")],
                [("authorization", "user-key")], [("x-api-key", "")], [("authorization", "Bearer user-key2")],
                [("authorization", b"Bearer \xff\xfe")]]  # fmt: skip
    answers = {
        (response.status_code, response.content) for response in (call(models, config=config, headers=v) for v in variants)
    }
    assert len(answers) == 1
    assert next(iter(answers))[0] == 401


def test_two_keys_are_ambiguous():
    models = TABLE[2]
    headers = [("authorization", "Bearer user-key"), ("authorization", "Bearer x")]
    assert call(models, config=ServerConfig(**OPEN_WORLD), headers=headers).status_code == 400
    headers = [("x-api-key", "user-key"), ("x-api-key", "x")]
    assert call(models, config=ServerConfig(**OPEN_WORLD), headers=headers).status_code == 400


@pytest.mark.parametrize("endpoint", endpoint_of(Access.ADMIN), ids=lambda e: e.name)
@pytest.mark.parametrize("headers", [[], [("authorization", "Bearer anything")]])
def test_admin_routes_are_off_without_an_admin_key(endpoint, headers):
    response = call(endpoint, headers=headers)
    assert response.status_code == 403
    assert "admin key" in response.json()["error"]["message"]


def test_keys_make_tenants():
    async def go():
        config = ServerConfig(api_keys=("one", "two"))
        async with serving(config=config) as (http, fake):
            for key in ("one", "two", "one"):
                await http.post("/v1/completions", json={"prompt": "a"}, headers={"authorization": f"bearer {key}"})
            return [request.tenant for request in fake.requests]

    first, second, third = run(go())
    assert first == third != second
    assert "one" not in first


def test_without_keys_any_key_is_welcome_and_nobody_is_a_tenant():
    async def go():
        async with serving() as (http, fake):
            await http.post("/v1/completions", json={"prompt": "a"}, headers={"authorization": "Bearer EMPTY"})
            return fake.requests[0].tenant

    assert run(go()) == ""


HEALTH = TABLE[0]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "[::1]:8000", "[::1]"])
def test_own_names(host):
    assert call(HEALTH, host=host).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", "0.0.0.0", "[::2]"]
)
def test_foreign_names_on_loopback(host):
    """DNS rebinding."""
    assert call(HEALTH, host=host).status_code == 421


@pytest.mark.parametrize("host", ["", "a/b", "x/y?", "a b", "a@b", "127.0.0.1:99999999", "127.0.0.1\t", "[::1", "é"])
@pytest.mark.parametrize("bind", ["127.0.0.1", "0.0.0.0"])
def test_malformed_hosts(host, bind):
    config = ServerConfig(host=bind, api_keys=("k",))
    assert call(HEALTH, config=config, host=host.encode()).status_code == 400


def test_host_does_not_move_the_route():
    """The path that is judged is the path that is served, whatever ``Host`` says."""
    config = ServerConfig(**OPEN_WORLD)
    for host in ("x/health?", "health", "0.0.0.0/health#"):
        assert call(TABLE[2], config=config, host=host).status_code in (400, 401)


def test_any_well_formed_name_beyond_loopback():
    config = ServerConfig(**OPEN_WORLD)
    assert call(HEALTH, config=config, host="inference.example:443").status_code == 200


@pytest.mark.parametrize(
    ("config", "is_fine"),
    [
        (ServerConfig(), True),
        (ServerConfig(host="localhost"), True),
        (ServerConfig(host="::1"), True),
        (ServerConfig(host="0.0.0.0"), False),
        (ServerConfig(host="::"), False),
        (ServerConfig(host="192.0.2.1", admin_keys=("a",)), False),
        (ServerConfig(host="0.0.0.0", api_keys=("k",)), True),
        (ServerConfig(host="0.0.0.0", allow_unauthenticated=True), True),
    ],
)
def test_exposure(config, is_fine):
    if is_fine:
        check_exposure(config)
        return
    with pytest.raises(ConfigError):
        check_exposure(config)
    with pytest.raises(ConfigError):
        create_app(ScriptedText().client, FACTS, config)


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/", "/v1/models/../x", "/health/", "//health", "/v1/completions/", "/admin"]
)
def test_unknown_paths(path):
    async def go():
        async with serving() as (http, _):
            return await http.get(path)

    response = run(go())
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("endpoint", TABLE, ids=lambda e: e.name)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_wrong_methods(endpoint, method):
    if method == endpoint.method:
        return

    async def go():
        async with serving() as (http, _):
            return await http.request(method, path_of(endpoint))

    response = run(go())
    assert response.status_code == 405
    assert response.json()["error"]["message"]
    assert endpoint.method in response.headers["allow"]
    assert not any(name.startswith("access-control") for name in response.headers)
