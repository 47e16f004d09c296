"""Workloads made up on purpose: a few numbers describe them, a seed makes them repeatable.

    independent   nobody shares anything
    shared        few long prefixes, many short questions
    chat          conversations: each turn sends everything said before, the engine's own answers included
    tenants       one tenant asks for several times as much as each of the others
    hot-cold      a popular prefix, and now and then a prompt that nobody has sent before: who waits for whom?

Requests arrive at random moments (a Poisson process: in any small moment equally likely, whatever came before). Knows:
numbers. Refuses to know: how requests are served.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator

import msgspec

from branchline.base.clock import NS_PER_S
from branchline.base.errors import ConfigError
from branchline.base.ids import TokenId
from branchline.sim.worker import simulated_token
from branchline.sim.workload import Arrival, Workload

SPREAD = 0.5
"""Lengths are drawn evenly from ``mean * (1 - SPREAD)`` to ``mean * (1 + SPREAD)``."""


class _Common(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    requests: int = 500
    rate: float = 1.0
    """Requests per second."""
    output: int = 32
    """Mean tokens of an output."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name != "seed" and not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above zero")


class Independent(_Common, frozen=True, kw_only=True):
    prompt: int = 256
    """Mean tokens of a prompt."""

    def arrivals(self) -> Iterator[Arrival]:
        dice = _Dice(self.seed)
        for number, at_ns in enumerate(dice.moments(self.rate, self.requests)):
            yield dice.request(number, at_ns, dice.fresh(self.prompt), self.output)


class Shared(_Common, frozen=True, kw_only=True):
    prefixes: int = 4
    prefix: int = 512
    """Tokens of each shared prefix."""
    question: int = 32
    """Mean tokens that follow it."""

    def arrivals(self) -> Iterator[Arrival]:
        dice = _Dice(self.seed)
        shared = [dice.exactly(self.prefix) for _ in range(self.prefixes)]
        for number, at_ns in enumerate(dice.moments(self.rate, self.requests)):
            chosen = dice.below(self.prefixes)
            prompt = shared[chosen] + dice.fresh(self.question)
            yield dice.request(number, at_ns, prompt, self.output, group=f"prefix {chosen}")


class Chat(_Common, frozen=True, kw_only=True):
    turns: int = 5
    """Of each conversation."""
    system: int = 200
    """Tokens that all conversations begin with."""
    question: int = 40
    """Mean tokens of what the user says in a turn."""
    pause_s: float = 30.0
    """Mean time from one turn to the next. It does not wait for the answer: make it long enough for one."""

    def arrivals(self) -> Iterator[Arrival]:
        """``rate`` is that of requests, not of conversations."""
        dice = _Dice(self.seed)
        system, made = dice.exactly(self.system), list[Arrival]()
        talks = -(-self.requests // self.turns)
        for start_ns in dice.moments(self.rate / self.turns, talks):
            at_ns, said = start_ns, system
            for _ in range(min(self.turns, self.requests - len(made))):
                request = dice.request(len(made), at_ns, said + dice.fresh(self.question), self.output)
                made.append(request)
                said = request.prompt + output_of(request)
                at_ns += dice.pause_ns(self.pause_s)
        yield from made


class Tenants(_Common, frozen=True, kw_only=True):
    tenants: int = 4
    heavy: float = 10.0
    """Requests of the first tenant for each one of another tenant."""
    prompt: int = 256

    def arrivals(self) -> Iterator[Arrival]:
        dice = _Dice(self.seed)
        for number, at_ns in enumerate(dice.moments(self.rate, self.requests)):
            place = dice.uniform() * (self.heavy + self.tenants - 1)
            tenant = f"tenant {0 if place < self.heavy else 1 + int(place - self.heavy)}"
            yield dice.request(number, at_ns, dice.fresh(self.prompt), self.output, tenant=tenant, group=tenant)


class HotCold(_Common, frozen=True, kw_only=True):
    cold: float = 0.05
    """Share of requests that share nothing."""
    prefixes: int = 1
    """Popular prefixes."""
    prompt: int = 512
    """Tokens of a prompt, hot or cold."""
    question: int = 16
    """Tokens in which hot prompts differ."""

    def arrivals(self) -> Iterator[Arrival]:
        dice = _Dice(self.seed)
        popular = [dice.exactly(max(1, self.prompt - self.question)) for _ in range(self.prefixes)]
        for number, at_ns in enumerate(dice.moments(self.rate, self.requests)):
            if dice.uniform() < self.cold:
                yield dice.request(number, at_ns, dice.exactly(self.prompt), self.output, group="cold")
            else:
                prompt = popular[dice.below(self.prefixes)] + dice.exactly(self.question)
                yield dice.request(number, at_ns, prompt, self.output, group="hot")


KINDS: dict[str, type[Independent | Shared | Chat | Tenants | HotCold]] = {
    "independent": Independent, "shared": Shared, "chat": Chat, "tenants": Tenants, "hot-cold": HotCold,
}  # fmt: skip
"""The one door for synthetic workloads: a name and a description of their numbers."""


def make_workload(words: str) -> Workload:
    """From ``NAME`` or ``NAME,key=value,...``, such as ``hot-cold,requests=2000,rate=3``.

    Raises:
        ConfigError: there is no such workload or number, or a value is out of range.
    """
    name, *pairs = words.split(",")
    if name not in KINDS:
        raise ConfigError(f"there is no synthetic workload {name!r}; choose one of {', '.join(KINDS)}")
    try:
        kind = msgspec.convert(dict(_pair(pair) for pair in pairs), KINDS[name], strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        names = ", ".join(KINDS[name].__struct_fields__)
        raise ConfigError(f"{words}: {error} ({name} takes {names})") from None
    return Workload(words, tuple(sorted(kind.arrivals(), key=lambda arrival: arrival.at_ns)))


def output_of(arrival: Arrival) -> tuple[TokenId, ...]:
    """What a simulated worker answers."""
    start = len(arrival.prompt)
    return tuple(simulated_token(arrival.seed, start + place) for place in range(arrival.output_tokens))


def _pair(words: str) -> tuple[str, str]:
    name, equals, value = words.partition("=")
    if not equals:
        raise ValueError(f"expected key=value, not {words!r}")
    return name.strip(), value.strip()


class _Dice:
    """All that is drawn, and tokens that were never used before."""

    def __init__(self, seed: int) -> None:
        self.uniform: Callable[[], float] = random.Random(seed).random
        self._tokens = itertools.count()

    def below(self, count: int) -> int:
        return int(self.uniform() * count)

    def length(self, mean: int) -> int:
        return max(1, round(mean * (1 - SPREAD + 2 * SPREAD * self.uniform())))

    def pause_ns(self, mean_s: float) -> int:
        return round(-math.log(1 - self.uniform()) * mean_s * NS_PER_S)

    def moments(self, rate: float, count: int) -> Iterator[int]:
        at_ns = 0
        for _ in range(count):
            at_ns += self.pause_ns(1 / rate)
            yield at_ns

    def exactly(self, count: int) -> tuple[TokenId, ...]:
        return tuple(itertools.islice(self._tokens, count))

    def fresh(self, mean: int) -> tuple[TokenId, ...]:
        return self.exactly(self.length(mean))

    def request(
        self, number: int, at_ns: int, prompt: tuple[TokenId, ...], output: int, *, tenant: str = "", group: str = ""
    ) -> Arrival:
        return Arrival(
            at_ns=at_ns, request_id=f"{number}", prompt=prompt, output_tokens=self.length(output), seed=number,
            tenant=tenant, group=group,
        )  # fmt: skip
