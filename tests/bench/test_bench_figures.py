from collections import Counter

import pytest

from branchline.bench.client import Completion
from branchline.bench.drive import Tally
from branchline.bench.figures import ERRORS_KEPT, percentile, summarize


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3.0], 0.99, 3), ([2, 1], 0.5, 2), (list(range(100)), 0.99, 99), (list(range(1000)), 0.99, 990), ([5, 1, 3], 0.0, 1)],
)
def test_percentiles(values, share, expected):
    assert percentile(values, share) == expected


def test_figures_of_a_run():
    done = [Completion("", 0.1, 1.1, 11, 100), Completion("", 0.3, 0.3, 1, 50), Completion("", 0.2, 2.2, 11, 50)]
    one = summarize("batch", Tally(done, Counter({"x": 2}), 2.0))
    assert (one.requests, one.failed, one.errors) == (3, 2, {"x": 2})
    assert (one.output_tokens, one.prompt_tokens, one.output_tok_s, one.total_tok_s) == (23, 200, 11.5, 111.5)
    assert (one.ttft_p50_ms, one.ttft_p99_ms) == (200, 300)
    assert (one.tpot_p50_ms, one.tpot_p99_ms) == (100, 200)


def test_nothing_completed_has_no_percentiles():
    one = summarize("batch", Tally([], Counter({f"reason {n}": n for n in range(1, 9)}), 1.0))
    assert (one.ttft_p50_ms, one.tpot_p99_ms, one.output_tok_s, one.failed) == (None, None, 0, 36)
    assert len(one.errors) == ERRORS_KEPT
    assert next(iter(one.errors)) == "reason 8"
