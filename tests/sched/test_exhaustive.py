"""Every interleaving of three requests on six pages (`tests.support.exhaustive`), to a depth that a test has time for."""

import pytest

from branchline.base.errors import InvariantBroken
from tests.support.bugs import BUGS
from tests.support.exhaustive import explore

SMALL_SCOPE = {"free before the step is done", "token after an abort", "pages released twice", "tokens are doubled"}


def test_every_small_schedule_is_right():
    found = explore(8)
    assert found.states > 700
    assert found.ends > 300


@pytest.mark.parametrize("known", [bug for bug in BUGS if bug.name in SMALL_SCOPE], ids=lambda bug: bug.name)
def test_small_schedules_find_bugs_and_say_how(known):
    with known.on(), pytest.raises((AssertionError, InvariantBroken)) as caught:
        explore(8)
    assert "after submit" in caught.value.__notes__[0]
