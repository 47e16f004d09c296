"""Random schedules of the whole core: chaos for a while, then quiet, then judgement.

One number decides everything: configuration, requests, aborts, faults, the clock. Every request is judged against what
it must generate alone (`tests.support.stamped.reference_output`), every turn against `tests.support.proof`. A schedule
that fails raises; `replay_command(seed)` says how to see it again.
"""

import random
from collections import Counter, defaultdict

from branchline.base.config import CACHE_ONLY_POLICIES, EVICTION_NAMES, POLICY_NAMES
from branchline.base.errors import BranchlineError
from branchline.base.finish import FinishReason
from branchline.core.request import Namespace, RequestSpec, SamplingParams
from branchline.core.result import Finish, TokenLogprobs
from branchline.sched.lifecycle import State
from branchline.wire.messages import Cancel, Submit
from tests.support.harness import TURN_NS, Harness
from tests.support.proof import Proof
from tests.support.stamped import reference_output

VOCABULARY = 5
"""Small, so that prompts share prefixes and outputs meet stop tokens often."""
CHECK_EVERY = 8
"""Turns between full checks. A failing seed is run again with one every turn."""
VIOLATIONS = (AssertionError, BranchlineError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError)
"""What a wrong engine may raise."""
SHORT_QUEUE = 3
LIMITS_S = (None, None, None, None, None, None, None, None, 0.004, 0.03, 0.08)


def replay_command(seed: int) -> str:
    return f"python -m tests.schedules --seed {seed}"


def run_schedule(seed: int, check_every: int = CHECK_EVERY) -> "Schedule":
    """Run and judge one schedule; raises one of VIOLATIONS, or returns what it covered."""
    schedule = Schedule(seed, check_every)
    schedule.run()
    return schedule


class Schedule:
    def __init__(self, seed: int, check_every: int = CHECK_EVERY) -> None:
        self.rng = rng = random.Random(seed)
        self.coverage: Counter[str] = Counter(schedules=1)
        settings = random_settings(rng)
        self.proof = Proof()
        self.harness = Harness([self.proof], check_every=check_every, **settings)
        self.harness.check = self.proof.deep
        self.proof.watch(self.harness)
        self.harness.scheduler._ratio.value = rng.choice([0.7, 0.7, 0.1, 0.1])  # as after a long time without retractions
        worker = self.harness.worker
        worker.fail_steps = {rng.randint(1, 40) for _ in range(rng.choice([0, 0, 0, 0, 1, 2]))}
        worker.bad_rows = {(rng.randint(1, 30), rng.randrange(2)) for _ in range(rng.choice([0, 0, 0, 0, 1, 3]))}
        self.room = settings["pages"] * settings["page_size"]
        self.requests_left = rng.randint(2, 16)
        self.turns_left = rng.choice([10, 30, 60, 100])
        self.own_limits_s = rng.choice([(None,), (None,), (None,), LIMITS_S])
        self.longest_prompt = max(1, min(60, self.room // rng.choice([2, 4, 12])))
        self.longest_output = rng.choice([3, 20, 60, 60])
        self.submit_rate = rng.choice([0.1, 0.4, 0.9])
        self.cancel_rate = rng.choice([0, 0.03, 0.15])
        self.retract_rate = rng.choice([0, 0.03, 0.15])
        self.odd_rate = rng.choice([0, 0.02, 0.1])
        self.salts = rng.choice([[""], [""], ["", "other"]])
        self.tenants = rng.choice([[""], [""], ["", "guest"]])
        self.cancelled: set[str] = set()
        self.stopped: set[str] = set()
        self.doubled: Counter[str] = Counter()
        self.is_aborted = self.is_draining = False
        self.oddities = (
            self.submit_again, self.pause, self.flush, self.jump, self.pin, self.abort_all, self.drain, self.cancel_nobody,
        )  # fmt: skip

    # ------------------------------------------------------------ chaos, then quiet

    def run(self) -> None:
        for _ in range(self.turns_left):
            self.disturb()
            if not self.turn() and not self.requests_left:
                break
        self.harness.control("continue")
        self.proof.quieten()
        for _ in range(self.patience):
            if not self.turn():
                break
        else:
            raise AssertionError("the engine does not come to rest")
        self.judge()

    def turn(self) -> bool:
        busy = self.harness.turn()
        self.proof.after_turn()
        return busy

    @property
    def patience(self) -> int:
        """Turns after which everything must be over: one token each would be enough even alone, retractions included."""
        live = [spec for name, spec in self.harness.specs.items() if name not in self.proof.finished]
        return 100 + 8 * sum(len(spec.prompt) + spec.max_new_tokens for spec in live)

    def disturb(self) -> None:
        rng = self.rng
        if self.requests_left and rng.random() < self.submit_rate:
            self.requests_left -= 1
            self.submit(f"r{self.requests_left}")
        if rng.random() < self.cancel_rate and self.harness.specs:
            self.cancel(rng.choice(sorted(self.harness.specs)))
        if rng.random() < self.retract_rate:
            self.retract()
        if rng.random() < self.odd_rate:
            rng.choice(self.oddities)()

    # ------------------------------------------------------------ what may happen

    def submit(self, name: str) -> None:
        rng = self.rng
        prompt = self.random_prompt()
        longest = max(1, min(self.longest_output, self.room - len(prompt)))
        max_new = self.room + 1 if rng.random() < 0.02 else rng.randint(1, longest)
        self.harness.submit(
            name, prompt, max_new=max_new, seed=rng.randrange(3), stop_ids=rng.choice([(), (), (1,)]),
            salt=rng.choice(self.salts), tenant=rng.choice(self.tenants), user=rng.choice("xy"), priority=rng.randrange(3),
            timeout_s=rng.choice(self.own_limits_s), logprobs=rng.choice([None, 0]),
            prompt_logprobs=rng.choice([None, None, None, 0]),
        )  # fmt: skip
        self.coverage["requests"] += 1

    def random_prompt(self) -> list[int]:
        """A piece of a common trunk and something of its own; or what somebody said before, and then more."""
        rng = self.rng
        longest = self.longest_prompt
        if self.harness.specs and rng.random() < 0.3:
            spec = self.harness.specs[rng.choice(sorted(self.harness.specs))]
            prompt = [*spec.prompt, *self.expected(spec)][: rng.randint(1, longest)]
            return prompt + [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, longest - len(prompt)))]
        length = rng.randint(1, longest)
        shared = rng.randint(0, length)
        return [i * i % VOCABULARY for i in range(shared)] + [rng.randrange(VOCABULARY) for _ in range(length - shared)]

    def submit_again(self) -> None:
        """A second request with the id of one that is alive."""
        alive = [name for name in self.harness.specs if self.is_safely_alive(name)]
        if alive:
            name = self.rng.choice(alive)
            self.doubled[name] += 1
            twin = RequestSpec(
                request_id=name, prompt=(0, 1), sampling=SamplingParams(), max_new_tokens=2, seed=1, namespace=Namespace()
            )
            self.harness.inbox.put(Submit(twin))

    def is_safely_alive(self, name: str) -> bool:
        return self.harness.scheduler._roster.find(name) is not None and name not in self.proof.cancelled

    def cancel(self, name: str) -> None:
        """By the client, or by the text side that found a stop string."""
        self.coverage[f"aborts {self.state_of(name)}"] += 1
        reason = self.rng.choice([FinishReason.CANCELLED, FinishReason.CANCELLED, FinishReason.STOP])
        (self.stopped if reason is FinishReason.STOP else self.cancelled).add(name)
        self.harness.inbox.put(Cancel(name, reason))
        self.proof.cancelled.add(name)

    def state_of(self, name: str) -> str:
        seq = self.harness.scheduler._roster.find(name)
        if seq is None:
            return "after the end" if name in self.proof.finished else "before anything else"
        if seq.state is State.WAITING:
            return "while retracted" if seq.retractions else "while waiting"
        words = "in prefill" if seq.is_prefilling else "in decode"
        in_flight = any(row.seq == seq.seq for plan in self.harness.worker.queue for row in plan.rows)
        return words + (", row in flight" if in_flight else "")

    def cancel_nobody(self) -> None:
        self.harness.inbox.put(Cancel(self.rng.choice(["", "r", "nobody"])))

    def retract(self) -> None:
        self.proof.is_forcing = True
        self.coverage["retractions by force"] += bool(self.harness.scheduler._roster.running)
        self.harness.scheduler.retract_youngest(self.harness.clock.now_ns())
        self.proof.is_forcing = False

    def pause(self) -> None:
        if not self.proof.is_paused:
            self.proof.is_paused = True
            self.harness.control("pause")
        else:
            self.proof.is_paused = False
            self.harness.control("continue")

    def flush(self) -> None:
        self.harness.control("flush")

    def jump(self) -> None:
        self.harness.clock.advance(self.rng.randrange(40) * TURN_NS)

    def pin(self) -> None:
        if self.harness.specs:
            spec = self.harness.specs[self.rng.choice(sorted(self.harness.specs))]
            now_ns = self.harness.clock.now_ns()
            until_ns = now_ns + self.rng.randrange(60) * TURN_NS
            count, _ = self.harness.scheduler.pin(spec.namespace, spec.prompt, until_ns, now_ns)
            self.coverage["pins"] += count > 0

    def abort_all(self) -> None:
        if self.rng.random() < 0.3:
            self.coverage["aborts of everyone"] += 1
            self.is_aborted = True
            self.harness.control("abort_all")

    def drain(self) -> None:
        if self.rng.random() < 0.1:
            self.is_draining = True
            self.harness.control("drain")

    # ------------------------------------------------------------ judgement

    def expected(self, spec: RequestSpec) -> list[int]:
        return reference_output(spec.prompt, spec.seed, VOCABULARY, spec.max_new_tokens, spec.eos_token_ids, spec.namespace)

    def judge(self) -> None:
        self.proof.deep()
        story = Story(self.harness.outbox.outputs)
        for name, spec in self.harness.specs.items():
            self.judge_one(name, spec, story)
        self.judge_rest()
        self.count_coverage()

    def judge_one(self, name: str, spec: RequestSpec, story: "Story") -> None:
        refused = story.refusals[name]
        assert len(refused) <= self.doubled[name] + 1, f"{name} was refused {len(refused)} times"
        if name not in story.finish:
            assert refused, f"{name} never ended"
            self.judge_refusal(spec, refused[0])
            return
        finish, tokens, expected = story.finish[name], story.tokens[name], self.expected(spec)
        assert tokens == expected[: len(tokens)], f"I15: {name} said {tokens}, alone it says {expected}"
        assert finish.usage.prompt_tokens == len(spec.prompt), f"I16: usage of {name}"
        assert finish.usage.completion_tokens == len(tokens), f"I16: usage of {name}"
        assert finish.usage.cached_tokens < len(spec.prompt), f"I16: {name} was cached whole"
        self.judge_reason(name, spec, finish, tokens == expected)
        story.judge_logprobs(name, spec)

    def judge_reason(self, name: str, spec: RequestSpec, finish, is_whole: bool) -> None:
        at_ns, config = self.proof.finished[name].at_ns, self.harness.config
        self.coverage[f"ended {finish.reason.value}"] += 1
        match finish.reason:
            case FinishReason.STOP if name in self.stopped and not is_whole:
                pass
            case FinishReason.STOP | FinishReason.LENGTH:
                assert is_whole, f"I15: {name} ended too early"
                stopped = bool(finish.stop_token is not None and finish.stop_token in spec.stop_ids)
                assert stopped == (finish.reason is FinishReason.STOP) or name in self.stopped, f"reason of {name}"
            case FinishReason.CANCELLED:
                assert name in self.cancelled or self.is_aborted, f"I17: nobody cancelled {name}"
            case FinishReason.WAITING_TIMEOUT | FinishReason.RUNNING_TIMEOUT:
                has_run = name in self.proof.admitted_ns
                assert has_run == (finish.reason is FinishReason.RUNNING_TIMEOUT), f"I21: {name} ended as {finish.reason}"
                since = self.proof.admitted_ns[name] if has_run else self.proof.submitted_ns[name]
                limit_s = config.running_timeout_s if has_run else config.waiting_timeout_s
                is_late = limit_s is not None and at_ns - since >= limit_s * 1e9
                own_s = spec.timeout_s
                is_late |= own_s is not None and at_ns - self.proof.submitted_ns[name] >= own_s * 1e9
                assert is_late, f"I21: {name} ended too early"
            case FinishReason.ERROR:
                assert self.proof.seq_of.get(name) in self.harness.worker.harmed, f"{name} failed without a fault"
            case _:
                raise AssertionError(f"{name} ended with {finish}")

    def judge_refusal(self, spec: RequestSpec, finish) -> None:
        self.coverage[f"refused with {finish.status}"] += 1
        needed = -(-(len(spec.prompt) + spec.max_new_tokens) // self.harness.config.page_size)
        allowed = {
            400: needed > self.harness.config.pages,
            429: self.harness.config.max_queued == SHORT_QUEUE or self.harness.config.max_queued_tokens is not None,
            503: self.is_draining,
        }
        assert allowed.get(finish.status), f"I10: {spec.request_id} was refused: {finish}"

    def judge_rest(self) -> None:
        """I20: nothing is left of anybody, once the time of the last pin is over."""
        harness = self.harness
        harness.clock.advance(100 * TURN_NS)
        harness.turn()
        stats = harness.scheduler.stats()
        left = (stats.running, stats.waiting, stats.pages_private, stats.pages_retired, stats.locked_nodes, stats.slots_used)
        assert left == (0, 0, 0, 0, 0, 0), f"I20: {left}"
        assert stats.pages_free + stats.pages_evictable == stats.pages_total, "I20: pages were lost"
        assert not harness.scheduler.take_news(), "I20: something was not said"
        assert not harness.scheduler.in_flight, "I20: something is in flight"
        assert harness.scheduler.flush(), "I20: an idle engine cannot be flushed"
        assert harness.ledger.free_pages == harness.ledger.page_count, "I20: pages outlive a flush"
        harness.scheduler.rest()

    def count_coverage(self) -> None:
        stats = self.harness.scheduler.stats()
        self.coverage.update(
            {
                "turns": self.harness.turns,
                "steps": stats.steps,
                "tokens generated": stats.generated_tokens,
                "tokens from the cache": stats.cached_tokens,
                "retractions for memory": stats.retractions - stats.preemptions - self.coverage["retractions by force"],
                "late results": stats.late_results,
                "evicted pages": stats.evicted_pages,
                "failed steps": stats.failed_steps,
                "preemptions": stats.preemptions,
                "page copies": sum(len(plan.copies) for plan in self.harness.worker.plans),
                f"policy {self.harness.config.policy}": 1,
                f"eviction {self.harness.config.eviction}": 1,
                f"depth {self.harness.depth}": 1,
            }
        )


class Story:
    """What the outside heard, by request: nothing may come after a finish."""

    def __init__(self, outputs) -> None:
        self.finish: dict[str, Finish] = {}
        self.refusals: defaultdict[str, list[Finish]] = defaultdict(list)
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self._rows: defaultdict[str, list[TokenLogprobs]] = defaultdict(list)
        self._prompt_rows: defaultdict[str, list[TokenLogprobs]] = defaultdict(list)
        for output in outputs:
            self._hear(output)

    def _hear(self, output) -> None:
        name = output.request_id
        if output.finish is not None and output.finish.reason is FinishReason.REJECTED:
            self.refusals[name].append(output.finish)
            return
        assert name not in self.finish, f"I16: news of {name} after its end"
        self.tokens[name].extend(output.tokens)
        self._rows[name].extend(output.logprobs)
        self._prompt_rows[name].extend(output.prompt_logprobs)
        if output.finish is not None:
            self.finish[name] = output.finish

    def judge_logprobs(self, name: str, spec: RequestSpec) -> None:
        rows = [row.token for row in self._rows[name]]
        assert rows == (self.tokens[name] if spec.sampling.logprobs is not None else []), f"logprobs of {name}"
        found = [(row.token, row.logprob) for row in self._prompt_rows[name]]
        wanted = [(spec.prompt[p], -float(p)) for p in range(1, len(spec.prompt))]
        if spec.sampling.prompt_logprobs is None:
            wanted = []
        is_whole = bool(self.tokens[name])  # the first token comes with the last of the prompt
        assert found == (wanted if is_whole else wanted[: len(found)]), f"prompt logprobs of {name}"


def random_settings(rng: random.Random) -> dict:
    max_running = rng.choice([1, 2, 4, 8, 8])
    depth = rng.choice([0, 1, 1, 1, 2])
    policy = rng.choice(POLICY_NAMES)
    return {
        "pages": rng.choice([6, 6, 8, 8, 12, 24, 64]),
        "page_size": rng.choice([1, 2, 3, 4, 8, 16]),
        "max_running": max_running,
        "max_step_tokens": max(max_running, rng.choice([1, 4, 9, 32, 100])),
        "max_chunk_tokens": rng.choice([None, None, 1, 3, 16]),
        "max_queued": rng.choice([256, 256, 256, 256, SHORT_QUEUE]),
        "max_queued_tokens": rng.choice([None, None, None, None, 40]),
        "policy": policy,
        "overtake_tokens": rng.choice([1, 20, 100, 4096]),
        "preemption_gap": rng.choice([0, 0, 1, 10]),
        "tenant_weights": rng.choice([(), (("x", 3.0),), (("guest", 0.5),)]),
        "policy_seed": rng.randrange(100),
        "prefix_cache": policy in CACHE_ONLY_POLICIES or rng.random() < 0.85,
        "eviction": rng.choice(EVICTION_NAMES),
        "pin_share": rng.choice([0, 0.25, 0.9]),
        "overlap": depth > 0,
        "depth": depth,
        "waiting_timeout_s": rng.choice(LIMITS_S),
        "running_timeout_s": rng.choice(LIMITS_S),
        "vocabulary": VOCABULARY,
    }
