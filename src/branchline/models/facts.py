"""Look-ups in metadata that nobody vouches for: every value is typed and bounded, every complaint is one short sentence.

Knows: how to distrust. Refuses to know: which keys exist and what they mean.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from branchline.base.errors import ModelError


def clip(value: object, limit: int = 60) -> str:
    """``repr`` of something out of a file, short and on one line."""
    text = repr(value[: limit + 1]) if isinstance(value, str) else repr(value)
    return text if len(text) <= limit + 2 else f"{text[:limit]}..."


@contextlib.contextmanager
def blame(file_name: str) -> Iterator[None]:
    """Put the name of the file at fault before every complaint raised inside."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{file_name}: {error}") from None
    except OSError as error:
        raise ModelError(f"{file_name}: cannot be read ({error.strerror or 'input or output failed'})") from None


class Facts:
    """Typed reads from a mapping. ``None`` counts as absent; each method raises ModelError for a value it cannot use."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._find(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not -(1 << 62) < value < 1 << 62:
            raise ModelError(f"{key} should be a whole number, not {clip(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._find(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300 or math.isnan(value):
            raise ModelError(f"{key} should be a finite number, not {clip(value)}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._find(key, default)
        if not isinstance(value, str):
            raise ModelError(f"{key} should be a text, not {clip(value)}")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._find(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{key} should be true or false, not {clip(value)}")
        return value

    def items(self, key: str) -> list[Any]:
        """A list; empty if absent."""
        value = self._find(key, [])
        if not isinstance(value, list):
            raise ModelError(f"{key} should be a list, not {clip(value)}")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of texts; empty if absent."""
        values = self.items(key)
        if not all(isinstance(value, str) for value in values):
            raise ModelError(f"{key} should be a list of texts")
        return values

    def section(self, key: str) -> "Facts":
        """A mapping; empty if absent."""
        value = self._find(key, {})
        if not isinstance(value, dict):
            raise ModelError(f"{key} should be a mapping, not {clip(value)}")
        return Facts(value)

    def all_texts(self) -> Mapping[str, str]:
        """The whole mapping, every value a text."""
        if not all(isinstance(value, str) for value in self._values.values()):
            raise ModelError("a value should be a text and is not")
        return self._values

    def _find(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{clip(key)[1:-1]} is missing")
        return value
