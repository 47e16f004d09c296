"""Which of several replicas gets a request. Policies are pure objects: they see a key and loads, and name a replica.

The key is the beginning of the prompt as a sequence, of tokens or of characters: policies compare, they do not read.
Cache-aware routing follows SGLang's router (sgl-model-gateway, ``cache_aware`` policy), with the defaults of its launcher.

Knows: keys, requests in flight per replica, its own past choices. Refuses to know: sockets, health checks, what replicas
hold.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from branchline.base.errors import ConfigError
from branchline.router.tree import PrefixTree

Replica: TypeAlias = int
Loads: TypeAlias = Mapping[Replica, int]
"""Requests in flight of every replica that may be chosen, at least one. Ties go to the one that comes first."""


class RoutingPolicy(Protocol):
    def choose(self, key: Sequence[Any], loads: Loads) -> Replica:
        """One of ``loads``."""


class RoundRobin:
    """One after the other, whatever they do."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, key: Sequence[Any], loads: Loads) -> Replica:
        replicas = list(loads)
        self._turn += 1
        return replicas[(self._turn - 1) % len(replicas)]


class LeastLoad:
    """The one with the fewest requests in flight."""

    def choose(self, key: Sequence[Any], loads: Loads) -> Replica:
        return least_loaded(loads)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When cache-aware routing believes its tree, and when it does not."""

    match_share: float = 0.3
    """A replica is followed if it has seen more than this share of the key."""
    imbalance: int = 64
    """Loads are out of balance if they differ by more than this many requests, and ..."""
    imbalance_ratio: float = 1.5
    """... the largest is more than so many times the smallest."""
    tree_size: int = 1 << 26
    """Tokens or characters that the tree remembers at most."""

    def __post_init__(self) -> None:
        """Raises ConfigError: a threshold is out of range."""
        if not 0 <= self.match_share <= 1:
            raise ConfigError(f"match_share must be between 0 and 1, not {self.match_share!r}")
        if self.imbalance < 0 or self.imbalance_ratio < 1 or self.tree_size < 1:
            raise ConfigError("imbalance must not be negative, imbalance_ratio and tree_size must be at least 1")


class CacheAware:
    """The replica that has seen the longest prefix of the key, unless loads are out of balance or nobody has seen enough of
    it: then the least loaded one.

    The tree is guesswork: it holds what was sent where, not what the caches of the replicas still keep. Unlike the original,
    a match counts only if its replica may be chosen: if the best one is down, the next best is found, not the first in line.
    """

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self._thresholds = thresholds or Thresholds()
        self._tree = PrefixTree(self._thresholds.tree_size)

    def choose(self, key: Sequence[Any], loads: Loads) -> Replica:
        replica = least_loaded(loads) if self._out_of_balance(loads) else self._by_match(key, loads)
        self._tree.insert(key, replica)
        return replica

    def forget(self, replica: Replica) -> None:
        """This replica has lost its cache, or is gone."""
        self._tree.forget(replica)

    def _by_match(self, key: Sequence[Any], loads: Loads) -> Replica:
        matched, replica = self._tree.match(key, loads)
        if replica is None or matched <= self._thresholds.match_share * len(key):
            return least_loaded(loads)
        return replica

    def _out_of_balance(self, loads: Loads) -> bool:
        most, least = max(loads.values()), min(loads.values())
        return most - least > self._thresholds.imbalance and most > self._thresholds.imbalance_ratio * least


def least_loaded(loads: Loads) -> Replica:
    return min(loads, key=lambda replica: loads[replica])


ROUTING: dict[str, Callable[[], RoutingPolicy]] = {
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "cache-aware": CacheAware,
}
"""The one door for routing policies: a name and a way to make it."""
