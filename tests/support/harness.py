"""A whole engine in one thread: production scheduler, cache and loop, a stamped worker, a clock moved by hand."""

from collections import defaultdict

from branchline.base.clock import ManualClock
from branchline.base.config import EngineConfig
from branchline.cache.null import NullCache
from branchline.cache.pages import PageLedger
from branchline.cache.radix import RadixCache
from branchline.core.request import Namespace, RequestSpec, SamplingParams
from branchline.engine.loop import Loop
from branchline.sched.scheduler import Scheduler
from branchline.wire.inproc import InprocInbox
from branchline.wire.messages import Cancel, Submit
from tests.support.stamped import StampedWorker


class ListOutbox:
    def __init__(self) -> None:
        self.outputs = []
        self.replies = []

    def publish(self, outputs) -> None:
        self.outputs.extend(outputs)

    def reply(self, answer) -> None:
        self.replies.append(answer)


class Harness:
    def __init__(self, observers=(), vocabulary=97, **settings) -> None:
        settings = {"context_length": 4096, "pages": 64, "page_size": 4, "max_running": 8, "max_step_tokens": 64} | settings
        self.config = EngineConfig(**settings)
        self.clock = ManualClock()
        self.ledger = PageLedger(self.config.pages)
        make_cache = RadixCache if self.config.prefix_cache else NullCache
        self.cache = make_cache(self.ledger, self.config.page_size)
        self.worker = StampedWorker(self.config.pages, self.config.page_size, vocabulary)
        self.scheduler = Scheduler(self.config, self.ledger, self.cache, observers)
        self.inbox = InprocInbox()
        self.outbox = ListOutbox()
        self.loop = Loop(self.scheduler, self.worker, self.inbox, self.outbox, self.clock, self.config.depth)
        self.specs: dict[str, RequestSpec] = {}

    def submit(self, name, prompt, max_new=8, seed=7, stop_ids=(), salt="", **sampling) -> RequestSpec:
        spec = RequestSpec(
            request_id=name, prompt=tuple(prompt), sampling=SamplingParams(**sampling), max_new_tokens=max_new, seed=seed,
            eos_token_ids=tuple(stop_ids), namespace=Namespace(salt=salt),
        )  # fmt: skip
        self.specs[name] = spec
        self.inbox.put(Submit(spec))
        return spec

    def cancel(self, name) -> None:
        self.inbox.put(Cancel(name))

    def turn(self) -> bool:
        self.clock.advance(1_000_000)
        busy = self.loop.turn()
        self.scheduler.check()
        return busy

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
