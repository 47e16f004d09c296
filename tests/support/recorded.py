"""A recorded engine in one thread: the production engine with its recorder, a stamped worker, a script of messages."""

import random
from pathlib import Path

import msgspec

from branchline.base.clock import ManualClock
from branchline.base.config import EVICTION_NAMES, EngineConfig
from branchline.core.request import Namespace, RequestSpec, SamplingParams
from branchline.engine.books import make_books
from branchline.engine.build import Engine, Parts
from branchline.engine.loop import Loop
from branchline.observe.journal import Header, Journal
from branchline.sched.scheduler import Scheduler
from branchline.sim.record import Recorder
from branchline.sim.veil import HashedNames, OwnNames
from branchline.wire.messages import Ask, Cancel, Control, ModelFacts, PinTokens, Submit
from tests.support.harness import ListOutbox
from tests.support.stamped import StampedWorker, root_stamp

FACTS = ModelFacts(
    name="stamped", digest="0", vocab_size=97, context_length=4096, max_prompt_tokens=4095, executor="none"
)  # fmt: skip
VOCABULARY = 5


class ScriptInbox:
    """Gives a list of messages a turn; when the script is over and the engine has come to rest, ends it."""

    def __init__(self, clock, script, turn_ns) -> None:
        self.clock = clock
        self.script = list(script)
        self.turn_ns = turn_ns
        self.stop = lambda: None
        self.naps = 0

    def drain(self):
        self.clock.advance(self.turn_ns)
        return self.script.pop(0) if self.script else []

    def wait(self, timeout_ns) -> None:
        self.clock.advance(min(timeout_ns, 50_000_000))
        self.naps += not self.script
        if self.naps > 2:
            self.stop()


class SlowWorker(StampedWorker):
    """Steps take time, the more the more is in them."""

    def __init__(self, clock, *args) -> None:
        super().__init__(*args)
        self.clock = clock
        self.scatter = lambda: 1

    def collect(self, ticket):
        duration_ns = int((4_000_000 + 200_000 * self.queue[0].token_count) * self.scatter())
        self.clock.advance(duration_ns)
        return msgspec.structs.replace(super().collect(ticket), duration_ns=duration_ns)


def recorded_engine(
    directory: Path, script, *, text=False, vocabulary=VOCABULARY, journal_options=None, turn_ns=1_000_000, **settings
):
    """An engine that is ready to run, its worker, outbox and journal."""
    settings = {"context_length": 4096, "pages": 64, "page_size": 4, "max_running": 8, "max_step_tokens": 64} | settings
    config = EngineConfig(**settings)
    clock, names = ManualClock(10**12), OwnNames() if text else HashedNames(name for name, _ in config.tenant_weights)
    worker, outbox = SlowWorker(clock, config.pages, config.page_size, vocabulary), ListOutbox()
    inbox = ScriptInbox(clock, script, turn_ns)
    header = Header(tokens=names.kind, config=config, facts=FACTS)
    journal = Journal(directory, header, **(journal_options or {}))
    recorder = Recorder(journal, names)
    scheduler = Scheduler(config, *make_books(config))
    worker.root_of = lambda seq: root_stamp(scheduler._roster.running[seq].spec.namespace)
    doors = recorder.doors(clock, inbox, worker)
    loop = Loop(scheduler, doors.worker, doors.inbox, outbox, doors.clock, config.depth)
    engine = Engine(Parts(config, FACTS, scheduler, doors.worker, recorder), loop)
    inbox.stop = engine.stop
    return engine, worker, outbox, journal


def submit(
    name, prompt, max_new=8, seed=7, stop_ids=(), salt="", tenant="", priority=0, user="", timeout_s=None, **sampling
) -> Submit:
    return Submit(RequestSpec(
        request_id=name, prompt=tuple(prompt), sampling=SamplingParams(**sampling), max_new_tokens=max_new, seed=seed,
        eos_token_ids=tuple(stop_ids), namespace=Namespace(salt=salt, tenant=tenant), priority=priority, user=user,
        timeout_s=timeout_s,
    ))  # fmt: skip


def random_settings(rng: random.Random, policies) -> dict:
    max_running = rng.choice([1, 2, 4, 8])
    policy = rng.choice(policies)
    return {
        "pages": rng.choice([8, 12, 16, 40]),
        "page_size": rng.choice([1, 2, 4, 16]),
        "max_running": max_running,
        "max_queued": rng.choice([4, 256]),
        "max_step_tokens": max(max_running, rng.choice([1, 4, 9, 32, 100])),
        "max_chunk_tokens": rng.choice([None, None, 1, 3, 16]),
        "prefix_cache": policy in ("lpm", "dfs-weight") or rng.random() < 0.8,
        "overlap": rng.random() < 0.7,
        "eviction": rng.choice(EVICTION_NAMES),
        "tenant_weights": rng.choice([(), (("anna", 3.0),)]),
        "policy": policy,
        "waiting_timeout_s": rng.choice([None, None, 0.1]),
        "running_timeout_s": rng.choice([None, None, 0.2]),
    }


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    length = rng.randint(1, longest)
    trunk = [(i * i) % VOCABULARY for i in range(longest)]
    shared = rng.randint(0, length)
    return trunk[:shared] + [rng.randrange(VOCABULARY) for _ in range(length - shared)]


def random_script(rng: random.Random, room: int, turns: int = 120):
    """Messages of each turn: requests, cancellations, controls."""
    script, names = [], []
    for _ in range(turns):
        messages = []
        if rng.random() < 0.25:
            names.append(f"r{len(names)}")
            prompt = random_prompt(rng, max(1, min(60, room // 2)))
            messages.append(submit(
                names[-1], prompt, max_new=rng.randint(1, max(1, min(40, room - len(prompt)))), seed=rng.randrange(3),
                stop_ids=rng.choice([(), (), (1,), (1, 3)]), salt=rng.choice(["", "", "other"]),
                tenant=rng.choice(["", "anna", "bert"]), priority=rng.choice([0, 0, 5, 20]),
                user=rng.choice(["", "carl"]), timeout_s=rng.choice([None, None, None, 0.15]),
                logprobs=rng.choice([None, 0]), prompt_logprobs=rng.choice([None, None, None, 0]),
            ))  # fmt: skip
        if rng.random() < 0.08 and names:
            messages.append(Cancel(rng.choice(names)))
        if rng.random() < 0.04:
            verb = rng.choice(["pause", "flush", "abort_all", "check", "continue"])
            messages.append(Control(call_id="c", verb=verb))
        if rng.random() < 0.03:
            pinned = tuple(random_prompt(rng, 40))
            messages.append(PinTokens(call_id="p", namespace=Namespace(), tokens=pinned, seconds=rng.choice([0, 0.05, 5])))
        if rng.random() < 0.05:
            messages.append(Ask(call_id="a", what=rng.choice(["requests", "scheduler", "tree"])))
        script.append(messages)
    return [*script, [Control(call_id="c", verb="continue")]]


def record_schedule(seed: int, directory: Path, policies, **options):
    """A random life of an engine, recorded. Returns engine, worker, outbox, journal after its end."""
    rng = random.Random(seed)
    settings = random_settings(rng, policies)
    script = random_script(rng, settings["pages"] * settings["page_size"])
    engine, worker, outbox, journal = recorded_engine(directory, script, **(settings | options))
    worker.fail_steps = {rng.randint(1, 40)} if rng.random() < 0.2 else set()
    worker.bad_rows = {(rng.randint(1, 30), 0)} if rng.random() < 0.2 else set()
    engine.run()
    engine.close()
    return engine, worker, outbox, journal
