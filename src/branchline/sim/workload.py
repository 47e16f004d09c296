"""What arrives and when: the requests of a trace or of a synthetic workload, ready for the scheduler.

Tokens are names only: two prompts share a prefix exactly as far as their tokens are equal. Knows: requests and their times.
Refuses to know: file formats (``sim.traces``), how requests are made up (``sim.synthetic``), how they are served.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import msgspec

from branchline.base.errors import ConfigError
from branchline.base.ids import RequestId, TokenId
from branchline.core.request import Namespace, RequestSpec, SamplingParams
from branchline.wire.messages import Cancel, Submit, ToEngine

_SAMPLING = SamplingParams(ignore_eos=True)

TimedMessage: TypeAlias = tuple[int, ToEngine]
"""When it arrives, in nanoseconds of virtual time, and what."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One request. It generates exactly ``output_tokens`` tokens unless it leaves before."""

    at_ns: int
    request_id: RequestId
    prompt: tuple[TokenId, ...]
    output_tokens: int
    seed: int = 0
    """Which tokens are generated: see ``sim.worker.simulated_token``."""
    tenant: str = ""
    salt: str = ""
    priority: int = 0
    user: str = ""
    timeout_s: float | None = None
    group: str = ""
    """For reports: requests of one kind. The scheduler does not see it."""
    leaves_ns: int | None = None
    """When the client goes away."""

    def messages(self) -> Iterator[TimedMessage]:
        """What the engine hears of it."""
        yield self.at_ns, Submit(self.spec())
        if self.leaves_ns is not None:
            yield self.leaves_ns, Cancel(self.request_id)

    def spec(self) -> RequestSpec:
        return RequestSpec(
            request_id=self.request_id, prompt=self.prompt, sampling=_SAMPLING, max_new_tokens=self.output_tokens,
            seed=self.seed, namespace=Namespace(tenant=self.tenant, salt=self.salt), priority=self.priority,
            user=self.user, timeout_s=self.timeout_s,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals in the order of their times, at least one."""

    name: str
    arrivals: tuple[Arrival, ...]
    note: str = ""
    """What was changed on the way here, such as a scale; for people."""

    def __post_init__(self) -> None:
        if not self.arrivals:
            raise ConfigError(f"{self.name} holds no requests")
        if any(one.at_ns > other.at_ns for one, other in zip(self.arrivals, self.arrivals[1:], strict=False)):
            raise ConfigError(f"the requests of {self.name} are not in the order of their times")

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(arrival.prompt) for arrival in self.arrivals)

    @property
    def output_tokens(self) -> int:
        return sum(arrival.output_tokens for arrival in self.arrivals)

    @property
    def longest_tokens(self) -> int:
        """Prompt and output of the longest request."""
        return max(len(arrival.prompt) + arrival.output_tokens for arrival in self.arrivals)

    @property
    def span_ns(self) -> int:
        """From the first arrival to the last."""
        return self.arrivals[-1].at_ns - self.arrivals[0].at_ns

    def most_pages(self, page_size: int) -> int:
        """Pages with which nothing has ever to be evicted, whatever the order: as if nobody shared anything.

        A page more for each request: the one that a diverging prefix is copied into."""
        return sum(-(-(len(a.prompt) + a.output_tokens) // page_size) + 1 for a in self.arrivals)

    def at_rate(self, factor: float) -> "Workload":
        """The same requests, arriving ``factor`` times as fast."""
        if factor == 1:
            return self
        arrivals = [msgspec.structs.replace(
            a, at_ns=round(a.at_ns / factor), leaves_ns=None if a.leaves_ns is None else round(a.leaves_ns / factor)
        ) for a in self.arrivals]  # fmt: skip
        return replace(self, arrivals=tuple(arrivals), note=_and(self.note, f"arriving {factor:g} times as fast"))

    def busiest(self, count: int) -> "Workload":
        """The ``count`` consecutive requests that arrive in the shortest time, weighed by what they ask for."""
        if len(self) <= count:
            return self
        work = [0]
        for arrival in self.arrivals:
            work.append(work[-1] + len(arrival.prompt) + arrival.output_tokens)
        starts = range(len(self) - count + 1)
        start = max(starts, key=lambda s: (work[s + count] - work[s]) / (1 + self._span_ns(s, s + count)))
        chosen = self.arrivals[start : start + count]
        return replace(self, arrivals=chosen, note=_and(self.note, f"the busiest {count} of {len(self)} requests"))

    def first(self, count: int) -> "Workload":
        if len(self) <= count:
            return self
        note = _and(self.note, f"the first {count} of {len(self)} requests")
        return replace(self, arrivals=self.arrivals[:count], note=note)

    def _span_ns(self, start: int, end: int) -> int:
        return self.arrivals[end - 1].at_ns - self.arrivals[start].at_ns


def best_hit_rate(arrivals: Sequence[Arrival]) -> float:
    """Share of the prompt tokens that an unlimited cache could serve if every request came after the one before had ended.

    Only prompts are counted as content; at least one token of each prompt must be computed. Exact to the token, by sorting:
    the longest prefix shared with anything earlier is shared with a neighbour in sorted order of those earlier.
    """
    known: dict[tuple[str, str], list[tuple[TokenId, ...]]] = {}
    hit = total = 0
    for arrival in arrivals:
        seen = known.setdefault((arrival.tenant, arrival.salt), [])
        place = bisect.bisect_left(seen, arrival.prompt)
        near = seen[max(place - 1, 0) : place + 1]
        hit += min(max((_common(arrival.prompt, other) for other in near), default=0), len(arrival.prompt) - 1)
        total += len(arrival.prompt)
        seen.insert(place, arrival.prompt)
    return hit / total


def _common(one: tuple[TokenId, ...], other: tuple[TokenId, ...]) -> int:
    """Length of the common prefix, by bisection over slices."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _and(note: str, more: str) -> str:
    return f"{note}, {more}" if note else more
