"""The one table of routes. A route that is not here cannot be mounted, and one that is here must have a handler.

Knows: paths, methods, access classes, body types. Refuses to know: what handlers do (``api.service``).
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from branchline.api.auth import Access
from branchline.api.exchange import Exchange
from branchline.api.schemas import ChatBody, CompletionBody, DetokenizeBody, PinBody, TokenizeBody
from branchline.base.errors import require

Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    name: str
    """Of the handler and in metrics."""
    method: str
    path: str
    access: Access
    summary: str
    body: type[Any] | None = None
    content_type: str = "application/json"
    """Of a successful answer."""


TABLE = (
    Endpoint("health", "GET", "/health", Access.PUBLIC, "The process is alive."),
    Endpoint("ready", "GET", "/ready", Access.PUBLIC, "The engine makes progress and takes requests."),
    Endpoint("models", "GET", "/v1/models", Access.USER, "The served model."),
    Endpoint("model", "GET", "/v1/models/{name:path}", Access.USER, "The served model by name."),
    Endpoint("completions", "POST", "/v1/completions", Access.USER, "Continue prompts.", CompletionBody),
    Endpoint("chat_completions", "POST", "/v1/chat/completions", Access.USER, "Answer a conversation.", ChatBody),
    Endpoint("tokenize", "POST", "/tokenize", Access.USER, "Tokens of a prompt or of messages.", TokenizeBody),
    Endpoint("detokenize", "POST", "/detokenize", Access.USER, "Text of tokens.", DetokenizeBody),
    Endpoint("version", "GET", "/version", Access.USER, "Version of the server."),
    Endpoint("openapi", "GET", "/openapi.json", Access.USER, "This table as OpenAPI."),
    Endpoint("requests", "GET", "/v1/requests", Access.INSIGHT, "Live requests, and what each waits for."),
    Endpoint("request", "GET", "/v1/requests/{id}", Access.USER, "Why a request waits, or what became of it."),
    Endpoint("scheduler", "GET", "/v1/scheduler", Access.INSIGHT, "Queue, budget, memory and cache in figures."),
    Endpoint("cache_tree", "GET", "/v1/cache/tree", Access.INSIGHT, "The top of the prefix cache, without tokens."),
    Endpoint("metrics", "GET", "/metrics", Access.METRICS, "Prometheus figures.", content_type="text/plain"),
    Endpoint("pin", "POST", "/v1/cache/pin", Access.ADMIN, "Keep a cached prefix for a while.", PinBody),
    Endpoint("flush_cache", "POST", "/flush_cache", Access.ADMIN, "Forget all cached prefixes."),
    Endpoint("pause_generation", "POST", "/pause_generation", Access.ADMIN, "Launch no more steps."),
    Endpoint("continue_generation", "POST", "/continue_generation", Access.ADMIN, "Launch steps again."),
    Endpoint("drain", "POST", "/drain", Access.ADMIN, "Take no new requests; finish the running ones."),
    Endpoint("abort_all", "POST", "/abort_all", Access.ADMIN, "End every request."),
)


def pair(handlers: Mapping[str, Handler]) -> list[tuple[Endpoint, Handler]]:
    """Each endpoint with its handler.

    Raises:
        InvariantBroken: a handler has no endpoint, or an endpoint no handler.
    """
    names = {endpoint.name for endpoint in TABLE}
    require(len(names) == len(TABLE), "two routes have one name")
    require(names == set(handlers), f"route table and handlers differ: {sorted(names ^ set(handlers))}")
    return [(endpoint, handlers[endpoint.name]) for endpoint in TABLE]
