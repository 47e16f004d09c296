"""The life of a sequence: its mutable record, the verbs that change it and the table of allowed transitions.

    WAITING ──admit──▶ RUNNING ──finish──▶ FINISHED
       ▲  └─────────────finish──────────────▶ │
       └────retract────┘

Positions of a running sequence (half-open intervals, all from 0):

    [0, computed)   KV committed: computed by steps whose results have been seen
    [0, launched)   KV computed once every launched plan is done
    [0, expected)   tokens that will be known once every launched plan is done
    tokens          tokens known now: prompt, then committed output

`expected - launched` positions can be planned next: the rest of a prompt, or the one token that a step in flight is
about to sample. There are no phases.

Knows: one sequence. Refuses to know: who owns pages (`Ledger`), what is shared (`PrefixCache`), who goes first.
Only this module assigns to attributes of `Seq`; a test reads the package to make sure.
"""

import enum
from collections.abc import Sequence

from branchline.base.errors import require
from branchline.base.ids import Epoch, PageId, SeqId, Slot, StepId, TokenId
from branchline.core.plan import PlanRow, SlotOpen
from branchline.core.ports import Insertion, Path
from branchline.core.request import RequestSpec
from branchline.core.result import Usage


class State(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Verb(enum.Enum):
    ADMIT = enum.auto()
    RETRACT = enum.auto()
    FINISH = enum.auto()


TRANSITIONS: dict[tuple[State, Verb], State] = {
    (State.WAITING, Verb.ADMIT): State.RUNNING,
    (State.WAITING, Verb.FINISH): State.FINISHED,
    (State.RUNNING, Verb.RETRACT): State.WAITING,
    (State.RUNNING, Verb.FINISH): State.FINISHED,
}


class Seq:
    """One request inside the scheduler. Read it anywhere, change it only through its verbs."""

    __slots__ = (
        "arrival_ns",
        "cached_tokens",
        "chunks",
        "computed",
        "epoch",
        "expected",
        "first_admitted_ns",
        "first_token_ns",
        "followed_from",
        "last_step",
        "launched",
        "news_from",
        "page_table",
        "path",
        "pending_open",
        "prefill_end",
        "prompt_logprobs_base",
        "prompt_logprobs_done",
        "retractions",
        "seq",
        "slot",
        "spec",
        "state",
        "steps",
        "stop_ids",
        "tokens",
        "tree_pages",
        "waiting_since_ns",
    )  # fmt: skip

    def __init__(self, seq: SeqId, spec: RequestSpec, now_ns: int) -> None:
        self.seq = seq
        self.spec = spec
        self.arrival_ns = now_ns
        self.waiting_since_ns = now_ns
        """When it came, or last lost its slot."""
        self.state = State.WAITING
        self.epoch: Epoch = 0
        self.tokens: list[TokenId] = list(spec.prompt)
        self.stop_ids = spec.stop_ids
        self.slot: Slot | None = None
        self.path: Path | None = None
        self.page_table: tuple[PageId, ...] = ()
        self.tree_pages = 0
        """Leading pages of the table that the cache owns; the rest is private."""
        self.computed = 0
        self.launched = 0
        self.expected = len(self.tokens)
        self.prefill_end = len(self.tokens)
        """Tokens known at admission: below it a row is prefill, from it on decode."""
        self.last_step: StepId = 0
        """Last plan that reads or writes the pages."""
        self.pending_open = False
        self.cached_tokens: int | None = None
        self.first_admitted_ns: int | None = None
        self.first_token_ns: int | None = None
        self.followed_from: StepId | None = None
        """Plan in which it first let others go ahead because somebody computed its prefix."""
        self.chunks = 0
        """Rows that computed known tokens: parts of a prompt, and what a retraction lost."""
        self.steps = 0
        """All rows."""
        self.retractions = 0
        self.prompt_logprobs_done = 0
        self.prompt_logprobs_base = 0
        self.news_from = len(self.tokens)
        """Tokens before this one have been published."""

    # ------------------------------------------------------------ questions

    @property
    def prompt_count(self) -> int:
        return len(self.spec.prompt)

    @property
    def output_count(self) -> int:
        """Committed output tokens."""
        return len(self.tokens) - self.prompt_count

    @property
    def remaining_tokens(self) -> int:
        """New tokens it may still generate, those of steps in flight excluded."""
        return self.spec.max_new_tokens - (self.expected - self.prompt_count)

    @property
    def pending(self) -> int:
        """Positions that can be planned now. None once the steps in flight will use up ``max_new_tokens``."""
        return self.expected - self.launched if self.remaining_tokens > 0 else 0

    @property
    def is_prefilling(self) -> bool:
        return self.launched < self.prefill_end

    @property
    def private_pages(self) -> tuple[PageId, ...]:
        return self.page_table[self.tree_pages :]

    def followed_steps(self, step: StepId) -> int:
        """Plans since it first waited for a leader."""
        return 0 if self.followed_from is None else step - self.followed_from

    @property
    def match_limit(self) -> int:
        """Tokens that may come from the cache. One must be computed to get logits; all, if prompt logprobs are wanted."""
        wants_all = self.spec.sampling.prompt_logprobs is not None and self.prompt_logprobs_done < self.prompt_count - 1
        return 0 if wants_all else len(self.tokens) - 1

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_count, self.output_count, self.cached_tokens or 0)

    # ------------------------------------------------------------ verbs

    def follow(self, step: StepId) -> None:
        """Let others go ahead in the plan ``step``: a leader computes the prefix."""
        if self.followed_from is None:
            self.followed_from = step

    def admit(
        self, slot: Slot, path: Path, shared: Sequence[PageId], private: Sequence[PageId], cached_tokens: int, now_ns: int
    ) -> None:
        """Enter a slot with pages for every known token. ``cached_tokens`` positions need no computation."""
        self._go(Verb.ADMIT)
        require(0 <= cached_tokens < len(self.tokens), "at least one token must be computed")
        self.slot = slot
        self.path = path
        self.page_table = (*shared, *private)
        self.tree_pages = len(shared)
        self.computed = self.launched = cached_tokens
        self.expected = self.prefill_end = len(self.tokens)
        self.prompt_logprobs_base = self.prompt_logprobs_done
        self.pending_open = True
        if self.first_admitted_ns is None:
            self.first_admitted_ns = now_ns
            self.cached_tokens = cached_tokens

    def open_slot(self) -> SlotOpen:
        """What the worker must hear before the first row of this attempt."""
        require(self.pending_open and self.slot is not None, "a slot is opened once per attempt")
        self.pending_open = False
        slot = self.slot if self.slot is not None else 0
        return SlotOpen(
            slot, self.seq, self.epoch, tuple(self.tokens), self.prompt_count, self.spec.sampling, self.spec.seed,
            tuple(sorted(self.stop_ids)),
        )  # fmt: skip

    def extend(self, pages: Sequence[PageId]) -> None:
        """Append private pages to the table."""
        self.page_table = (*self.page_table, *pages)

    def launch(self, step: StepId, count: int) -> PlanRow:
        """Promise ``count`` positions to a step; the row that says so."""
        require(0 < count <= self.pending, "only pending positions can be launched")
        require(self.slot is not None, "only a running sequence can be launched")
        start, end = self.launched, self.launched + count
        sample = end == self.expected
        self.launched = end
        self.expected += sample
        self.steps += 1
        self.chunks += start < self.prefill_end
        self.last_step = step
        slot = self.slot if self.slot is not None else 0
        return PlanRow(
            slot, self.seq, self.epoch, start, count, sample, self.page_table, self._prompt_logprobs_from(start, end)
        )

    def commit(self, end: int, token: TokenId | None, prompt_logprobs: int) -> None:
        """A row came back: KV up to ``end`` is there, and perhaps one more token."""
        self.computed = end
        self.prompt_logprobs_done += prompt_logprobs
        if token is not None:
            self.tokens.append(token)

    def speak(self, now_ns: int) -> None:
        """Its first output token is there."""
        self.first_token_ns = now_ns

    def share(self, insertion: Insertion) -> None:
        """The cache has taken the leading pages over: use its pages and its path from now on."""
        count = len(insertion.pages)
        require(count <= len(self.page_table), "the cache cannot return more pages than it was given")
        self.page_table = insertion.pages + self.page_table[count:]
        self.tree_pages = max(self.tree_pages, count)
        self.path = insertion.path

    def publish(self) -> tuple[TokenId, ...]:
        """Tokens that were not published yet."""
        news = tuple(self.tokens[self.news_from :])
        self.news_from = len(self.tokens)
        return news

    def retract(self, now_ns: int) -> None:
        """Leave the slot with nothing but the committed tokens. Results in flight will be late."""
        self._go(Verb.RETRACT)
        self.retractions += 1
        self.waiting_since_ns = now_ns
        self._leave()
        self.expected = self.prefill_end = len(self.tokens)

    def finish(self) -> None:
        self._go(Verb.FINISH)
        self._leave()

    # ------------------------------------------------------------ inner

    def _go(self, verb: Verb) -> None:
        target = TRANSITIONS.get((self.state, verb))
        if target is None:
            require(False, f"{self.state.name} does not allow {verb.name}")
            return
        self.state = target

    def _leave(self) -> None:
        self.epoch += 1
        self.slot = None
        self.path = None
        self.page_table = ()
        self.tree_pages = 0
        self.computed = self.launched = 0
        self.pending_open = False

    def _prompt_logprobs_from(self, start: int, end: int) -> int | None:
        if self.spec.sampling.prompt_logprobs is None or start >= self.prompt_count - 1:
            return None
        first = max(start, self.prompt_logprobs_base) + 1
        return first if first <= min(end, self.prompt_count - 1) else None
