"""Readers of public traces. Each turns a file into a :class:`~branchline.sim.workload.Workload`, or says in which line it
failed.

    mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids (one for each block of 512 tokens; equal ids
               mean equal content and equal prefix). https://github.com/kvcache-ai/Mooncake
    azure      CSV: TIMESTAMP, ContextTokens, GeneratedTokens; nothing is known to be shared.
               https://github.com/Azure/AzurePublicDataset
    journal    a directory that was given to --journal: the latest run in it, see `sim.incident`

Lengths may be scaled, so that traces of large machines fit small ones. Knows: file formats. Refuses to know: what is done
with the requests.
"""

import csv
import gzip
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

from branchline.base.errors import ConfigError
from branchline.base.ids import TokenId
from branchline.sim.incident import read_journal
from branchline.sim.worker import OUTPUT_TOKENS_FROM
from branchline.sim.workload import Arrival, Workload

BLOCK_TOKENS = 512
"""Tokens that one hash id of a Mooncake trace stands for."""
NS_PER_MS = 1_000_000
GZIP_MAGIC = b"\x1f\x8b"

Tokens: TypeAlias = tuple[TokenId, ...]
Line = TypeVar("Line")


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


class _AzureLine(msgspec.Struct, frozen=True):
    timestamp: str = msgspec.field(name="TIMESTAMP")
    context: int = msgspec.field(name="ContextTokens")
    generated: int = msgspec.field(name="GeneratedTokens")


class _Vocabulary:
    """Hands out tokens that nobody has had before."""

    def __init__(self) -> None:
        self._next: TokenId = 0

    def fresh(self, count: int) -> Tokens:
        first, self._next = self._next, self._next + count
        if self._next > OUTPUT_TOKENS_FROM:
            raise ConfigError("the trace has too many different tokens: use a smaller scale")
        return tuple(range(first, self._next))


def read_mooncake(path: Path, scale: float | None = None) -> Workload:
    """``scale``: block and output lengths are multiplied by it; 1/32 by default, so that a block becomes 16 tokens.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong.
    """
    block_tokens = max(1, round(BLOCK_TOKENS * (1 / 32 if scale is None else scale)))
    scale = block_tokens / BLOCK_TOKENS
    vocabulary, blocks = _Vocabulary(), dict[int, Tokens]()
    arrivals = []
    for number, text in _lines(path):
        line = _parse(path, number, text, _decode_mooncake)
        prompt: list[TokenId] = []
        for block in line.hash_ids:
            if block not in blocks:
                blocks[block] = vocabulary.fresh(block_tokens)
            prompt += blocks[block]
        length = _scaled(line.input_length, scale)
        prompt += vocabulary.fresh(max(0, length - len(prompt)))
        arrivals.append(Arrival(
            at_ns=round(line.timestamp * NS_PER_MS), request_id=f"line-{number}", prompt=tuple(prompt[:length]),
            output_tokens=_scaled(line.output_length, scale), seed=number,
        ))  # fmt: skip
    note = "" if scale == 1 else f"lengths times {scale:g}: a block of {BLOCK_TOKENS} is {block_tokens} tokens"
    return Workload(path.name, _in_order(arrivals), note)


def read_azure(path: Path, scale: float | None = None) -> Workload:
    """``scale``: lengths are multiplied by it; 1 by default.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong.
    """
    scale = 1.0 if scale is None else scale
    vocabulary = _Vocabulary()
    lines = _lines(path)
    _, header = next(lines, (0, ""))
    names = [name.strip() for name in header.split(",")]
    requests = []
    for number, text in lines:
        at, line = _parse(path, number, text, lambda text: _decode_azure(names, text))
        requests.append((at, number, line))
    start = min((at for at, _, _ in requests), default=datetime.min)
    arrivals = [Arrival(
        at_ns=(at - start) // timedelta(microseconds=1) * 1000, request_id=f"line-{number}",
        prompt=vocabulary.fresh(_scaled(line.context, scale)), output_tokens=_scaled(line.generated, scale), seed=number,
    ) for at, number, line in requests]  # fmt: skip
    return Workload(path.name, _in_order(arrivals), "" if scale == 1 else f"lengths times {scale:g}")


def read_trace(path: Path, trace_format: str | None = None, scale: float | None = None) -> Workload:
    """Read a trace; the format is told from the name unless it is given.

    Raises:
        ConfigError: the file cannot be read, a line is wrong, or the format cannot be told.
    """
    chosen = trace_format or _guess(path)
    if chosen not in READERS:
        raise ConfigError(f"there is no trace format {chosen!r}; choose one of {', '.join(READERS)}")
    return READERS[chosen](path, scale)


READERS: dict[str, Callable[[Path, float | None], Workload]] = {
    "mooncake": read_mooncake,
    "azure": read_azure,
    "journal": read_journal,
}
"""The one door for formats: a name and a reader."""
_SUFFIXES = {".jsonl": "mooncake", ".csv": "azure"}


def _guess(path: Path) -> str:
    if path.is_dir():
        return "journal"
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    if not suffixes or suffixes[-1] not in _SUFFIXES:
        raise ConfigError(f"the format of {path} cannot be told from its name: use --format")
    return _SUFFIXES[suffixes[-1]]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers from 1 and lines, empty ones left out."""
    try:
        with path.open("rb") as file:
            packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        with gzip.open(path, "rt", encoding="utf-8-sig") if packed else path.open(encoding="utf-8-sig") as text:
            for number, line in enumerate(text, start=1):
                if line.strip():
                    yield number, line.strip()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from None


def _parse(path: Path, number: int, text: str, decode: Callable[[str], Line]) -> Line:
    try:
        return decode(text)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{path}, line {number}: {error}") from None


def _decode_mooncake(text: str) -> _MooncakeLine:
    line = msgspec.json.decode(text, type=_MooncakeLine)
    _require_counts(line.timestamp, line.input_length, line.output_length)
    return line


def _decode_azure(names: Sequence[str], text: str) -> tuple[datetime, _AzureLine]:
    cells = next(csv.reader([text]))
    line = msgspec.convert(dict(zip(names, cells, strict=False)), _AzureLine, strict=False)
    _require_counts(line.context, line.generated)
    at = datetime.fromisoformat(line.timestamp.strip())
    return at if at.tzinfo else at.replace(tzinfo=UTC), line


def _require_counts(*numbers: float) -> None:
    if any(not 0 <= number < 1 << 53 for number in numbers):
        raise ValueError("times and lengths must not be negative")


def _scaled(length: int, scale: float) -> int:
    """At least one token: a request without prompt or output is none."""
    return max(1, math.ceil(length * scale))


def _in_order(arrivals: list[Arrival]) -> tuple[Arrival, ...]:
    """Sorted by time; the first arrives at 0. Requests of one moment keep the order of the file."""
    start = min((arrival.at_ns for arrival in arrivals), default=0)
    return tuple(
        msgspec.structs.replace(arrival, at_ns=arrival.at_ns - start)
        for arrival in sorted(arrivals, key=lambda arrival: arrival.at_ns)
    )
