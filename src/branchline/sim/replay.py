"""Replay: the production loop, scheduler and cache, given once more what a journal says they were given.

    replay = Replay.of(Path("journal"))         replay.plan_count plans identical, or replay.difference says where they part

No weights, no text, no waiting. Every door of the loop answers from the tape, in the order in which the recorder wrote; a
door that is opened at another moment than then is a difference, and so is a plan whose digest is another. The same mistake
in the scheduler breaks the same books at the same step: an incident can be taken home.

Knows: tapes and what may differ. Refuses to know: other settings (`sim.incident`), how a result is shown (`cli.replay`).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias, TypeVar

import msgspec

from branchline.base.clock import NS_PER_S
from branchline.base.errors import BranchlineError, ConfigError, InvariantBroken, StepFailed
from branchline.base.ids import RequestId, StepId, TokenId
from branchline.core.plan import PlanRow, StepPlan
from branchline.core.ports import Ticket
from branchline.core.request import RequestSpec
from branchline.core.result import Output, RowResult, StepResult, TokenLogprobs
from branchline.engine.books import make_books
from branchline.engine.loop import Loop
from branchline.observe.journal import Header, JournalReader
from branchline.sched.scheduler import Scheduler
from branchline.sim.latency import Load, Sample
from branchline.sim.record import Arrived, Batch, Closed, Collected, Drained, Entry, Launched, Outcome, Pinned, digest
from branchline.sim.report import Diary, Summary, summarize
from branchline.sim.veil import PieceReader, unpack
from branchline.sim.workload import Arrival
from branchline.wire.messages import Cancel, Controlled, Submit, ToEngine, Told

ROWS_SHOWN = 3
"""Rows in which two plans agree that are shown before those in which they do not."""
_NO_LOGPROBS = TokenLogprobs(0, 0.0)

Wanted = TypeVar("Wanted")


class EndOfTape(Exception):
    """There is nothing more on the tape: a journal may end anywhere."""


class Difference(BranchlineError):
    """The loop did something else than it did then; in words."""


# ---------------------------------------------------------------- the tape


class Tape:
    """The entries of a journal, one at a time."""

    def __init__(self, reader: JournalReader) -> None:
        self.now_ns = 0
        """The last reading of the clock."""
        self.began_ns = 0
        """The first one."""
        self.pieces = PieceReader()
        self._entries = self._unroll(reader)
        self._next: list[Entry] = []
        """The entry that was looked at and not taken yet, if any."""

    def peek(self) -> Entry:
        """Raises EndOfTape."""
        if not self._next:
            try:
                self._next.append(next(self._entries))
            except StopIteration:
                raise EndOfTape from None
        return self._next[0]

    def read_clock(self) -> int:
        self.now_ns += self.take(int, "reads the clock")
        self.began_ns = self.began_ns or self.now_ns
        return self.now_ns

    def take(self, kind: type[Wanted] | tuple[type[Wanted], ...], words: str) -> Wanted:
        """The next entry, which must be of ``kind``.

        Raises:
            EndOfTape: there is none.
            Difference: something else happened then.
        """
        entry = self.peek()
        if not isinstance(entry, kind):
            raise Difference(f"{self.when} the loop {words}; then it {_then(entry)}.")
        self._next.clear()
        return entry

    @property
    def is_at_turn(self) -> bool:
        """Whether a turn begins here. Raises EndOfTape."""
        return isinstance(self.peek(), Drained | None)

    @property
    def when(self) -> str:
        return f"{(self.now_ns - self.began_ns) / NS_PER_S:.6f} s after the start"

    def _unroll(self, reader: JournalReader) -> Iterator[Entry]:
        decoder = msgspec.msgpack.Decoder(Batch)
        for frame in reader.frames():
            batch = _decode(decoder, frame)
            if batch.starts_part:
                self.pieces.start_part()
            self.now_ns = batch.clock_ns
            yield from batch.entries


def _decode(decoder: "msgspec.msgpack.Decoder[Wanted]", data: bytes) -> Wanted:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the journal was written by a version of branchline that knows other records: {error}") from None


def _then(entry: Entry) -> str:
    match entry:
        case int():
            return "read the clock"
        case Launched():
            return (
                "launched "
                + "; ".join(map(_show, _rows(entry)[:ROWS_SHOWN]))
                + ("; ..." if len(entry.rows) > 3 * ROWS_SHOWN else "")
            )
        case Outcome():
            return "collected a step"
        case Closed():
            return "ended"
        case _:
            return "looked for messages"


# ---------------------------------------------------------------- the doors


class TapeClock:
    """Implements ``base.clock.Clock``."""

    def __init__(self, tape: Tape, story: "Story") -> None:
        self._tape = tape
        self._story = story

    def now_ns(self) -> int:
        now_ns = self._tape.read_clock()
        self._story.hear_time(now_ns)
        return now_ns


class TapeInbox:
    """Implements ``engine.ports.Inbox``; tells the story of every message."""

    def __init__(self, tape: Tape, story: "Story") -> None:
        self._tape = tape
        self._story = story
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def drain(self) -> list[ToEngine]:
        entry = self._tape.take((Drained, type(None)), "looks for messages")
        messages = [] if entry is None else [self._message(message) for message in entry.messages]
        self._story.undated.extend(messages)
        return messages

    def wait(self, timeout_ns: int | None) -> None:
        """The tape does not wait."""

    def _message(self, message: Arrived | Pinned | bytes) -> ToEngine:
        match message:
            case Arrived():
                return Submit(msgspec.structs.replace(message.spec, prompt=self._tape.pieces.read(message.prompt)))
            case Pinned():
                return msgspec.structs.replace(message.pin, tokens=self._tape.pieces.read(message.tokens))
        return _decode(self._decoder, message)


@dataclass(frozen=True, slots=True)
class TapeTicket:
    step: StepId
    plan: StepPlan


class TapeWorker:
    """Implements ``core.ports.Worker``: compares plans, returns the results of then."""

    def __init__(self, tape: Tape, story: "Story") -> None:
        self._tape = tape
        self._story = story

    def launch(self, plan: StepPlan) -> Ticket:
        then = self._tape.take(Launched, f"launches step {plan.step}")
        if then.digest != digest(plan):
            raise Difference(f"{self._tape.when} {describe(then, plan)}")
        self._story.plan_count += 1
        return TapeTicket(plan.step, plan)

    def collect(self, ticket: Ticket) -> StepResult:
        if not isinstance(ticket, TapeTicket):
            raise InvariantBroken("this ticket is another worker's")
        then = self._tape.take(Outcome, f"collects step {ticket.step}")
        if not isinstance(then, Collected):
            raise StepFailed("the step failed then")
        self._story.samples.append(Sample(Load.of(ticket.plan), then.duration_ns))
        return _result(ticket.plan, then)

    def close(self) -> None:
        """There is nothing to let go of."""


def _result(plan: StepPlan, then: Collected) -> StepResult:
    names = deque(unpack(then.tokens))
    sampled = [row for place, row in enumerate(plan.rows) if row.sample and not _failed(then, place)]
    if len(sampled) != len(names):
        raise Difference(f"Step {plan.step} sampled {len(names)} tokens; this plan samples {len(sampled)}.")
    rows = []
    for place, row in enumerate(plan.rows):
        error, logprob_count = then.oddities.get(place, (None, 0))
        token = names.popleft() if row.sample and error is None else None
        rows.append(RowResult(row.seq, row.epoch, token, None, (_NO_LOGPROBS,) * logprob_count, error))
    return StepResult(plan.step, tuple(rows), then.duration_ns)


def _failed(then: Collected, place: int) -> bool:
    return place in then.oddities and then.oddities[place][0] is not None


class TapeOutbox:
    """Implements ``engine.ports.Outbox``."""

    def __init__(self, tape: Tape, story: "Story") -> None:
        self._tape = tape
        self._story = story

    def publish(self, outputs: Sequence[Output]) -> None:
        self._story.hear(self._tape.now_ns, outputs)

    def reply(self, answer: Controlled | Told) -> None:
        """Nobody is waiting for it any longer."""


# ---------------------------------------------------------------- differences in words

Rows: TypeAlias = tuple[tuple[int, int, int], ...]
"""Sequence, first position and number of positions of each row."""


def describe(then: Launched, plan: StepPlan) -> str:
    """Where a plan differs from the one that was launched then."""
    before = _rows(then)
    now: Rows = tuple((row.seq, row.start, row.count) for row in plan.rows)
    if before == now:
        return (
            f"step {plan.step} computes the same positions of the same sequences, but not in the same pages or slots:\n"
            + "\n".join(
                f"    {_show(numbers)}: slot {r.slot}, pages {_pages(r)}" for r, numbers in zip(plan.rows, now, strict=True)
            )
            + "".join(f"\n    copies {c.token_count} positions of page {c.source} to {c.target}" for c in plan.copies)
        )
    same = [f"    = {_show(row)}" for row in before if row in now]
    gone, new = (
        [f"    - {_show(r)}" for r in before if r not in now],
        [f"    + {_show(r)}" for r in now if r not in before],
    )
    order = "" if gone or new else " only in the order of its rows"
    left_out = [f"    = {len(same) - ROWS_SHOWN} more rows"] if len(same) > ROWS_SHOWN else []
    return "\n".join([f"step {plan.step} differs{order} (- then, + now):", *same[:ROWS_SHOWN], *left_out, *gone, *new])


def _rows(then: Launched) -> Rows:
    each = iter(then.rows)
    return tuple(zip(each, each, each, strict=True))


def _show(row: tuple[int, int, int]) -> str:
    seq, start, count = row
    return f"sequence {seq}, position {start}" if count == 1 else f"sequence {seq}, positions {start} to {start + count - 1}"


def _pages(row: PlanRow) -> str:
    shown = ", ".join(map(str, row.pages[:8]))
    return f"{shown}, ... ({len(row.pages)})" if len(row.pages) > 8 else shown


# ---------------------------------------------------------------- the story


class Story(Diary):
    """A diary that also keeps what a replay with other settings needs: who came, what was generated, how long steps took."""

    def __init__(self) -> None:
        super().__init__()
        self.undated: deque[ToEngine] = deque()
        """Messages whose time is not known yet: the loop reads the clock once for each, in their order."""
        self._looked_ns = 0
        self._looked_before_ns: int | None = None
        """When the loop looked for messages the last time, and the time before; ``None`` if it slept in between."""
        self.plan_count = 0
        self.samples: list[Sample] = []
        self.arrivals: dict[RequestId, Arrival] = {}
        """With the most tokens that each was ready to take."""
        self.outputs: dict[RequestId, list[TokenId]] = {}
        """Names of generated tokens."""
        self.left_ns: dict[RequestId, int] = {}
        """When clients went away."""

    def begin_turn(self, now_ns: int, *, slept: bool) -> None:
        self._looked_before_ns, self._looked_ns = None if slept else self._looked_ns, now_ns

    def hear_time(self, now_ns: int) -> None:
        message = self.undated.popleft() if self.undated else None
        if isinstance(message, Submit):
            self._hear_submit(message.spec, self._came_ns(now_ns))
        elif isinstance(message, Cancel) and not message.reason.is_success:
            self.left_ns.setdefault(message.request_id, self._came_ns(now_ns))

    def hear(self, now_ns: int, outputs: Sequence[Output]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).extend(output.tokens)
        super().hear(now_ns, outputs)

    def _came_ns(self, found_ns: int) -> int:
        """A message wakes a loop that sleeps, but a busy one finds it when it looks: half a turn later, on average."""
        return found_ns if self._looked_before_ns is None else (self._looked_before_ns + found_ns) // 2

    def _hear_submit(self, spec: RequestSpec, at_ns: int) -> None:
        arrival = Arrival(
            at_ns=at_ns, request_id=spec.request_id, prompt=spec.prompt, output_tokens=spec.max_new_tokens,
            seed=len(self.arrivals), tenant=spec.namespace.tenant, salt=spec.namespace.salt, priority=spec.priority,
            user=spec.user, timeout_s=spec.timeout_s,
        )  # fmt: skip
        self.arrivals[spec.request_id] = arrival
        self.expect(arrival)


# ---------------------------------------------------------------- the replay


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of it."""

    header: Header
    story: Story
    difference: str
    """Empty: every plan was identical."""
    broken: str
    """The engine stopped because its books did not add up, then as now; the sentence."""
    is_complete: bool
    """The journal ends because the engine was stopped; otherwise the end is missing."""
    lost_bytes: int
    summary: Summary | None
    """``None``: no request has ended."""

    @classmethod
    def of(cls, directory: Path, run: int | None = None) -> Self:
        """Replay a run of a journal, the latest if not said otherwise.

        Raises:
            ConfigError: it cannot be read, its beginning was deleted, or it was written by a version with other settings.
        """
        reader = JournalReader(directory, run)
        if not reader.is_whole:
            raise ConfigError(
                f"the beginning of run {reader.header.run} was deleted (--journal-max-bytes): what the cache held by then "
                "is not known, so its plans cannot be proved. Other runs of this directory may be whole."
            )
        tape = Tape(reader)
        story = Story()
        ending = _drive(_loop(reader.header, tape, story), tape, story)
        summary = summarize(story.records, [(story.steps, story.stats)]) if story.records else None
        return cls(reader.header, story, *ending, reader.lost_bytes, summary)

    @property
    def plan_count(self) -> int:
        """Plans that were compared and found identical."""
        return self.story.plan_count


def _loop(header: Header, tape: Tape, story: Story) -> Loop:
    scheduler = Scheduler(header.config, *make_books(header.config), (story,))
    worker, inbox, outbox = TapeWorker(tape, story), TapeInbox(tape, story), TapeOutbox(tape, story)
    return Loop(scheduler, worker, inbox, outbox, TapeClock(tape, story), header.config.depth)


def _drive(loop: Loop, tape: Tape, story: Story) -> tuple[str, str, bool]:
    """What ``engine.build.Engine.run`` did: difference, broken books, whether the end was reached."""
    broken = ""
    try:
        try:
            slept = True
            while tape.is_at_turn:
                story.begin_turn(tape.now_ns, slept=slept)
                slept = not loop.turn()
                if slept:
                    loop.idle(0)
                story.photograph(loop.stats())
            loop.finish_steps()
        except InvariantBroken as error:
            broken = str(error)
        loop.abandon("The engine ended.")
        story.photograph(loop.stats())
        tape.take(Closed, "ends")
    except EndOfTape:
        return "", broken, False
    except Difference as difference:
        return str(difference), broken, False
    return "", broken, True
