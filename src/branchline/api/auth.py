"""Who may call what: keys, roles and the ``Host`` header.

Knows: digests of the configured keys. Refuses to know: paths. Which access a request needs was decided by routing, before
anything here is asked.
"""

import enum
import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass

from branchline.api.errors import ApiError, Header
from branchline.base.config import ServerConfig
from branchline.base.errors import ConfigError

_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9.\-]{1,255})(?::[0-9]{1,5})?")
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_CHALLENGE: Header = (b"www-authenticate", b"Bearer")


class Access(enum.Enum):
    """Class of a route."""

    PUBLIC = "public"
    USER = "user"
    METRICS = "metrics"
    """Open on loopback; behind a user or admin key elsewhere."""
    INSIGHT = "insight"
    """Tells of everybody's requests: open on loopback while there is no key at all; behind an admin key else."""
    ADMIN = "admin"
    """Off unless the server was started with an admin key."""


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: str = ""
    """Digest of the key: callers with one key share a prefix cache, callers with different keys never do."""
    is_admin: bool = False


def check_exposure(config: ServerConfig) -> None:
    """Refuse to serve other machines without a key.

    Raises:
        ConfigError: the address is not loopback, there is no API key and nobody said that this is wanted.
    """
    if not (config.is_loopback or config.api_keys or config.allow_unauthenticated):
        raise ConfigError(
            f"serving {config.host} without an API key would let everybody in: set an API key, "
            "bind to 127.0.0.1, or allow unauthenticated use explicitly"
        )


class Keyring:
    """Decides from headers alone. Keeps digests, never keys."""

    def __init__(self, config: ServerConfig) -> None:
        self._users = [_digest(key.encode()) for key in config.api_keys]
        self._admins = [_digest(key.encode()) for key in config.admin_keys]
        self._is_loopback = config.is_loopback
        self._is_open = config.is_loopback and not (config.api_keys or config.admin_keys)

    def admit(self, access: Access, headers: Iterable[Header]) -> Caller:
        """The caller, if it may use a route of this class.

        Raises:
            ApiError: 400 for doubled headers, 401 without a valid key, 403 if the key or the server does not allow it.
        """
        if access is Access.PUBLIC:
            return Caller()
        key = _presented(headers)
        if access is Access.ADMIN or (access is Access.INSIGHT and not self._is_open):
            return self._admit_admin(key)
        if not self._users or (access is Access.METRICS and self._is_loopback):
            return Caller()
        return self._identify(key)

    def _admit_admin(self, key: bytes | None) -> Caller:
        if not self._admins:
            raise ApiError(403, "Admin routes are off: this server was started without an admin key.", code="admin_off")
        caller = self._identify(key)
        if not caller.is_admin:
            raise ApiError(403, "This key does not allow admin calls.", code="not_admin")
        return caller

    def _identify(self, key: bytes | None) -> Caller:
        """Every stored digest is compared, whatever the outcome: time tells nothing about which key was close."""
        digest = _digest(b"" if key is None else key)
        is_user = _among(digest, self._users)
        is_admin = _among(digest, self._admins)
        if key is None or not (is_user or is_admin):
            raise ApiError(401, "A valid API key is required.", code="invalid_api_key", headers=[_CHALLENGE])
        return Caller(tenant=digest.hex()[:32], is_admin=is_admin)


class HostRule:
    """Which ``Host`` headers are served. On a loopback address only names of this machine are, against DNS rebinding."""

    def __init__(self, config: ServerConfig) -> None:
        self._names = _LOOPBACK_NAMES | {config.host.strip("[]").lower()} if config.is_loopback else None

    def check(self, headers: Iterable[Header]) -> None:
        """Raises ApiError: 400 for a missing, doubled or malformed header, 421 for a foreign name."""
        values = [value for name, value in headers if name == b"host"]
        match = _HOST.fullmatch(values[0]) if len(values) == 1 else None
        if match is None:
            raise ApiError(400, "The request needs exactly one well-formed Host header.", code="invalid_host")
        name = match[1].decode("ascii").strip("[]").lower()
        if self._names is not None and name not in self._names:
            raise ApiError(421, "This server does not answer under that host name.", code="misdirected_request")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _among(digest: bytes, known: list[bytes]) -> bool:
    found = False
    for candidate in known:
        found |= hmac.compare_digest(digest, candidate)
    return found


def _presented(headers: Iterable[Header]) -> bytes | None:
    """The key of a request: ``Authorization: Bearer`` first, else ``x-api-key``."""
    bearers: list[bytes] = []
    keys: list[bytes] = []
    for name, value in headers:
        if name == b"authorization":
            bearers.append(value)
        elif name == b"x-api-key":
            keys.append(value)
    if len(bearers) > 1 or len(keys) > 1:
        raise ApiError(400, "More than one key was sent.", code="ambiguous_key")
    if bearers:
        scheme, _, key = bearers[0].partition(b" ")
        return key.strip() if scheme.lower() == b"bearer" and key.strip() else None
    return keys[0].strip() or None if keys else None
