"""Routes that explain: live requests, one request, the scheduler, the cache.

Knows: who may see what, and under which names a call is known. Refuses to know: what the answers say (they come from the
engine as JSON and are passed on).
"""

import re

from branchline.api.errors import ApiError, unavailable
from branchline.api.exchange import Exchange
from branchline.api.routes import Handler
from branchline.base.config import ServerConfig
from branchline.base.ids import RequestId
from branchline.wire.client import TextClient
from branchline.wire.messages import Subject

REMEMBERED_CALLS = 4096
"""``x-request-id`` headers of recent calls that can be asked about."""

_NAME = re.compile(r"[A-Za-z0-9._:\-]{1,160}")


class Insight:
    def __init__(self, client: TextClient, config: ServerConfig) -> None:
        self._client = client
        self._has_keys = bool(config.api_keys or config.admin_keys)
        self._calls: dict[tuple[str, str], RequestId] = {}
        """Tenant and ``x-request-id`` to the id of the call, oldest first."""

    @property
    def handlers(self) -> dict[str, Handler]:
        return {
            "requests": self.requests,
            "request": self.request,
            "scheduler": self.scheduler,
            "cache_tree": self.cache_tree,
        }

    def remember(self, exchange: Exchange, call_id: RequestId) -> None:
        """A call begins: its client may ask about it before it knows its id."""
        name = (exchange.caller.tenant, exchange.request_id)
        self._calls.pop(name, None)
        self._calls[name] = call_id
        if len(self._calls) > REMEMBERED_CALLS:
            del self._calls[next(iter(self._calls))]

    async def requests(self, exchange: Exchange) -> None:
        await self._pass_on("requests", exchange)

    async def scheduler(self, exchange: Exchange) -> None:
        await self._pass_on("scheduler", exchange)

    async def cache_tree(self, exchange: Exchange) -> None:
        await self._pass_on("tree", exchange)

    async def request(self, exchange: Exchange) -> None:
        """One's own only, and without a word about others, unless there are no keys or the key is an admin's."""
        caller, name = exchange.caller, exchange.path_params["id"]
        if not _NAME.fullmatch(name):
            raise _unknown()
        request_id = self._calls.get((caller.tenant, name), name)
        tenant = None if caller.is_admin or not self._has_keys else caller.tenant
        await self._pass_on("request", exchange, request_id, tenant)

    async def _pass_on(
        self, what: Subject, exchange: Exchange, request_id: RequestId = "", tenant: str | None = None
    ) -> None:
        told = await self._client.ask(what, request_id, tenant=tenant)
        if told.body is not None:
            await exchange.reply(200, told.body)
        elif told.message:
            raise unavailable(told.message)
        else:
            raise _unknown()


def _unknown() -> ApiError:
    return ApiError(404, "There is no such request, or it ended too long ago.", code="request_not_found")
