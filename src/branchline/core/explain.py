"""What the engine says about its own decisions: frozen records of ids, lengths and hashes, never of tokens.

Knows: shapes and closed sets. Refuses to know: how a figure is found (`sched.notes`, `sched.explain`, `observe.stories`),
how it is put into words (`core.words`), who may see it (`api.insight`).

Names in ``_at_ns`` are values of the engine's clock, to be compared with the ``now_ns`` of the same answer; other names in
``_ns`` are durations.
"""

import enum
from typing import ClassVar, TypeAlias

import msgspec

from branchline.base.ids import RequestId, TokenId

Mark: TypeAlias = int
"""Stands for a prefix of whole pages: a chained hash. Equal prefixes have equal marks in every namespace."""
EMPTY_MARK: Mark = 0


def extend_mark(mark: Mark, page: tuple[TokenId, ...]) -> Mark:
    """The mark of a prefix that is one page longer. Same tokens, same mark, in every process."""
    return hash((mark, page))


def show_mark(mark: Mark) -> str:
    """16 hexadecimal digits."""
    return f"{mark & (1 << 64) - 1:016x}"


# ---------------------------------------------------------------- why one waits


class WaitingCause(enum.Enum):
    """What keeps a waiting request from running: a closed set."""

    TOKEN_BUDGET = "token_budget"  # noqa: S105 - tokens of text
    """The token budget of the step was used up before it was tried."""
    KV_SHORT = "kv_short"
    """There are not enough KV pages for its prompt and the output that memory is kept for."""
    ROW_CAP = "row_cap"
    """All rows are taken."""
    FOLLOWS = "follows"
    """A running request is computing its prefix; it will be in the cache in a moment."""
    RECOVERING = "recovering"
    """Memory ran short a moment ago: nobody is admitted until there is some to spare."""
    BEHIND = "behind"
    """The request before it in the line cannot run yet."""
    PRIORITY = "priority"
    """Requests of higher priority come first."""
    FAIRNESS = "fairness"
    """Its tenant has had more than others that wait."""
    PAUSED = "paused"
    """An operator has paused the engine."""
    NOT_TRIED = "not_tried"
    """It has come, or come back, since the last step was planned."""


class Holder(msgspec.Struct, frozen=True):
    """A running request and the KV memory that is tied up in it."""

    request_id: RequestId
    own_pages: int
    """Pages nobody else holds: what is available once it ends."""
    shared_pages: int
    """Pages of a prefix that other running requests hold too."""
    remaining_tokens: int
    """Tokens it may still generate, and so at most so many steps."""


class _Cause(msgspec.Struct, frozen=True, tag_field="kind"):
    cause: ClassVar[WaitingCause]


class TokenBudget(_Cause, frozen=True, tag="token_budget"):
    cause = WaitingCause.TOKEN_BUDGET
    step_tokens: int
    decode_tokens: int
    """Of the last step: tokens for requests that generate."""
    prefill_tokens: int
    """Of the last step: tokens for prompts that run already or went first."""
    prompt_tokens_ahead: int
    """Prompt tokens that have to be computed before this request's own."""


class KvShort(_Cause, frozen=True, tag="kv_short"):
    cause = WaitingCause.KV_SHORT
    needed_pages: int
    """For its own prompt, beyond what is cached."""
    promised_pages: int
    """Kept for output to come, its own included."""
    available_pages: int
    """Free, or cached and in nobody's use."""
    short_pages: int
    holder_count: int
    holders: tuple[Holder, ...]
    """Those that hold most, largest first."""
    next_release_tokens: int | None
    """The next running request ends after so many tokens at the latest."""
    enough_after_tokens: int | None
    """So many tokens at the latest, and enough pages are free."""


class RowCap(_Cause, frozen=True, tag="row_cap"):
    cause = WaitingCause.ROW_CAP
    rows: int
    next_row_tokens: int | None
    """The next row is free after so many tokens at the latest."""


class Follows(_Cause, frozen=True, tag="follows"):
    cause = WaitingCause.FOLLOWS
    leader: RequestId
    tokens_left: int
    """Prompt tokens that the leader has still to compute."""


class Recovering(_Cause, frozen=True, tag="recovering"):
    cause = WaitingCause.RECOVERING
    available_pages: int
    needed_pages: int
    """Admission opens when so many are available, or when somebody ends."""


class Behind(_Cause, frozen=True, tag="behind"):
    cause = WaitingCause.BEHIND
    whom: RequestId
    """The first in the line that was tried and did not fit."""
    because: WaitingCause


class Priority(_Cause, frozen=True, tag="priority"):
    cause = WaitingCause.PRIORITY
    whom: RequestId
    own_priority: int
    their_priority: int
    ahead_count: int
    """Waiting requests that are preferred to it."""


class Fairness(_Cause, frozen=True, tag="fairness"):
    cause = WaitingCause.FAIRNESS
    whom: RequestId
    ahead_count: int
    """Waiting requests of other tenants that are preferred to it."""


class Paused(_Cause, frozen=True, tag="paused"):
    cause = WaitingCause.PAUSED


class NotTried(_Cause, frozen=True, tag="not_tried"):
    cause = WaitingCause.NOT_TRIED


Cause: TypeAlias = TokenBudget | KvShort | RowCap | Follows | Recovering | Behind | Priority | Fairness | Paused | NotTried


class WaitingView(msgspec.Struct, frozen=True, kw_only=True, tag_field="state", tag="waiting"):
    request_id: RequestId
    position: int
    """From 1, in the order in which the policy tries them."""
    waited_ns: int
    """Since it came, or since it lost its row."""
    prompt_tokens: int
    cached_tokens: int
    """Of what it would have to compute now."""
    retractions: int
    cause: Cause
    would_admit: str
    """What has to happen, in a sentence."""
    starts_in_ns: int | None
    """Estimate, on the safe side: running requests are taken to use all their tokens. ``None``: it cannot be known."""


# ---------------------------------------------------------------- what became of one


class MissReason(enum.Enum):
    """Why prompt tokens had to be computed although there is a cache: a closed set."""

    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    """They were cached and had to make room."""
    DIVERGED = "diverged"
    """The cache goes on differently from the first of them."""
    OTHER_NAMESPACE = "other_namespace"
    """They are, or were, cached for another tenant or salt, and must not be shared."""
    SHORTER_THAN_PAGE = "shorter_than_page"
    """Only whole pages are cached; these are the rest."""
    LOGPROBS_WANTED = "logprobs_wanted"
    """Log probabilities of the prompt need the whole prompt computed."""
    CACHE_OFF = "cache_off"


class Miss(msgspec.Struct, frozen=True, gc=False):
    """A run of prompt tokens that were not in the cache at the first admission."""

    reason: MissReason
    start: int
    """Position of its first token."""
    token_count: int
    evicted_at_ns: int | None = None
    evicted_for: RequestId = ""
    """Whose pages they had to make room for; empty for a flush."""


class RequestStory(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="state", tag="story"):
    request_id: RequestId
    tenant: str
    is_finished: bool
    finish: str
    """A finish reason; empty while it runs."""
    arrived_at_ns: int
    queue_ns: int
    """Until it was first admitted."""
    prefill_ns: int
    """From then to its first token."""
    decode_ns: int
    """From its first token on."""
    requeued_ns: int
    """Time in the line after retractions; part of the two above."""
    prompt_tokens: int
    completion_tokens: int
    chunks: int
    """Rows that computed a part of its prompt (or, after a retraction, computed anew)."""
    steps: int
    """All its rows."""
    cached_page_tokens: int
    """Taken over as whole pages."""
    cached_tail_tokens: int
    """Copied from a page that goes on differently."""
    missed: tuple[Miss, ...]
    retractions: int


RequestView: TypeAlias = WaitingView | RequestStory


def hide_others(view: RequestView) -> RequestView:
    """The same for eyes that may see one tenant only: no ids of other requests, nothing about what others have cached."""
    if isinstance(view, WaitingView):
        return msgspec.structs.replace(view, cause=_without_names(view.cause))
    missed = tuple(
        Miss(
            MissReason.NEVER_SEEN if miss.reason is MissReason.OTHER_NAMESPACE else miss.reason,
            miss.start, miss.token_count, miss.evicted_at_ns,
        )
        for miss in view.missed
    )  # fmt: skip
    return msgspec.structs.replace(view, missed=missed)


def _without_names(cause: Cause) -> Cause:
    match cause:
        case KvShort():
            return msgspec.structs.replace(cause, holders=())
        case Follows():
            return msgspec.structs.replace(cause, leader="")
        case Behind() | Priority() | Fairness():
            return msgspec.structs.replace(cause, whom="")
        case _:
            return cause


# ---------------------------------------------------------------- what was lost


class EvictionRecord(msgspec.Struct, frozen=True, kw_only=True):
    prefix: str
    """Hash of the longest prefix that was dropped, as 16 hexadecimal digits."""
    length_tokens: int
    """Length of that prefix."""
    pages: int
    """Pages dropped, from its end."""
    cost_tokens: int
    """Tokens to compute again if it is asked for."""
    last_used_at_ns: int
    evicted_at_ns: int
    caused_by: RequestId
    """The request that needed the pages; empty for a flush."""


# ---------------------------------------------------------------- the whole engine


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    waiting: int
    running: int
    oldest_waited_ns: int
    waiting_prompt_tokens: int
    by_cause: dict[str, int]
    head: WaitingView | None
    """The first in the line that was tried and did not fit, or else the first."""
    recent_stops: dict[str, int]
    """What ended the last planning passes that left somebody waiting, by cause."""


class BudgetView(msgspec.Struct, frozen=True, kw_only=True):
    """The last planning pass, and the steps of late."""

    step_tokens: int
    decode_tokens: int
    prefill_tokens: int
    recent_step_ns: int
    """Mean; 0 before the first step."""
    recent_tokens_per_s: float


class KvView(msgspec.Struct, frozen=True, kw_only=True):
    pages: int
    free: int
    evictable: int
    private: int
    tree: int
    retired: int
    promised: int
    """Kept for output of those that run, at the present ratio."""
    new_token_ratio: float
    peak_wanted: int
    """Pages for everything that runs and waits, output included: what would make waiting for memory needless."""
    holders: tuple[Holder, ...]
    """Those that hold most, largest first."""


class CacheView(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    """Since the start, of first admissions."""
    cached_tokens: int
    missed_tokens: dict[str, int]
    """By reason."""
    recent_prompt_tokens: int
    """Of the last first admissions (``sched.notes.RECENT_ADMISSIONS``)."""
    recent_cached_tokens: int
    recent_missed_tokens: dict[str, int]
    evicted_pages: int
    retractions: int
    evictions: tuple[EvictionRecord, ...]
    """The last ones, newest first."""


class SettingsView(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that decide how long a line gets."""

    policy: str
    max_running: int
    max_queued: int
    max_step_tokens: int
    max_chunk_tokens: int | None
    pages: int
    page_size: int
    context_length: int
    prefix_cache: bool


class SchedulerView(msgspec.Struct, frozen=True, kw_only=True):
    now_ns: int
    paused: bool
    draining: bool
    queue: QueueView
    budget: BudgetView
    kv: KvView
    cache: CacheView
    settings: SettingsView


# ---------------------------------------------------------------- lists and trees


class RequestLine(msgspec.Struct, frozen=True):
    request_id: RequestId
    state: str
    """``waiting`` or ``running``."""
    cause: str
    """Of a waiting one; empty for a running one."""
    age_ns: int
    prompt_tokens: int
    completion_tokens: int


class RequestList(msgspec.Struct, frozen=True):
    now_ns: int
    requests: tuple[RequestLine, ...]
    omitted: int
    """Live requests beyond the bound."""


class RequestAnswer(msgspec.Struct, frozen=True):
    """All that is known under one id: several choices if it is the id of a call."""

    id: RequestId
    now_ns: int
    choices: tuple[RequestView, ...]


class TreeNode(msgspec.Struct, frozen=True):
    """A run of cached pages."""

    prefix: str
    """Hash of everything from the root to its end, as 16 hexadecimal digits."""
    tokens: int
    """Of this node alone."""
    locks: int
    """Running requests below it."""
    last_used_at_ns: int
    children: tuple["TreeNode", ...] = ()
    omitted: int = 0
    """Children beyond the bound."""


class CacheTree(msgspec.Struct, frozen=True):
    now_ns: int
    pages: int
    """In the whole cache."""
    roots: tuple[TreeNode, ...]
    """One per namespace; ``prefix`` stands for the namespace and ``tokens`` is 0."""
