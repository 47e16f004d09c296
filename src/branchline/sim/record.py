"""The recorder: stands in the doors of a running loop and writes down everything that comes through, in order.

    Clock   every reading             Inbox   every message drained, and every time there was none
    Worker  every plan launched and every result collected

That is all a loop ever hears of the world. The scheduler, the cache and the loop decide everything else themselves, so the
same loop that is given the same again (`sim.replay`) must make the same plans, byte for byte.

While the loop runs only references are put aside. They are hashed and written when the loop is about to wait for a step or
for a message: the worker, if there is one at work, does not wait for it.

Knows: what is written, and when. Refuses to know: files (`observe.journal`), names of tokens (`sim.veil`), decisions.
"""

import logging
from collections import deque
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from branchline.base.clock import Clock
from branchline.base.config import EngineConfig
from branchline.base.errors import StepFailed
from branchline.base.ids import Epoch, SeqId, Slot, TokenId
from branchline.core.plan import PlanRow, StepPlan
from branchline.core.ports import Ticket, Worker
from branchline.core.request import RequestSpec
from branchline.core.result import StepResult
from branchline.engine.ports import Inbox
from branchline.observe.journal import Header, Journal
from branchline.sim.veil import HashedNames, Names, OwnNames, Piece, PieceWriter, pack_one
from branchline.wire.messages import Ask, Cancel, Control, ModelFacts, PinTokens, Submit, ToEngine

log = logging.getLogger(__name__)

WRITE_EVERY_NS = 10_000_000
"""A busy loop writes at most so often: a frame costs some 50 µs."""
IDLE_WRITE_EVERY_NS = 1_000_000_000
DIGEST_BYTES = 8
NOBODY = bytes(8)
"""The name of a token that came too late: nobody will look at it."""

# ---------------------------------------------------------------- what is written


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A ``Submit``, its prompt in pieces."""

    spec: RequestSpec
    prompt: list[Piece]


class Pinned(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A ``PinTokens``, its tokens in pieces."""

    pin: PinTokens
    tokens: list[Piece]


class Drained(msgspec.Struct, frozen=True, array_like=True, tag=1):
    messages: list[Arrived | Pinned | bytes]
    """Bytes: any other message, as on the wire."""


class Launched(msgspec.Struct, frozen=True, array_like=True, tag=2):
    digest: bytes
    """Of the whole plan, page tables included: see :func:`digest`."""
    rows: list[int]
    """``seq, start, count`` of each row: enough to show where two plans differ."""


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What came of the oldest plan in flight."""


class Collected(Outcome, frozen=True, array_like=True, tag=3):
    duration_ns: int
    tokens: bytes
    """Names, one for each row that sampled."""
    oddities: dict[int, tuple[str | None, int]]
    """By place of the row: its error, and the number of its prompt log probabilities."""


class Lost(Outcome, frozen=True, array_like=True, tag=4):
    """The step failed."""


class Closed(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The engine ended in order."""


Entry: TypeAlias = int | Drained | Launched | Collected | Lost | Closed | None
"""An integer is a reading of the clock, as nanoseconds since the one before. ``None``: the inbox was empty."""


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One frame of the journal."""

    clock_ns: int
    """The reading before the first one in here."""
    starts_part: bool
    """Pieces are numbered from 0 again."""
    entries: list[Entry]


def digest(plan: StepPlan) -> bytes:
    """Of everything in a plan but tokens and sampling: their number stands for them."""
    opens = [(o.slot, o.seq, o.epoch, len(o.tokens), o.prompt_count) for o in plan.opens]
    return blake2b(
        msgspec.msgpack.encode((plan.step, plan.rows, opens, plan.copies)), digest_size=DIGEST_BYTES
    ).digest()  # fmt: skip


# ---------------------------------------------------------------- the recorder


@dataclass(slots=True)
class _Tenant:
    """Who sits in a slot, and the name of the last token that it knows."""

    seq: SeqId
    epoch: Epoch
    last_name: bytes
    stop_ids: frozenset[TokenId]

    def is_in(self, row: PlanRow) -> bool:
        return row.seq == self.seq and row.epoch == self.epoch


_Raw: TypeAlias = int | list[ToEngine] | StepPlan | StepResult | Lost | Closed | None


class Recorder:
    """Belongs to the thread of the loop. Never raises."""

    def __init__(self, journal: Journal, names: Names) -> None:
        self._journal = journal
        self._names = names
        self._pieces = PieceWriter(names)
        self._raw: list[_Raw] = []
        self._clock_ns = 0
        self._written_ns = 0
        self._starts_part = True
        self._is_urgent = False
        self._tenants: dict[Slot, _Tenant] = {}
        self._plans: deque[StepPlan] = deque()
        self.note_clock = self._raw.append
        """Takes a reading. The bound method itself, because it is called several times a step."""

    @property
    def bytes_written(self) -> int:
        return self._journal.bytes_written

    @property
    def lost_records(self) -> int:
        return self._journal.lost_records

    def doors(self, clock: Clock, inbox: Inbox, worker: Worker) -> "Doors":
        """The doors of a loop, with this recorder in them. To close the worker is to close the journal."""
        return Doors(
            RecordingClock(clock, self), RecordingInbox(inbox, clock, self), RecordingWorker(worker, clock, self)
        )  # fmt: skip

    def note_messages(self, messages: list[ToEngine]) -> None:
        self._raw.append(messages or None)
        self._is_urgent = self._is_urgent or bool(messages)

    def note_step(self, step: StepPlan | StepResult | Lost) -> None:
        self._raw.append(step)
        self._is_urgent = True

    def before_step(self, now_ns: int) -> None:
        """The loop is about to wait for a step: write, unless that was done a moment ago."""
        if now_ns - self._written_ns >= WRITE_EVERY_NS:
            self.write()
            self._written_ns = now_ns

    def before_rest(self, now_ns: int) -> None:
        """The loop is about to sleep: write if there is something to tell. That nothing happened can wait a little."""
        if self._is_urgent or now_ns - self._written_ns >= IDLE_WRITE_EVERY_NS:
            self.write()
            self._written_ns = now_ns

    def write(self) -> None:
        """Write everything that was put aside."""
        raw_count = len(self._raw)
        if not raw_count:
            return
        try:
            frame = self._frame() if self._journal.is_open else b""
        except Exception as error:  # a journal must not bring an engine down, whatever is wrong with it
            log.exception("an entry cannot be put into the journal")
            self._journal.give_up(f"{type(error).__name__}")
            frame = b""
        self._raw.clear()
        self._is_urgent = False
        self._journal.append(frame, raw_count)

    def close(self) -> None:
        """The engine ends in order. Idempotent."""
        if self._journal.is_open:
            self._raw.append(Closed())
            self.write()
            self._journal.close()

    # ------------------------------------------------------------ inner

    def _frame(self) -> bytes:
        if self._journal.is_part_full:
            self._journal.next_part()
            self._pieces.start_part()
            self._starts_part = True
        clock_ns = self._clock_ns
        entries = [self._entry(raw) for raw in self._raw]
        batch, self._starts_part = Batch(clock_ns, self._starts_part, entries), False
        return msgspec.msgpack.encode(batch)

    def _entry(self, raw: _Raw) -> Entry:
        match raw:
            case int():
                passed_ns, self._clock_ns = raw - self._clock_ns, raw
                return passed_ns
            case list():
                return Drained([self._message(message) for message in raw])
            case StepPlan():
                return self._launched(raw)
            case StepResult():
                return self._collected(self._plans.popleft(), raw)
            case Lost():
                self._plans.popleft()
        return raw

    def _message(self, message: ToEngine) -> Arrived | Pinned | bytes:
        """Closed, because a new kind of message may hold what a journal must not."""
        match message:
            case Submit():
                return Arrived(self._names.spec(message.spec), self._pieces.write(message.spec.prompt))
            case PinTokens():
                pin = msgspec.structs.replace(message, namespace=self._names.namespace(message.namespace), tokens=())
                return Pinned(pin, self._pieces.write(message.tokens))
            case Ask():
                return msgspec.msgpack.encode(msgspec.structs.replace(message, tenant=self._tenant(message.tenant)))
            case Cancel() | Control():
                return msgspec.msgpack.encode(message)
        raise TypeError(f"a message of type {type(message).__name__}")

    def _tenant(self, tenant: str | None) -> str | None:
        return None if tenant is None else self._names.word(tenant)

    def _launched(self, plan: StepPlan) -> Launched:
        for o in plan.opens:
            self._tenants[o.slot] = _Tenant(o.seq, o.epoch, self._pieces.last_name(o.tokens), frozenset(o.stop_ids))
        self._plans.append(plan)
        return Launched(digest(plan), [number for row in plan.rows for number in (row.seq, row.start, row.count)])

    def _collected(self, plan: StepPlan, result: StepResult) -> Collected:
        names, oddities = [], {}
        for place, (row, outcome) in enumerate(zip(plan.rows, result.rows, strict=True)):
            if outcome.token is not None:
                names.append(self._sampled(row, outcome.token))
            if outcome.error is not None or outcome.prompt_logprobs:
                oddities[place] = (outcome.error, len(outcome.prompt_logprobs))
        return Collected(result.duration_ns, b"".join(names), oddities)

    def _sampled(self, row: PlanRow, token: TokenId) -> bytes:
        tenant = self._tenants[row.slot]
        if not tenant.is_in(row):
            return NOBODY  # the slot has a new tenant already: this row is late, and will be dropped
        if token in tenant.stop_ids:
            return self._names.stop(token)
        tenant.last_name = self._names.after(tenant.last_name, pack_one(token))
        return tenant.last_name


class NoRecorder:
    """Stands in no door."""

    bytes_written = 0
    lost_records = 0

    def doors(self, clock: Clock, inbox: Inbox, worker: Worker) -> "Doors":
        return Doors(clock, inbox, worker)


def open_recorder(config: EngineConfig, facts: ModelFacts) -> Recorder | NoRecorder:
    """The recorder that ``config``, as derived, asks for.

    Raises:
        ConfigError: the directory of the journal cannot be used.
    """
    if config.journal is None:
        return NoRecorder()
    names = OwnNames() if config.journal_text else HashedNames(name for name, _ in config.tenant_weights)
    header = Header(tokens=names.kind, config=config, facts=facts)
    return Recorder(Journal(Path(config.journal), header, max_bytes=config.journal_max_bytes), names)


# ---------------------------------------------------------------- the doors


class Doors(NamedTuple):
    """What a loop hears through."""

    clock: Clock
    inbox: Inbox
    worker: Worker


class RecordingClock:
    """Implements ``base.clock.Clock`` for the loop alone: its readings are written down."""

    def __init__(self, inner: Clock, recorder: Recorder) -> None:
        self._read = inner.now_ns
        self._note = recorder.note_clock

    def now_ns(self) -> int:
        now_ns = self._read()
        self._note(now_ns)
        return now_ns


class RecordingInbox:
    """Implements ``engine.ports.Inbox``."""

    def __init__(self, inner: Inbox, clock: Clock, recorder: Recorder) -> None:
        """``clock``: one whose readings are not written down."""
        self._inner = inner
        self._clock = clock
        self._recorder = recorder

    def drain(self) -> list[ToEngine]:
        messages = self._inner.drain()
        self._recorder.note_messages(messages)
        return messages

    def wait(self, timeout_ns: int | None) -> None:
        self._recorder.before_rest(self._clock.now_ns())
        self._inner.wait(timeout_ns)


class RecordingWorker:
    """Implements ``core.ports.Worker``. To close it is to close the journal."""

    def __init__(self, inner: Worker, clock: Clock, recorder: Recorder) -> None:
        """``clock``: one whose readings are not written down."""
        self._inner = inner
        self._clock = clock
        self._recorder = recorder

    def launch(self, plan: StepPlan) -> Ticket:
        ticket = self._inner.launch(plan)
        self._recorder.note_step(plan)
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        self._recorder.before_step(self._clock.now_ns())
        try:
            result = self._inner.collect(ticket)
        except StepFailed:
            self._recorder.note_step(Lost())
            raise
        self._recorder.note_step(result)
        return result

    def close(self) -> None:
        self._inner.close()
        self._recorder.close()
