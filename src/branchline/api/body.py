"""JSON text to a checked struct, strictly: what two parsers could read differently is refused.

Knows: JSON and its traps (duplicate keys, NaN, lone surrogates, invalid UTF-8, depth, integers beyond 64 bits).
Refuses to know: what the fields mean (``api.schemas``, ``api.parse``).
"""

import json
import re
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from branchline.base.errors import InvalidRequest

MAX_DEPTH = 128
_MALFORMED = "The body is not valid JSON."
_LONG_INTEGER = re.compile(rb"(?<![0-9.eE+\-])-?[0-9]{19,}(?![0-9.eE])")
_PLACE = re.compile(r"^(.*?)(?: - at `(?:key in )?\$\.?(.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(.*)`")
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""Opening brackets count +1, closing ones -1, read as signed bytes."""
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

T = TypeVar("T")


def decode(body: bytes, kind: type[T]) -> T:
    """``body`` as a ``kind``. Linear in the length of the body.

    Raises:
        InvalidRequest: it is not JSON, not safe JSON, or not of this shape; ``param`` names the field.
    """
    try:
        text = body.decode("utf-8")
        value = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _readable(error) from None
    except RecursionError:
        raise InvalidRequest(f"The body is nested deeper than {MAX_DEPTH} levels.") from None
    except (UnicodeDecodeError, msgspec.DecodeError):
        raise InvalidRequest(_MALFORMED) from None
    _check_skeleton(body)
    _check_keys(text)
    return value


def _readable(error: msgspec.ValidationError) -> InvalidRequest:
    """msgspec names types and the path, never values."""
    match = _PLACE.match(str(error))
    sentence, place = (match[1], match[2]) if match else (str(error), None)
    missing = _MISSING.search(sentence)
    if missing:
        place = f"{place}.{missing[1]}" if place else missing[1]
    where = f" in `{place}`" if place and not missing else ""
    return InvalidRequest(f"{sentence}{where}.", param=place or None)


def _check_skeleton(body: bytes) -> None:
    """Depth and integers of well-formed JSON, without its strings. Each pass is one call into C."""
    skeleton = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    if any(_is_too_long(match[0]) for match in _LONG_INTEGER.finditer(skeleton)):
        raise InvalidRequest("The body has an integer that does not fit into 64 bits.")
    steps = memoryview(skeleton.translate(_STEPS, _NOT_BRACKETS)).cast("b")
    if max(accumulate(steps), default=0) > MAX_DEPTH:
        raise InvalidRequest(f"The body is nested deeper than {MAX_DEPTH} levels.")


def _is_too_long(number: bytes) -> bool:
    return len(number) > 20 or not -(1 << 63) <= int(number) < 1 << 63


def _check_keys(text: str) -> None:
    try:
        json.loads(text, object_pairs_hook=_unique)
    except InvalidRequest:
        raise
    except (ValueError, RecursionError):
        raise InvalidRequest(_MALFORMED) from None


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        raise InvalidRequest("The body has an object with the same key twice.")
