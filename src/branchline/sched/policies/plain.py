"""Orders for which the cache does not matter."""

from collections.abc import Iterable

from branchline.base.rng import mix64
from branchline.sched.lifecycle import Seq
from branchline.sched.policies.port import OrderPolicy, PassFacts


class Fcfs(OrderPolicy):
    """First come, first served.

    Starvation bound: a request is passed by nobody who came later, but for the time in which it follows a leader
    (``admission.FOLLOW_STEPS`` steps at most).
    """

    def order(self, line: Iterable[Seq], facts: PassFacts) -> Iterable[Seq]:
        return list(line)


class LongestOutput(OrderPolicy):
    """Largest ``max_new_tokens`` first (SGLang's ``lof``): for batches, where the longest job decides when all is done.

    Starvation bound: none. A short request can wait for ever behind long ones.
    """

    def order(self, line: Iterable[Seq], facts: PassFacts) -> Iterable[Seq]:
        return sorted(line, key=lambda seq: (seq.retractions == 0, -seq.spec.max_new_tokens))


class Random(OrderPolicy):
    """Drawn anew whenever the engine has done some work; a pure function of the seed and the work so far.

    Starvation bound: none that is certain. Among n waiting requests each is first with probability 1/n in every draw,
    so the chance of not having been first after k draws is (1 - 1/n) ** k.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._work_tokens = 0

    def order(self, line: Iterable[Seq], facts: PassFacts) -> Iterable[Seq]:
        draw = mix64(mix64(self._seed) + self._work_tokens)
        return sorted(line, key=lambda seq: (seq.retractions == 0, mix64(draw ^ mix64(seq.seq))))

    def note_admitted(self, seq: Seq, uncached_tokens: int) -> None:
        self._work_tokens += uncached_tokens

    def note_generated(self, seq: Seq) -> None:
        self._work_tokens += 1


class Priority(OrderPolicy):
    """Higher ``priority`` first, equal ones in arrival order. Running work gives way to a waiting request whose priority
    is higher by more than ``preemption_gap``: lowest priority first, then latest arrival, and only if that frees enough.

    Starvation bound: for the highest priority that is present the one of ``fcfs``. For lower ones none: they wait, and
    may be taken off their slots, as long as higher ones come. Who takes a slot from another is never taken off for it, so
    nothing goes round in circles.
    """

    def __init__(self, preemption_gap: int) -> None:
        self.preemption_gap = preemption_gap

    def order(self, line: Iterable[Seq], facts: PassFacts) -> Iterable[Seq]:
        return sorted(line, key=lambda seq: -seq.spec.priority)

    def precedence(self, seq: Seq) -> int:
        return seq.spec.priority
