"""The only loop. Six things a turn: receive, plan, launch, commit, publish, idle.

    depth 0     plan 1 │ run 1 │ commit 1 │ plan 2 │ run 2 │ commit 2
    depth 1     plan 1 │ run 1 ...........│ run 2 ..............│ run 3        (the worker never waits for a plan)
                       │ plan 2 │         │ commit 1 │ plan 3 │ │ commit 2 ...

Knows: the order of these things. Refuses to know: how a plan is chosen (`sched`), how it is run (`worker`), where
messages come from (`wire`), what time it is (`base.clock`).
"""

import logging
from collections import deque

from branchline.base.clock import NS_PER_S, Clock
from branchline.base.errors import StepFailed
from branchline.base.finish import FinishReason
from branchline.core.ports import Ticket, Worker
from branchline.core.stats import EngineStats
from branchline.engine.answers import Answers
from branchline.engine.ports import Inbox, Outbox
from branchline.observe.stories import Stories
from branchline.sched.scheduler import Scheduler
from branchline.wire.messages import Ask, Cancel, Control, Controlled, PinTokens, Submit, ToEngine

log = logging.getLogger(__name__)


class Loop:
    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        inbox: Inbox,
        outbox: Outbox,
        clock: Clock,
        depth: int,
        answers: Answers | None = None,
    ) -> None:
        """``answers``: to questions about decisions; left out, they know what the scheduler knows, and no stories."""
        self._scheduler = scheduler
        self._answers = answers or Answers(scheduler, Stories())
        self._worker = worker
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._depth = depth
        self._tickets: deque[tuple[Ticket, int]] = deque()
        self._step_started_ns: int | None = None
        self._questions: list[Ask] = []
        self._turns = 0
        self._rested = False

    def turn(self) -> bool:
        """One turn. False if it did nothing and nothing can be done before a message or a deadline."""
        self._turns += 1
        received = self._receive()
        self._launch()
        self._answer()
        committed = self._commit()
        published = self._publish()
        return received or committed or published

    def idle(self, longest_ns: int) -> None:
        """Nothing in flight and nothing runnable: prove the books once, then sleep until a message, the next
        deadline or ``longest_ns``."""
        if not self._rested and self._scheduler.is_empty:
            self._scheduler.rest()
            self._rested = True
        wakeup = self._scheduler.next_wakeup_ns()
        sleep_ns = longest_ns if wakeup is None else max(0, min(longest_ns, wakeup - self._clock.now_ns()))
        self._inbox.wait(sleep_ns)

    def abandon(self, message: str) -> None:
        """The engine cannot go on: tell everyone who is still here."""
        self._scheduler.end_all(FinishReason.SHUTDOWN, message, self._clock.now_ns())
        self._publish()

    def finish_steps(self) -> None:
        """Commit what is in flight and plan nothing more."""
        while self._tickets:
            self._commit_oldest()
        self._publish()

    def stats(self) -> EngineStats:
        """A photograph; call it from the thread of the loop."""
        return self._scheduler.stats().snapshot(step_started_ns=self._step_started_ns, turns=self._turns)

    @property
    def step_started_ns(self) -> int | None:
        """When the oldest plan in flight was launched. From any thread: it tells of a step that hangs."""
        return self._step_started_ns

    # ------------------------------------------------------------ receive

    def _receive(self) -> bool:
        messages = self._inbox.drain()
        for message in messages:
            self._rested = self._rested and isinstance(message, Ask)  # a question changes nothing
            self._dispatch(message)
        return bool(messages)

    def _dispatch(self, message: ToEngine) -> None:
        now_ns = self._clock.now_ns()
        if isinstance(message, Submit):
            self._scheduler.submit(message.spec, now_ns)
        elif isinstance(message, Cancel):
            self._scheduler.cancel(message.request_id, message.reason, now_ns)
        elif isinstance(message, PinTokens):
            self._outbox.reply(self._pin(message, now_ns))
        elif isinstance(message, Ask):
            self._questions.append(message)
        else:
            self._outbox.reply(self._obey(message, now_ns))

    def _obey(self, control: Control, now_ns: int) -> Controlled:
        scheduler, done, words = self._scheduler, True, ""
        match control.verb:
            case "pause":
                scheduler.pause()
            case "continue":
                scheduler.resume()
            case "drain":
                scheduler.drain()
            case "abort_all":
                scheduler.end_all(FinishReason.CANCELLED, "All requests were aborted by the operator.", now_ns)
            case "flush":
                self.finish_steps()
                done = scheduler.flush()
                words = "" if done else "The cache can be flushed only while nothing runs."
            case "check":
                scheduler.check()
            case _:
                done, words = False, "There is no such verb."
        return Controlled(control.call_id, done, words)

    def _pin(self, pin: PinTokens, now_ns: int) -> Controlled:
        until_ns = now_ns + int(pin.seconds * NS_PER_S)
        count, words = self._scheduler.pin(pin.namespace, pin.tokens, until_ns, now_ns)
        if count:
            words = f"{count} of {len(pin.tokens)} tokens are pinned for {pin.seconds:g} s."
        return Controlled(pin.call_id, bool(count) or not pin.seconds, words)

    def _answer(self) -> None:
        """After planning, so that those who have just come have been tried; before a step is waited for."""
        questions, self._questions = self._questions, []
        for question in questions:
            self._outbox.reply(self._answers.answer(question, self._clock.now_ns()))

    # ------------------------------------------------------------ launch, commit, publish

    def _launch(self) -> None:
        while len(self._tickets) <= self._depth:
            plan = self._scheduler.plan(self._clock.now_ns())
            if plan is None:
                return
            self._tickets.append((self._worker.launch(plan), self._clock.now_ns()))
            self._step_started_ns = self._tickets[0][1]

    def _commit(self) -> bool:
        if not self._tickets:
            return False
        self._commit_oldest()
        return True

    def _commit_oldest(self) -> None:
        ticket, _ = self._tickets.popleft()
        try:
            result = self._worker.collect(ticket)
        except StepFailed as error:
            log.error("step %d failed: %s", ticket.step, error, exc_info=error.__cause__)
            self._scheduler.commit_failure(ticket.step, "The step that computed this request failed.", self._clock.now_ns())
        else:
            self._scheduler.commit(result, self._clock.now_ns())
        # A step in flight could start only now that the one before it is done.
        self._step_started_ns = self._clock.now_ns() if self._tickets else None

    def _publish(self) -> bool:
        news = self._scheduler.take_news()
        if news:
            self._outbox.publish(news)
        return bool(news)
