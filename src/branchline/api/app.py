"""Puts the HTTP side together: host rule, routing, gate, handlers.

Knows: in which order a request is judged (host, route, method, key, body). Refuses to know: what handlers do.
"""

import logging
import secrets

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from branchline.api.auth import Caller, HostRule, Keyring, check_exposure
from branchline.api.errors import ApiError, ClientGone, body_of, headers_of, internal, unavailable
from branchline.api.exchange import Exchange, request_id_of
from branchline.api.routes import Endpoint, Handler, pair
from branchline.api.service import Service
from branchline.base.clock import Clock, MonotonicClock
from branchline.base.config import ServerConfig
from branchline.base.errors import EngineDead, RequestError
from branchline.observe.metrics import Metrics
from branchline.wire.client import TextClient
from branchline.wire.messages import ModelFacts

MAX_TARGET_BYTES = 8 << 10
MAX_HEADER_BYTES = 32 << 10

_log = logging.getLogger("branchline.api")


def create_app(
    client: TextClient,
    facts: ModelFacts,
    config: ServerConfig,
    *,
    step_timeout_s: float = 120.0,
    clock: Clock | None = None,
) -> Starlette:
    """The ASGI application. ``app.state.service`` is the :class:`Service` behind it.

    Raises:
        ConfigError: the address would be open to other machines without a key.
    """
    check_exposure(config)
    service = Service(client, facts, config, step_timeout_s=step_timeout_s, clock=clock or MonotonicClock())
    keyring = Keyring(config)
    routes = [
        Route(endpoint.path, Gate(endpoint, handler, keyring, config, service.metrics), methods=[endpoint.method])
        for endpoint, handler in pair(service.handlers)
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(FrontDoor, rule=HostRule(config))],
        exception_handlers={HTTPException: _unrouted},
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


class FrontDoor:
    """Judges what can be judged before routing: sizes of the head, and ``Host``."""

    def __init__(self, app: ASGIApp, rule: HostRule) -> None:
        self._app = app
        self._rule = rule

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            _check_head(scope)
            self._rule.check(scope["headers"])
        except ApiError as error:
            await Exchange(scope, receive, send, Caller(), 0).fail(error)
            return
        await self._app(scope, receive, send)


class Gate:
    """The ASGI endpoint of one route. Routing has decided which: the access class is that of the route, whatever the
    request says about itself. The one funnel for errors."""

    def __init__(
        self, endpoint: Endpoint, handler: Handler, keyring: Keyring, config: ServerConfig, metrics: Metrics
    ) -> None:
        self.endpoint = endpoint
        self._handler = handler
        self._keyring = keyring
        self._max_body_bytes = config.max_body_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, Caller(), self._max_body_bytes)
        try:
            await self._serve(exchange, scope)
        finally:
            self._metrics.answered(self.endpoint.name, exchange.status)

    async def _serve(self, exchange: Exchange, scope: Scope) -> None:
        try:
            exchange.caller = self._keyring.admit(self.endpoint.access, scope["headers"])
            await self._handler(exchange)
        except ClientGone:
            exchange.mark_gone()
        except RequestError as error:
            await self._fail(exchange, error)
        except EngineDead:
            await self._fail(exchange, unavailable("The engine does not answer.", "engine_gone"))
        except Exception:
            incident = secrets.token_hex(8)
            _log.exception("incident %s in %s", incident, self.endpoint.name)
            await self._fail(exchange, internal(incident))

    async def _fail(self, exchange: Exchange, error: RequestError) -> None:
        try:
            await exchange.fail(error)
        except ClientGone:
            exchange.mark_gone()


def _check_head(scope: Scope) -> None:
    if len(scope.get("raw_path", b"")) + len(scope.get("query_string", b"")) > MAX_TARGET_BYTES:
        raise ApiError(414, "The request line is too long.")
    if sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > MAX_HEADER_BYTES:
        raise ApiError(431, "The headers are too large.")


async def _unrouted(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the shape of all other errors."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    sentence = {404: "There is no such route.", 405: "This route does not take that method."}.get(status, "Not possible.")
    rendered = ApiError(status, sentence, code="not_found" if status == 404 else None)
    headers = {name.decode(): value.decode() for name, value in headers_of(rendered)}
    headers["x-request-id"] = request_id_of(request.scope["headers"]).decode()
    headers |= dict(getattr(error, "headers", None) or {})
    return Response(body_of(rendered), status, headers, "application/json")
