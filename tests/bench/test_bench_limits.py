import threading
import time

import pytest

from branchline.bench.limits import best_time_s, kernel_speed, measure_limits


@pytest.mark.parametrize("threads", [1, 2])
def test_limits_are_plausible(threads):
    limits = measure_limits(threads, buffer_bytes=1 << 22, matrix_width=128)
    assert limits.threads == threads
    assert 1e7 < limits.read_bytes_s < 1e13
    assert 1e7 < limits.float32_flop_s < 1e14
    assert limits.byte_op_s is limits.page_op_s is None


def test_all_threads_multiply_bytes_at_the_same_time():
    """Each loop waits for the others, so that one after the other would never end."""
    together = threading.Barrier(3, timeout=10)

    def multiply_bytes(rounds):
        together.wait()
        time.sleep(0.01)
        return rounds * 256

    assert 1e5 < kernel_speed(3, multiply_bytes, rounds=1000) < 2 * 3 * 256 * 1000 / 0.01


def test_the_best_time_of_several_after_a_first_that_does_not_count():
    calls = []
    assert best_time_s(lambda: calls.append(1), tries=3) >= 0
    assert len(calls) == 4
