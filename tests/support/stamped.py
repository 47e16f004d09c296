"""A worker without numbers that notices every mistake in page tables.

Each KV position holds a stamp: a hash of the namespace and of all tokens up to it. A row reads the stamps of everything
before it through the page table it was given and compares them with those of its own tokens, then writes its own. The
next token is a pure function of (seed, stamp). So it detects, exactly: wrong page tables, pages reused too early, wrong
chunk borders, stale rows, KV of another namespace, lost or doubled tokens, wrong resumption after a retraction.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from zlib import crc32

from branchline.base.errors import StepFailed
from branchline.base.rng import mix64
from branchline.core.plan import PlanRow, SlotOpen, StepPlan
from branchline.core.request import Namespace
from branchline.core.result import RowResult, StepResult, TokenLogprobs

EMPTY = -1
NOBODY = Namespace()


def root_stamp(namespace: Namespace) -> int:
    """Where the stamps of a namespace begin; 0 for the empty one."""
    parts = (namespace.model, namespace.adapter, namespace.tenant, namespace.salt)
    return mix64(crc32(repr(parts).encode())) if any(parts) else 0


def extend_stamp(stamp: int, token: int) -> int:
    return mix64(stamp * 31 + token + 1)


def path_stamps(root: int, tokens: Sequence[int]) -> list[int]:
    """``[i]`` is the stamp after the first ``i`` tokens."""
    stamps = [root]
    for token in tokens:
        stamps.append(extend_stamp(stamps[-1], token))
    return stamps


def next_token(seed: int, stamp: int, vocabulary: int) -> int:
    return mix64(seed ^ stamp) % vocabulary


def reference_output(prompt, seed, vocabulary, max_new_tokens, stop_ids=(), namespace=NOBODY, alphabet=None):
    """What a request must generate, whatever the schedule."""
    letters = alphabet or range(vocabulary)
    stamp = path_stamps(root_stamp(namespace), prompt)[-1]
    output = []
    while len(output) < max_new_tokens:
        output.append(letters[next_token(seed, stamp, vocabulary)])
        if output[-1] in stop_ids:
            break
        stamp = extend_stamp(stamp, output[-1])
    return output


@dataclass(frozen=True)
class StampTicket:
    step: int


class Tenant:
    def __init__(self, opening: SlotOpen, root: int) -> None:
        self.key = (opening.seq, opening.epoch)
        self.opening = opening
        self.tokens = list(opening.tokens)
        self.is_broken = False
        self.stamps = path_stamps(root, self.tokens)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.stamps.append(extend_stamp(self.stamps[-1], token))


class StampedWorker:
    """Implements the Worker port. Steps run when they are collected, as late as can be."""

    def __init__(self, page_count: int, page_size: int, vocabulary: int = 97) -> None:
        self.page_size = page_size
        self.vocabulary = vocabulary
        self.alphabet: Sequence[int] = range(vocabulary)
        """Which tokens the numbers below ``vocabulary`` stand for."""
        self.memory = [[EMPTY] * page_size for _ in range(page_count)]
        self.tenants: dict[int, Tenant] = {}
        self.queue: deque[StepPlan] = deque()
        self.fail_steps: set[int] = set()
        self.bad_rows: set[tuple[int, int]] = set()
        """(step, row index) that report an error of their own."""
        self.harmed: set[int] = set()
        """Sequences that had a row in a failed step, or a bad row: nobody else may end with an error."""
        self.root_of: Callable[[int], int] = lambda seq: 0
        """Root stamp of a sequence, asked at launch: the plan does not tell the worker its namespace."""
        self._roots: dict[int, int] = {}
        self.on_launch: Callable[[StepPlan], None] = lambda plan: None
        """Hears each plan before anything else happens to it."""
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> StampTicket:
        self.on_launch(plan)
        assert plan.rows, "an empty plan"
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "two rows in one slot"
        self._assert_no_page_in_use_is_written(plan)
        self._roots.update((opening.seq, self.root_of(opening.seq)) for opening in plan.opens)
        self.queue.append(plan)
        self.plans.append(plan)
        return StampTicket(plan.step)

    def collect(self, ticket: StampTicket) -> StepResult:
        plan = self.queue.popleft()
        assert plan.step == ticket.step, "collected out of order"
        for opening in plan.opens:
            self.tenants[opening.slot] = Tenant(opening, self._roots[opening.seq])
        if plan.step in self.fail_steps:
            self._lose(plan)
            raise StepFailed("injected")
        for copy in plan.copies:
            source = self.memory[copy.source][: copy.token_count]
            assert EMPTY not in source, "a copy of positions that were never computed"
            self.memory[copy.target] = source + [EMPTY] * (self.page_size - copy.token_count)
        rows = [self._run(plan.step, index, row) for index, row in enumerate(plan.rows)]
        return StepResult(plan.step, tuple(rows), 1000)

    def close(self) -> None:
        pass

    def _lose(self, plan: StepPlan) -> None:
        """Whatever was half written is garbage."""
        for row in plan.rows:
            self.tenants[row.slot].is_broken = True
            self.harmed.add(row.seq)
            for position in range(row.start, row.end):
                self.memory[row.pages[position // self.page_size]][position % self.page_size] = EMPTY

    def _run(self, step: int, index: int, row: PlanRow) -> RowResult:
        tenant = self.tenants[row.slot]
        if tenant.key != (row.seq, row.epoch):
            raise AssertionError(f"row of {row.seq, row.epoch} in a slot of {tenant.key}")
        if tenant.is_broken:  # an earlier row of this sequence was lost: this one has nothing to stand on
            return RowResult(row.seq, row.epoch, error="an earlier step of this sequence failed")
        assert row.end <= len(tenant.tokens), "a row computes tokens nobody knows yet"
        self._read(step, row, tenant)
        self._write(row, tenant)
        if (step, index) in self.bad_rows:
            tenant.is_broken = True
            self.harmed.add(row.seq)
            return RowResult(row.seq, row.epoch, error="injected")
        prompt_logprobs = self._prompt_logprobs(tenant, row)
        if not row.sample:
            return RowResult(row.seq, row.epoch, prompt_logprobs=prompt_logprobs)
        assert row.end == len(tenant.tokens), "sampling in the middle of known tokens"
        token = self.alphabet[next_token(tenant.opening.seed, tenant.stamps[row.end], self.vocabulary)]
        tenant.append(token)
        wanted = tenant.opening.sampling.logprobs
        logprobs = TokenLogprobs(token, -1.0) if wanted is not None else None
        return RowResult(row.seq, row.epoch, token, logprobs, prompt_logprobs)

    def _prompt_logprobs(self, tenant: Tenant, row: PlanRow) -> tuple[TokenLogprobs, ...]:
        if row.prompt_logprobs_from is None:
            return ()
        last = min(row.end, tenant.opening.prompt_count - 1)
        return tuple(TokenLogprobs(tenant.tokens[p], -float(p)) for p in range(row.prompt_logprobs_from, last + 1))

    def _read(self, step: int, row: PlanRow, tenant: Tenant) -> None:
        size = self.page_size
        for place in range(-(-row.start // size)):
            first, last = place * size, min((place + 1) * size, row.start)
            found = self.memory[row.pages[place]][: last - first]
            assert found == tenant.stamps[first + 1 : last + 1], f"step {step}: positions {first}..{last} hold foreign KV"

    def _write(self, row: PlanRow, tenant: Tenant) -> None:
        for position in range(row.start, row.end):
            page = self.memory[row.pages[position // self.page_size]]
            page[position % self.page_size] = tenant.stamps[position + 1]

    def _written_pages(self, plan: StepPlan) -> dict[int, tuple[int, int]]:
        size = self.page_size
        return {
            page: (row.seq, row.epoch)
            for row in plan.rows
            for page in row.pages[row.start // size : (row.end - 1) // size + 1]
        }

    def _assert_no_page_in_use_is_written(self, plan: StepPlan) -> None:
        """Pages of a plan in flight may be written by their own sequence only: that is what retiring pages is for."""
        if not self.queue:
            return
        owners = self._written_pages(plan)
        written = owners | {copy.target: (-1, -1) for copy in plan.copies}
        for earlier in self.queue:
            for row in earlier.rows:
                for page in row.pages:
                    assert page not in written or owners.get(page) == (row.seq, row.epoch), (
                        f"page {page} is written by step {plan.step} while step {earlier.step} uses it"
                    )
            for copy in earlier.copies:
                assert copy.source not in written, "the source of a copy in flight is overwritten"
