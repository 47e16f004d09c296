"""Each re-created historical bug is caught, or our tests are worth less than they seem (reliability 3.8)."""

import pytest

from tests.support.bugs import BUGS, SCHEDULES, catch
from tests.support.schedules import run_schedule

MOST_SEEDS = 1000


@pytest.mark.parametrize("known", BUGS, ids=lambda bug: f"{bug.origin}-{bug.name}")
def test_every_bug_is_caught(known):
    assert catch(known, MOST_SEEDS).is_caught, known.sentence


def test_there_are_enough_of_them():
    assert len({bug.origin for bug in BUGS} - {"own"}) >= 40
    assert len({bug.name for bug in BUGS}) == len(BUGS)


def test_a_bug_is_gone_when_its_block_ends():
    known = next(bug for bug in BUGS if bug.test == SCHEDULES)
    before = known.owner.__dict__[known.attribute]
    with known.on():
        assert known.owner.__dict__[known.attribute] is not before
    assert known.owner.__dict__[known.attribute] is before
    run_schedule(0)
