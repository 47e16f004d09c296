"""A whole engine in one thread: production scheduler, cache and loop, a stamped worker, a clock moved by hand."""

from collections import defaultdict

from branchline.base.clock import ManualClock
from branchline.base.config import EngineConfig
from branchline.core.request import Namespace, RequestSpec, SamplingParams
from branchline.engine.answers import Answers
from branchline.engine.books import make_books
from branchline.engine.loop import Loop
from branchline.observe.stories import Stories
from branchline.sched.scheduler import Scheduler
from branchline.wire.inproc import InprocInbox
from branchline.wire.messages import Cancel, Control, Submit
from tests.support.stamped import StampedWorker, root_stamp

TURN_NS = 1_000_000


class ListOutbox:
    def __init__(self) -> None:
        self.outputs = []
        self.replies = []

    def publish(self, outputs) -> None:
        self.outputs.extend(outputs)

    def reply(self, answer) -> None:
        self.replies.append(answer)


class Harness:
    def __init__(self, observers=(), vocabulary=97, depth=None, check_every=1, notes=None, **settings) -> None:
        """``depth``: plans in flight, if not what the configuration says. ``check_every``: turns between full checks.
        ``notes``: other ones than the scheduler's own."""
        settings = {"context_length": 4096, "pages": 64, "page_size": 4, "max_running": 8, "max_step_tokens": 64} | settings
        self.config = EngineConfig(**settings)
        self.depth = self.config.depth if depth is None else depth
        self.clock = ManualClock()
        self.ledger, self.cache = make_books(self.config)
        self.worker = StampedWorker(self.config.pages, self.config.page_size, vocabulary)
        self.worker.root_of = self._root_of
        self.stories = Stories()
        self.scheduler = Scheduler(self.config, self.ledger, self.cache, (self.stories, *observers), notes)
        self.inbox = InprocInbox()
        self.outbox = ListOutbox()
        answers = Answers(self.scheduler, self.stories)
        self.loop = Loop(self.scheduler, self.worker, self.inbox, self.outbox, self.clock, self.depth, answers)
        self.specs: dict[str, RequestSpec] = {}
        self.turns = 0
        self._check_every = check_every

    def submit(
        self,
        name,
        prompt,
        max_new=8,
        seed=7,
        stop_ids=(),
        salt="",
        tenant="",
        priority=0,
        user="",
        timeout_s=None,
        **sampling,
    ) -> RequestSpec:
        spec = RequestSpec(
            request_id=name, prompt=tuple(prompt), sampling=SamplingParams(**sampling), max_new_tokens=max_new, seed=seed,
            eos_token_ids=tuple(stop_ids), namespace=Namespace(salt=salt, tenant=tenant), priority=priority,
            user=user, timeout_s=timeout_s,
        )  # fmt: skip
        self.specs[name] = spec
        self.inbox.put(Submit(spec))
        return spec

    def cancel(self, name) -> None:
        self.inbox.put(Cancel(name))

    def control(self, verb) -> None:
        self.inbox.put(Control(call_id=verb, verb=verb))

    def turn(self) -> bool:
        self.turns += 1
        self.clock.advance(TURN_NS)
        busy = self.loop.turn()
        if self.turns % self._check_every == 0:
            self.check()
        return busy

    def check(self) -> None:
        self.scheduler.check()

    def run(self, turns=2000) -> None:
        """Until nothing is left to do."""
        for _ in range(turns):
            if not self.turn():
                return
        raise AssertionError("the engine does not come to rest")

    def tokens(self) -> dict[str, list[int]]:
        tokens = defaultdict(list)
        for output in self.outbox.outputs:
            tokens[output.request_id].extend(output.tokens)
        return tokens

    def finishes(self) -> dict[str, list]:
        finishes = defaultdict(list)
        for output in self.outbox.outputs:
            if output.finish is not None:
                finishes[output.request_id].append(output.finish)
        return finishes

    def _root_of(self, seq: int) -> int:
        return root_stamp(self.scheduler._roster.running[seq].spec.namespace)
