"""When requests come that do not wait for each other: at random with a given rate, or as a trace says.

Knows: times and conversations. Refuses to know: servers.
"""

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from branchline.base.errors import ConfigError
from branchline.bench.workloads import Conversation, Turn, Workload, words

MOST_ARRIVALS = 100_000
MOST_PROMPT_TOKENS = 1 << 20
MOST_CHARACTERS = 1 << 28
"""Of all prompts together: they are made before the run, so that the run does not pay for them."""


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    """Seconds after the start."""
    conversation: Conversation


class _Line(msgspec.Struct, frozen=True):
    time: float
    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        if not 0 <= self.time < float("inf"):
            raise ValueError("time must not be negative")
        if not 1 <= self.prompt_tokens <= MOST_PROMPT_TOKENS or not 1 <= self.output_tokens <= MOST_PROMPT_TOKENS:
            raise ValueError(f"token counts must be between 1 and {MOST_PROMPT_TOKENS}")


def poisson(workload: Workload, seed: int, *, rate: float, duration_s: float) -> list[Arrival]:
    """Conversations of ``workload`` that begin ``rate`` times a second on average, independently of each other.

    Raises:
        ConfigError: that would be too many.
    """
    if not rate > 0 or not duration_s > 0 or not rate * duration_s <= MOST_ARRIVALS / 2:
        raise ConfigError(f"rate and duration must be positive and mean {MOST_ARRIVALS // 2} arrivals at most")
    times = itertools.takewhile(lambda at_s: at_s < duration_s, _poisson_times(random.Random(f"arrivals-{seed}"), rate))
    return _bounded(Arrival(*pair) for pair in zip(times, workload.conversations(seed), strict=False))


def read_trace(path: Path, seed: int) -> list[Arrival]:
    """JSON lines ``{"time": s, "prompt_tokens": n, "output_tokens": n}`` in any order, with prompts of random words.

    Raises:
        ConfigError: the file cannot be read, a line is wrong, or there is none.
    """
    rng = random.Random(f"trace-{seed}")
    lines: list[_Line] = []
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    lines.append(_parse(path, number, text))
                if len(lines) > MOST_ARRIVALS:
                    raise ConfigError(f"{path.name}: more than {MOST_ARRIVALS} requests")
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from None
    if not lines:
        raise ConfigError(f"{path.name}: there is no request in it")
    lines.sort(key=lambda line: line.time)
    start_s = lines[0].time
    return _bounded(Arrival(one.time - start_s, (Turn(words(rng, one.prompt_tokens), one.output_tokens),)) for one in lines)


def _bounded(arrivals: Iterable[Arrival]) -> list[Arrival]:
    kept, characters = [], 0
    for arrival in arrivals:
        kept.append(arrival)
        characters += sum(len(turn.text) for turn in arrival.conversation)
        if characters > MOST_CHARACTERS:
            raise ConfigError(f"the prompts have more than {MOST_CHARACTERS >> 20} MiB: send fewer or shorter ones")
    return kept


def _parse(path: Path, number: int, text: bytes) -> _Line:
    try:
        return msgspec.json.decode(text, type=_Line)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{path.name}, line {number}: {error}") from None


def _poisson_times(rng: random.Random, rate: float) -> Iterator[float]:
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate)
        yield at_s
