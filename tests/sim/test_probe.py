"""Measuring a worker: here one whose speed is known."""

import msgspec
import pytest

from branchline.sim.clock import VirtualClock
from branchline.sim.latency import LatencyModel, fit
from branchline.sim.probe import Probe, Room, design, measure
from branchline.sim.worker import SimulatedWorker

TRUTH = LatencyModel(
    fixed_ns=3e6, per_new_token_ns=40_000, per_context_token_ns=300, per_row_ns=200_000, per_pair_ns=7
)  # fmt: skip
ROOM = Room(rows=64, step_tokens=512, context_length=8192, pages=6000, page_size=16)


class Watched(SimulatedWorker):
    """Remembers plans and checks what a real worker would stumble over."""

    def __init__(self, room):
        self.clock = VirtualClock()
        super().__init__(TRUTH, self.clock)
        self.room = room
        self.plans = []
        self.written = {0}
        self.known = {}

    def launch(self, plan):
        self.plans.append(plan)
        for opening in plan.opens:
            self.known[opening.slot] = len(opening.tokens)
        self.written.update(copy.target for copy in plan.copies)
        pages = [page for row in plan.rows for page in row.pages]
        assert len(pages) == len(set(pages))
        assert max(pages) < self.room.pages
        assert set(pages) <= self.written
        assert plan.token_count <= self.room.step_tokens
        for row in plan.rows:
            assert row.end <= len(row.pages) * self.room.page_size
            assert not row.sample or row.end == self.known[row.slot]
        return super().launch(plan)


def test_the_coefficients_of_a_worker_are_found():
    worker = Watched(ROOM)
    fitted = fit(measure(worker, ROOM, worker.clock, budget_ns=0))
    for found, true in zip(msgspec.structs.astuple(fitted.model), msgspec.structs.astuple(TRUTH), strict=True):
        assert found == pytest.approx(true, rel=0.01)


def test_time_that_is_left_is_used_for_repetitions():
    counts = []
    worker = Watched(ROOM)
    probes = len(design(ROOM))
    measure(worker, ROOM, worker.clock, budget_ns=0, progress=lambda done, total: counts.append(done))
    assert counts[-1] == probes
    measure(worker, ROOM, worker.clock, budget_ns=10**10, progress=lambda done, total: counts.append(done))
    assert counts[-1] > 2 * probes


@pytest.mark.parametrize(
    "change", [{"rows": 4}, {"step_tokens": 64}, {"context_length": 300}, {"pages": 40}, {"page_size": 1}]
)
def test_a_small_engine_is_measured_with_what_fits(change):
    room = Room(**{name: getattr(ROOM, name) for name in Room.__slots__} | change)
    worker = Watched(room)
    assert len(measure(worker, room, worker.clock, budget_ns=0)) == len(design(room)) < len(design(ROOM))


def test_what_does_not_fit_is_left_out():
    assert not ROOM.fits(Probe(65, 0, 0, 1))
    assert not ROOM.fits(Probe(1, 1, 512, 1))
    assert not ROOM.fits(Probe(1, 0, 0, 8191))
    assert not ROOM.fits(Probe(32, 0, 0, 4000))
    assert ROOM.fits(Probe(1, 1, 511, 100))
