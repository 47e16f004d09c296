"""Every schedule of a small engine: three requests on six pages, overlap 1, all orders of what may happen.

    submit r     once per request            step          one turn of the loop
    abort r      while it is alive           retract       the youngest that runs goes back into the line

Breadth first. Two states are one if they differ only in names: pages, steps, sequences and times are numbered by their
first appearance, and the two requests that are alike may change places. A state is reached again by repeating the
actions that led to it, so nothing has to be copied. Everything is checked in every state; where nothing more can be
submitted the engine must come to rest with the right answers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from branchline.base.finish import FinishReason
from tests.support.harness import Harness
from tests.support.proof import Proof
from tests.support.stamped import reference_output

VOCABULARY = 3
REQUESTS = {
    "a": {"prompt": (0, 1, 2, 0, 1), "max_new": 4, "seed": 1},
    "b": {"prompt": (0, 1, 2, 0, 1), "max_new": 4, "seed": 1},
    "c": {"prompt": (0, 1, 2, 2, 2, 1), "max_new": 3, "seed": 2},
}
"""Two alike, and one that shares a page and a half with them. All three together do not fit."""
SETTINGS = {
    "pages": 6, "page_size": 2, "max_running": 3, "max_step_tokens": 4, "max_chunk_tokens": 3, "depth": 1, "policy": "fcfs",
}  # fmt: skip

Action = tuple[str, str]
STEP: Action = ("step", "")
RETRACT: Action = ("retract", "")


@dataclass(frozen=True)
class Explored:
    depth: int
    states: int
    edges: int
    ends: int
    """States at the full depth or without successors, each run to its end and judged."""


class SmallEngine:
    def __init__(self) -> None:
        self.proof = Proof()
        self.harness = Harness([self.proof], vocabulary=VOCABULARY, check_every=10**9, **SETTINGS)
        self.proof.watch(self.harness)
        self.aborted: set[str] = set()

    def apply(self, action: Action) -> None:
        kind, name = action
        harness = self.harness
        match kind:
            case "submit":
                harness.submit(name, **REQUESTS[name])
                self._receive()
            case "abort":
                self.aborted.add(name)
                harness.cancel(name)
                self._receive()
            case "retract":
                self.proof.is_forcing = True
                harness.scheduler.retract_youngest(harness.clock.now_ns())
                self.proof.is_forcing = False
            case "step":
                harness.turn()
                self.proof.after_turn()

    def _receive(self) -> None:
        """Messages are heard at once: whether one waits in the inbox is no state of its own."""
        self.harness.loop._receive()

    def actions(self) -> Iterator[Action]:
        roster = self.harness.scheduler._roster
        unseen = [name for name in REQUESTS if name not in self.harness.specs]
        if "a" in unseen and "b" in unseen:
            unseen.remove("b")
        yield from (("submit", name) for name in unseen)
        yield from (("abort", name) for name in REQUESTS if roster.find(name) is not None)
        if roster.running:
            yield RETRACT
        if len(roster) or self.harness.worker.queue:
            yield STEP

    def check(self) -> None:
        self.proof.deep()

    def finish(self) -> None:
        """Left alone, everyone gets what it would get alone."""
        self.proof.quieten()
        for _ in range(200):
            if not self.harness.turn():
                break
            self.proof.after_turn()
        self.check()
        tokens, finishes = self.harness.tokens(), self.harness.finishes()
        for name, spec in self.harness.specs.items():
            [finish] = finishes[name]
            expected = reference_output(spec.prompt, spec.seed, VOCABULARY, spec.max_new_tokens)
            assert tokens[name] == expected[: len(tokens[name])], f"{name} said {tokens[name]}"
            assert tokens[name] == expected or name in self.aborted, f"{name} ended too early: {finish}"
            assert finish.reason in (FinishReason.LENGTH, FinishReason.CANCELLED), finish
        assert self.harness.ledger.private_pages == self.harness.ledger.retired_pages == 0
        assert self.harness.cache.locked_nodes == 0

    # ------------------------------------------------------------ what a state is

    def fingerprint(self):
        """Everything that can make a difference later, without names."""
        return min(self._seen_with(order) for order in (("a", "b", "c"), ("b", "a", "c")))

    def _seen_with(self, order: tuple[str, ...]):
        names = Names()
        scheduler, ledger = self.harness.scheduler, self.harness.ledger
        roster = scheduler._roster
        alive = sorted((seq for seq in roster.everyone()), key=lambda seq: seq.seq)
        ranks = {seq.seq: place for place, seq in enumerate(alive)}
        requests = tuple(self._request(name, names, ranks) for name in order)
        last = scheduler._last_step
        flights = tuple(
            (ranks.get(row.seq, -1), self._is_current(row), plan.step - last, row.start, row.count, names.pages(row.pages))
            for plan in self.harness.worker.queue
            for row in plan.rows
        )
        tree = self._tree(names)
        free = tuple(names.page(page) for page in ledger._free)
        retired = tuple(sorted((step - ledger.settled_step, names.pages(pages)) for step, pages in ledger._retired.items()))
        ratio, recovering = round(scheduler._ratio.value, 4), scheduler._admission._recovering
        return requests, flights, tree, free, retired, ratio, recovering

    def _request(self, name: str, names: "Names", ranks):
        seq = self.harness.scheduler._roster.find(name)
        if seq is None:
            return ("unseen",) if name not in self.harness.specs else ("gone",)
        return (
            seq.state.name, name in self.proof.finished, ranks[seq.seq], len(seq.tokens), seq.computed, seq.launched,
            seq.expected, seq.prefill_end, -1 if seq.slot is None else seq.slot, seq.retractions > 0,
            names.pages(seq.page_table), seq.tree_pages, seq.first_admitted_ns is not None, seq.news_from,
        )  # fmt: skip

    def _is_current(self, row) -> bool:
        seq = self.harness.scheduler._roster.running.get(row.seq)
        return seq is not None and seq.epoch == row.epoch

    def _tree(self, names: "Names"):
        nodes = []
        for root in self.harness.cache._roots.values():
            waiting = [(child, ()) for child in root.children.values()]
            while waiting:
                node, above = waiting.pop()
                path = (*above, *node.chunks)
                nodes.append((path, node.page_count, node, names))
                waiting.extend((child, path) for child in node.children.values())
        settled = self.harness.ledger.settled_step
        order = {node.touched_ns for _, _, node, _ in nodes}
        age = {ns: place for place, ns in enumerate(sorted(order))}
        return tuple(
            (path, count, node.lock_count, max(0, node.last_step - settled), age[node.touched_ns], names.pages(node.pages))
            for path, count, node, _ in sorted(nodes, key=lambda found: found[:2])
        )


class Names:
    """Pages by order of first appearance."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def page(self, page: int) -> int:
        return self._known.setdefault(page, len(self._known))

    def pages(self, pages) -> tuple[int, ...]:
        return tuple(self.page(page) for page in pages)


def explore(depth: int) -> Explored:
    """Raises an AssertionError or InvariantBroken that carries the actions which led to it."""
    start = SmallEngine()
    seen = {start.fingerprint()}
    frontier: list[tuple[tuple[Action, ...], SmallEngine]] = [((), start)]
    edges = ends = 0
    for _ in range(depth):
        reached = []
        while frontier:
            path, engine = frontier.pop()
            successors = list(branches(path, engine))
            edges += len(successors)
            if not successors:
                ends += 1
                guarded(path, engine.finish)
            for further, successor in successors:
                mark = successor.fingerprint()
                if mark not in seen:
                    seen.add(mark)
                    guarded(further, successor.check)
                    reached.append((further, successor))
        frontier = reached
    for path, engine in frontier:
        guarded(path, engine.finish)
    return Explored(depth, len(seen), edges, ends + len(frontier))


def branches(path: tuple[Action, ...], engine: SmallEngine) -> Iterator[tuple[tuple[Action, ...], SmallEngine]]:
    """The engine itself goes one way, repetitions of it go the others."""
    actions = list(engine.actions())
    for action in actions[1:]:
        twin = SmallEngine()
        for earlier in path:
            twin.apply(earlier)
        guarded((*path, action), partial(twin.apply, action))
        yield (*path, action), twin
    for action in actions[:1]:
        guarded((*path, action), partial(engine.apply, action))
        yield (*path, action), engine


def guarded(path: tuple[Action, ...], act: Callable[[], None]) -> None:
    try:
        act()
    except Exception as error:
        error.add_note("after " + ", ".join(f"{kind} {name}".strip() for kind, name in path))
        raise
