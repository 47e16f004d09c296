import pytest

from branchline.bench.limits import best_time_s, measure_limits


@pytest.mark.parametrize("threads", [1, 2])
def test_limits_are_plausible(threads):
    limits = measure_limits(threads, buffer_bytes=1 << 22, matrix_width=128)
    assert limits.threads == threads
    assert 1e7 < limits.read_bytes_s < 1e13
    assert 1e7 < limits.float32_flop_s < 1e14


def test_the_best_time_of_several_after_a_first_that_does_not_count():
    calls = []
    assert best_time_s(lambda: calls.append(1), tries=3) >= 0
    assert len(calls) == 4
