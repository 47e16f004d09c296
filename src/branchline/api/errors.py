"""One funnel for errors: every one leaves as OpenAI's ``{"error": {message, type, param, code}}``.

Knows: statuses, kinds and codes. Refuses to know: who sends the bytes (``api.exchange``). Texts are fixed sentences; what a
client sent is repeated only through :func:`shown`, and a 500 carries nothing but an incident number.
"""

import re
from collections.abc import Sequence

import msgspec

from branchline.base.errors import RequestError
from branchline.base.finish import FinishReason
from branchline.wire.messages import Ended, Refused

SHOWN_CHARACTERS = 64
"""Longest piece of a client's input that an error may repeat."""

Header = tuple[bytes, bytes]

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_PLAIN = re.compile(rf"[A-Za-z0-9._:/\-]{{1,{SHOWN_CHARACTERS}}}")


class ApiError(RequestError):
    """An error that is born at the HTTP side, or that the text side or the engine reported."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str | None = None,
        headers: Sequence[Header] = (),
        retry_after_s: int = 1,
    ) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.kind = kind or kind_of(status)
        self.code = code
        self.headers = tuple(headers)
        self.retry_after_s = retry_after_s
        """For 429 and 503: when it may be worth while to come back."""


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


def kind_of(status: int) -> str:
    """OpenAI's error ``type`` that fits a status."""
    return _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")


def headers_of(error: RequestError) -> tuple[Header, ...]:
    """Extra response headers. Whoever is told to come back is also told when."""
    own = error.headers if isinstance(error, ApiError) else ()
    seconds = error.retry_after_s if isinstance(error, ApiError) else 1
    return (*own, (b"retry-after", b"%d" % seconds)) if error.status in (429, 503) else own


def body_of(error: RequestError) -> bytes:
    """The JSON text of an error."""
    fields = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields})


def internal(incident: str) -> ApiError:
    return ApiError(500, f"The server failed to process the request. Incident {incident}.", code="internal_error")


def unavailable(message: str, code: str = "unavailable") -> ApiError:
    return ApiError(503, message, code=code)


def from_refused(event: Refused) -> ApiError:
    return ApiError(event.status, event.message, code=event.code, param=event.param, kind=event.kind)


_ENDS: dict[FinishReason, tuple[int, str, str]] = {
    FinishReason.CANCELLED: (499, "cancelled", "The request was cancelled."),
    FinishReason.WAITING_TIMEOUT: (503, "timeout", "The request waited too long for its turn."),
    FinishReason.RUNNING_TIMEOUT: (504, "timeout", "The request ran longer than this server allows."),
    FinishReason.REJECTED: (429, "overloaded", "The server cannot take more requests now."),
    FinishReason.ERROR: (500, "engine_error", "The engine failed to compute this request."),
    FinishReason.SHUTDOWN: (503, "shutdown", "The server is shutting down."),
}
"""Ends without success: status if the engine named none, code, sentence if the engine gave none."""


def from_ended(event: Ended) -> ApiError:
    """What a client hears of an end without success. It is never called ``length``."""
    status, code, sentence = _ENDS[event.reason]
    if event.status >= 400:
        status = event.status
    if event.reason is FinishReason.REJECTED and status == 400:
        return ApiError(status, event.message or sentence)
    return ApiError(status, event.message or sentence, code=code, retry_after_s=event.retry_after_s or 1)


def shown(text: str) -> str:
    """``text`` if it is short and plain enough to be repeated in an error, else a dash."""
    return text if _PLAIN.fullmatch(text) else "-"
