"""The bar of a model that takes its time."""

import contextlib
import io

import numpy as np
import pytest

from branchline.base.clock import NS_PER_S, ManualClock
from branchline.engine.loading import Loading
from branchline.ops.packed import Groups, Numbers, PackedWeight


@pytest.fixture(autouse=True)
def terminal_that_can(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def weight():
    rows, codes = np.ones((2, 32), np.float32), np.ones((2, 32), np.uint8)
    return PackedWeight(shape=(4, 32), encoding="q8", slabs=iter((Numbers(0, rows), Groups(2, codes, rows[:, :1], None))))


def load(terminal, slab_ns, weights=2):
    clock = ManualClock()
    with Loading(weights * 4 * 32, clock, terminal) as loading:
        for _ in range(weights):
            for _ in loading.watch(weight()).slabs:
                clock.advance(slab_ns)
    return terminal.getvalue()


@pytest.mark.parametrize(("terminal", "slab_ns"), [(Terminal(), NS_PER_S // 5), (io.StringIO(), NS_PER_S)])
def test_quick_loads_and_files_see_nothing(terminal, slab_ns):
    assert load(terminal, slab_ns) == ""


def test_a_slow_load_draws_a_bar_that_ends_full_and_goes_away():
    drawn = load(Terminal(), NS_PER_S)
    assert "loading the model" in drawn
    assert "100%" in drawn
    assert drawn.endswith("\x1b[2K")  # the line is wiped


def test_the_weight_is_what_it_was():
    with Loading(1, ManualClock(), io.StringIO()) as loading:
        watched = loading.watch(weight())
        assert (watched.shape, watched.encoding) == ((4, 32), "q8")
        assert [type(slab) for slab in watched.slabs] == [Numbers, Groups]


def test_an_error_ends_the_bar():
    terminal, clock = Terminal(), ManualClock()

    def slabs():
        yield from weight().slabs
        raise RuntimeError("disk")

    broken = PackedWeight(shape=(4, 32), encoding="q8", slabs=slabs())
    with contextlib.suppress(RuntimeError), Loading(128, clock, terminal) as loading:
        for _ in loading.watch(broken).slabs:
            clock.advance(NS_PER_S)
    assert "loading the model" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")
