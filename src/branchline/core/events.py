"""What observers may hear. The observed emit and do not know who listens; observers never answer.

Times are clock nanoseconds. Token contents never appear: lengths and ids only.
"""

from dataclasses import dataclass
from typing import TypeAlias

from branchline.base.finish import FinishReason
from branchline.base.ids import RequestId, StepId
from branchline.core.explain import Miss
from branchline.core.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Submitted:
    at_ns: int
    request_id: RequestId
    prompt_tokens: int
    max_new_tokens: int
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Admitted:
    at_ns: int
    request_id: RequestId
    cached_tokens: int
    """Tokens taken from the cache at this admission."""
    attempt: int
    """0 at first, +1 after each retraction."""
    tail_tokens: int = 0
    """Of the cached ones, those copied from a page that goes on differently."""
    missed: tuple[Miss, ...] = ()
    """At first: why prompt tokens were not in the cache. Empty without notes."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    at_ns: int
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Retracted:
    at_ns: int
    request_id: RequestId
    computed_tokens: int
    pages_given_back: int


@dataclass(frozen=True, slots=True)
class Finished:
    at_ns: int
    request_id: RequestId
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    chunks: int = 0
    """Rows that computed known tokens."""
    steps: int = 0
    """All rows."""


@dataclass(frozen=True, slots=True)
class Evicted:
    at_ns: int
    page_count: int


@dataclass(frozen=True, slots=True)
class Planned:
    at_ns: int
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Committed:
    at_ns: int
    step: StepId
    duration_ns: int


@dataclass(frozen=True, slots=True)
class StepLost:
    at_ns: int
    step: StepId
    message: str


Event: TypeAlias = Submitted | Admitted | FirstToken | Retracted | Finished | Evicted | Planned | Committed | StepLost
