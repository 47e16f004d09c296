"""What must be true of a whole engine after every launch and every turn (reliability I1-I24, as far as they apply).

`Scheduler.check` proves the books from the inside. This module proves them from the outside: it sees every plan, every
event, the memory of the stamped worker, and compares. Checks that cost little run every turn; `deep` reads everything.
`docs/proof.md` has the table of invariants and where each is checked.
"""

from branchline.base.finish import FinishReason
from branchline.cache.pages import PageKind
from branchline.cache.radix import RadixCache
from branchline.core.events import Admitted, Finished, Retracted, Submitted
from branchline.core.plan import PlanRow, StepPlan
from branchline.sched.admission import common_prefix
from branchline.sched.lifecycle import Seq
from tests.support.stamped import path_stamps, root_stamp

FOLLOW_PAGES = 2
"""Whoever waits for a leader shares at least so many pages of prompt with somebody who runs."""
STALLED_TURNS = 1
"""Turns in a row in which somebody is here, nobody paused, and yet nothing is committed and nobody ends."""


class Proof:
    """An observer of the scheduler and of the worker of one harness."""

    def __init__(self) -> None:
        self.submitted_ns: dict[str, int] = {}
        self.admitted_ns: dict[str, int] = {}
        self.finished: dict[str, Finished] = {}
        self.seq_of: dict[str, int] = {}
        self.cancelled: set[str] = set()
        """Whose cancellation is in the inbox now."""
        self.is_forcing = False
        """The test itself retracts somebody: policy is not to blame."""
        self.is_paused = False
        self.is_quiet = False
        self._line: dict[str, int] = {}
        """Arrival numbers of those who have not been admitted yet."""
        self._number: dict[str, int] = {}
        """Of everyone."""
        self._uncached: dict[str, int] = {}
        """Known tokens that had to be computed, over all admissions."""
        self._stalled = 0
        self._last_progress = (0, 0)
        self._known: dict[int, int] = {}
        """Most computed tokens ever, by sequence."""
        self._grown_turn = 0

    def watch(self, harness) -> None:
        self.harness = harness
        self._roster = harness.scheduler._roster
        self._states = harness.ledger._states
        self._page_size = harness.config.page_size
        harness.worker.on_launch = self.launched

    # ------------------------------------------------------------ events

    def notice(self, event) -> None:
        match event:
            case Submitted():
                self.submitted_ns[event.request_id] = event.at_ns
                self._line[event.request_id] = self._number[event.request_id] = len(self._number)
            case Admitted():
                self._note_admission(event)
            case Retracted():
                self._note_retraction(event)
            case Finished():
                self._line.pop(event.request_id, None)
                if event.reason is not FinishReason.REJECTED:
                    assert event.request_id not in self.finished, f"{event.request_id} ended twice"
                    self.finished[event.request_id] = event

    def _note_admission(self, event: Admitted) -> None:
        name, place = event.request_id, self._line.pop(event.request_id, None)
        seq = self._roster.find(name)
        assert seq is not None, f"{name} was admitted and is not here"
        if place is not None:
            for passed, number in self._line.items():
                assert number > place or self._may_pass(seq, self._roster.find(passed)), f"I13: {name} overtook {passed}"
        self.seq_of[name] = seq.seq
        self.admitted_ns.setdefault(name, event.at_ns)
        self._uncached[name] = self._uncached.get(name, 0) + len(seq.tokens) - seq.computed

    def _may_pass(self, seq: Seq, elder: Seq) -> bool:
        """I13, I14: what each policy promises. Whoever follows a leader may be passed under all of them."""
        config = self.harness.config
        match config.policy:
            case "fcfs":
                return self._is_led(elder)
            case "priority":
                return seq.spec.priority > elder.spec.priority or self._is_led(elder)
            case "hrrn":
                return self._spent_after(elder.spec.request_id) < config.overtake_tokens or self._is_led(elder)
        return True

    def _spent_after(self, name: str) -> int:
        """Tokens that the engine has computed and generated for those who came later."""
        later = [other for other, number in self._number.items() if number > self._number[name]]
        return sum(self._uncached.get(other, 0) + self._generated(other) for other in later)

    def _generated(self, name: str) -> int:
        seq, end = self._roster.find(name), self.finished.get(name)
        return seq.output_count if seq is not None else end.completion_tokens if end is not None else 0

    def _is_led(self, seq: Seq) -> bool:
        enough = FOLLOW_PAGES * self._page_size
        return any(
            other.spec.namespace == seq.spec.namespace and common_prefix(other.tokens, seq.tokens) >= enough
            for other in self._roster.running.values()
        )

    def _note_retraction(self, event: Retracted) -> None:
        """I12: the oldest is never taken off, so that somebody always comes to an end."""
        if self.is_forcing or self.harness.config.policy == "priority":
            return
        mine = self.seq_of[event.request_id]
        others = [seq for seq in self._roster.running if seq != mine]
        assert others, f"{event.request_id} was retracted though it ran alone"
        assert min(others) < mine, f"{event.request_id} was retracted though it is the oldest"

    # ------------------------------------------------------------ launches

    def launched(self, plan: StepPlan) -> None:
        config = self.harness.config
        assert plan.token_count <= config.max_step_tokens, f"I9: step {plan.step} has {plan.token_count} tokens"
        assert len(plan.rows) <= config.max_running, "I9: more rows than slots"
        for row in plan.rows:
            seq = self._roster.running.get(row.seq)
            assert seq is not None, f"I19: a row of {row.seq}, which does not run"
            assert (row.epoch, row.slot) == (seq.epoch, seq.slot), "I19: a row of another epoch, or in another slot"
            self._check_row(seq, row)
        for copy in plan.copies:
            assert self._states[copy.target].kind is PageKind.PRIVATE, "I1: a copy onto a page that is not private"
            assert self._used_until(copy.source) >= plan.step, f"I2: the source of a copy is not held until {plan.step}"
        for opening in plan.opens:
            self._check_opening(opening)

    def _used_until(self, page: int) -> int:
        """Last step that may use a page which is not private, as ledger or tree know it."""
        state = self._states[page]
        if state.kind is not PageKind.TREE:
            return state.until or 0
        return next(node.last_step for node, _ in self._nodes() if page in node.pages)

    def _nodes(self):
        """Every node of the tree with the stamp of the prefix before it."""
        for namespace, root in self.harness.cache._roots.items():
            waiting = [(child, root_stamp(namespace)) for child in root.children.values()]
            while waiting:
                node, stamp = waiting.pop()
                yield node, stamp
                if node.children:
                    end = path_stamps(stamp, [token for chunk in node.chunks for token in chunk])[-1]
                    waiting.extend((child, end) for child in node.children.values())

    def _check_row(self, seq: Seq, row: PlanRow) -> None:
        size, cap = self._page_size, self.harness.config.max_chunk_tokens
        assert row.count >= 1, "I9: an empty row"
        if row.start < seq.prefill_end:
            assert cap is None or row.count <= cap, f"I9: a chunk of {row.count} tokens"
        else:
            assert row.count == 1, "I9: a decode row of several tokens"
        if row.sample:
            assert row.end < len(seq.spec.prompt) + seq.spec.max_new_tokens, "a token beyond max_new_tokens is computed"
        assert row.pages == seq.page_table, "I8: a row with another page table"
        assert row.end <= len(row.pages) * size, "I8: a position without a page"
        for page in row.pages[row.start // size : (row.end - 1) // size + 1]:
            state = self._states[page]
            assert (state.kind, state.owner) == (PageKind.PRIVATE, row.seq), f"I1: {row.seq} writes a page that is {state}"

    def _check_opening(self, opening) -> None:
        """I19: everything per row is that of its own request."""
        seq = self._roster.running[opening.seq]
        spec = seq.spec
        mine = (opening.slot, opening.epoch, opening.sampling, opening.seed, opening.stop_ids, opening.prompt_count)
        assert mine == (seq.slot, seq.epoch, spec.sampling, spec.seed, tuple(sorted(spec.stop_ids)), len(spec.prompt)), (
            f"I19: {spec.request_id} is opened as {mine}"
        )
        assert opening.tokens == tuple(seq.tokens), "I19: a slot is opened with tokens of somebody else"
        assert opening.tokens[: len(spec.prompt)] == spec.prompt, "I19: a prompt has changed"

    # ------------------------------------------------------------ turns

    def after_turn(self) -> None:
        now_ns = self.harness.clock.now_ns()
        self._check_pages()
        for name in self.cancelled:
            assert self._roster.find(name) is None, f"I17: {name} is alive after its cancellation was received"
        self.cancelled.clear()
        scheduler, config = self.harness.scheduler, self.harness.config
        assert len(self._line) <= config.max_queued, f"I23: {len(self._line)} requests wait"
        waiting_tokens = [len(self._roster.find(name).spec.prompt) for name in self._line]
        most_tokens = config.max_queued_tokens
        assert len(waiting_tokens) < 2 or most_tokens is None or sum(waiting_tokens) <= most_tokens, "I23: tokens wait"
        for seq in self._roster.everyone():
            deadline = self._deadline_ns(seq)
            assert deadline is None or now_ns < deadline, f"I21: {seq.spec.request_id} is alive after its deadline"
            assert deadline is None or scheduler.next_wakeup_ns() <= deadline, "I21: the loop would sleep too long"
        self._check_progress()
        if self.is_quiet:
            self._check_growth()

    def _deadline_ns(self, seq: Seq) -> int | None:
        name, config = seq.spec.request_id, self.harness.config
        if name in self.admitted_ns:
            limits = [(self.admitted_ns[name], config.running_timeout_s)]
        else:
            limits = [(self.submitted_ns[name], config.waiting_timeout_s)]
        limits.append((self.submitted_ns[name], seq.spec.timeout_s))
        return min((since + int(limit * 1e9) for since, limit in limits if limit is not None), default=None)

    def _check_pages(self) -> None:
        """I1, I2, I5: what is used is not free, what is retired has somebody to wait for."""
        states, queue, ledger = self._states, self.harness.worker.queue, self.harness.ledger
        for plan in queue:
            for row in plan.rows:
                for page in row.pages:
                    assert states[page].kind is not PageKind.FREE, f"I2: page {page} is free while step {plan.step} uses it"
            for copy in plan.copies:
                assert states[copy.source].kind is not PageKind.FREE, "I2: the source of a copy in flight is free"
        newest = queue[-1].step if queue else ledger.settled_step
        for step in ledger._retired:
            assert ledger.settled_step < step <= newest, f"I2: pages wait for step {step}, the newest is {newest}"
        for seq in self._roster.running.values():
            for place, page in enumerate(seq.page_table):
                wanted = PageKind.TREE if place < seq.tree_pages else PageKind.PRIVATE
                assert states[page].kind is wanted, f"I5: {seq.seq} holds page {page}, which is {states[page]}"

    def _check_progress(self) -> None:
        """I11: if anybody is here, a step is committed or somebody ends, every turn."""
        stats = self.harness.scheduler._counters
        progress = (stats.steps + stats.failed_steps, sum(stats.finished.values()))
        is_stalled = progress == self._last_progress and len(self._roster) and not self.is_paused
        self._stalled = self._stalled + 1 if is_stalled else 0
        self._last_progress = progress
        assert self._stalled <= STALLED_TURNS, f"I11: nothing happens, and {len(self._roster)} requests are here"

    def _check_growth(self) -> None:
        """I12: the most that was ever computed of everyone grows, as soon as all could have been computed again."""
        for seq in self._roster.running.values():
            if seq.computed > self._known.get(seq.seq, -1):
                self._known[seq.seq] = seq.computed
                self._grown_turn = self.harness.turns
        patience = 16 + 2 * sum(len(seq.tokens) for seq in self._roster.everyone())
        if len(self._roster):
            assert self.harness.turns - self._grown_turn <= patience, "I12: retracted and computed again, for ever"

    def quieten(self) -> None:
        """Nobody disturbs from now on: liveness counts."""
        self.is_quiet, self.is_paused = True, False
        self._grown_turn = self.harness.turns

    # ------------------------------------------------------------ everything

    def deep(self) -> None:
        self.harness.scheduler.check()
        if isinstance(self.harness.cache, RadixCache):
            self._check_meaning()
            for seq in self._roster.running.values():
                self._check_path(seq)

    def _check_meaning(self) -> None:
        """I7: every page of the tree holds the KV of the tokens that lead to it."""
        memory, size = self.harness.worker.memory, self._page_size
        for node, stamp in self._nodes():
            stamps = path_stamps(stamp, [token for chunk in node.chunks for token in chunk])[1:]
            for place, page in enumerate(node.pages):
                held = stamps[place * size : (place + 1) * size]
                assert memory[page] == held, f"I7: page {page} of the tree does not hold what its path says"

    def _check_path(self, seq: Seq) -> None:
        """I8: the shared pages of a sequence are those on its path, with its tokens: it locks what it uses."""
        nodes = [*seq.path.upward()][::-1]
        pages = [page for node in nodes for page in node.pages]
        tokens = [token for node in nodes for chunk in node.chunks for token in chunk]
        count = seq.tree_pages
        assert list(seq.page_table[:count]) == pages, "I8: shared pages are not those of the path"
        assert seq.tokens[: count * self._page_size] == tokens, "I8: the path has other tokens"
