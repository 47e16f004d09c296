"""Prompts out of common English words, about one token each: five workloads, and prompts of any length for traces.

    single   1 client,   8 requests,   128 in / 128 out, nothing shared
    batch   16 clients, 64 requests,   256 in /  64 out, nothing shared
    prefix  16 clients, 64 requests,  1024 shared + 32 own in / 32 out
    chat     8 clients,  8 conversations of 4 turns, one shared 256 system prompt, each turn adds 48 in / 48 out
    long     4 clients,  8 requests,  3000 in /  16 out, nothing shared

Everything follows from the seed, to the byte, so that the figures of two servers can be set side by side. Knows: words.
Refuses to know: servers, time.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from branchline.base.errors import ConfigError

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body "
    "information back parent face others level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher"
)
WORDS = tuple(_TEXT.split())


class Turn(NamedTuple):
    text: str
    """What is appended to the history of the conversation; both together are the prompt."""
    output_tokens: int


Conversation: TypeAlias = tuple[Turn, ...]
"""Turns one after the other: each prompt begins with everything said before."""


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    clients: int
    """In closed loop: conversations at the same time."""
    count: int
    """In closed loop: conversations in all."""
    draw: Callable[[random.Random], Iterator[Conversation]]
    """Conversations without end."""

    def conversations(self, seed: int) -> Iterator[Conversation]:
        """Without end, the same for the same seed; a closed loop takes the first ``count``."""
        return self.draw(random.Random(f"{self.name}-{seed}"))


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def find_workload(name: str) -> Workload:
    """Raises ConfigError if there is none of this name."""
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}; choose from {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def _plain(prompt_words: int, output_tokens: int) -> Callable[[random.Random], Iterator[Conversation]]:
    def draw(rng: random.Random) -> Iterator[Conversation]:
        while True:
            yield (Turn(words(rng, prompt_words), output_tokens),)

    return draw


def _prefix(rng: random.Random) -> Iterator[Conversation]:
    shared = words(rng, 1024)
    while True:
        yield (Turn(f"{shared} {words(rng, 32)}", 32),)


def _chat(rng: random.Random) -> Iterator[Conversation]:
    system = words(rng, 256)
    while True:
        turns = [f"User: {words(rng, 48)}\nAssistant:" for _ in range(4)]
        yield tuple(Turn(text, 48) for text in (f"{system}\n{turns[0]}", *turns[1:]))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("single", 1, 8, _plain(128, 128)),
        Workload("batch", 16, 64, _plain(256, 64)),
        Workload("prefix", 16, 64, _prefix),
        Workload("chat", 8, 8, _chat),
        Workload("long", 4, 8, _plain(3000, 16)),
    )
}
