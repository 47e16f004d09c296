"""What observers may hear. The observed emit and do not know who listens; observers never answer.

Times are clock nanoseconds. Token contents never appear: lengths and ids only.
"""

from dataclasses import dataclass
from typing import TypeAlias

from branchline.base.finish import FinishReason
from branchline.base.ids import RequestId, StepId
from branchline.core.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Submitted:
    at_ns: int
    request_id: RequestId
    prompt_tokens: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Admitted:
    at_ns: int
    request_id: RequestId
    cached_tokens: int
    """Tokens taken from the cache at this admission."""
    attempt: int
    """0 at first, +1 after each retraction."""


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


Event: TypeAlias = Submitted | Admitted | Retracted | Finished | Evicted | Planned | Committed | StepLost
