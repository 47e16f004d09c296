import itertools
import json

import pytest

from branchline.base.errors import ConfigError
from branchline.bench import arrivals
from branchline.bench.arrivals import poisson, read_trace
from branchline.bench.workloads import WORKLOADS


def test_poisson_arrivals_follow_from_the_seed():
    one, again, other = (poisson(WORKLOADS["batch"], seed, rate=5, duration_s=10) for seed in (1, 1, 2))
    assert one == again != other


def test_poisson_arrivals_have_the_rate_in_order_and_in_time():
    times = [arrival.at_s for arrival in poisson(WORKLOADS["single"], 1, rate=50, duration_s=40)]
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 40
    assert 2000 * 0.9 < len(times) < 2000 * 1.1
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert 0.8 < variance / mean**2 < 1.25  # that of an exponential distribution is 1


@pytest.mark.parametrize(("rate", "duration_s"), [(0, 1), (-1, 1), (1, 0), (1e9, 1e9), (float("nan"), 1)])
def test_poisson_is_bounded(rate, duration_s):
    with pytest.raises(ConfigError, match="rate and duration"):
        poisson(WORKLOADS["single"], 1, rate=rate, duration_s=duration_s)


def test_prompts_are_bounded(monkeypatch, tmp_path):
    monkeypatch.setattr(arrivals, "MOST_CHARACTERS", 10_000)
    (tmp_path / "trace").write_text('{"time": 1, "prompt_tokens": 3000, "output_tokens": 1}')
    with pytest.raises(ConfigError, match="fewer or shorter"):
        read_trace(tmp_path / "trace", seed=1)
    with pytest.raises(ConfigError, match="fewer or shorter"):
        poisson(WORKLOADS["long"], 1, rate=10, duration_s=1)


def test_a_trace_is_sorted_and_starts_at_zero(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [(12.5, 30, 4), (10, 20, 3)]
    path.write_text("\n\n".join(json.dumps({"time": t, "prompt_tokens": p, "output_tokens": o}) for t, p, o in lines))
    found = read_trace(path, seed=1)
    assert [arrival.at_s for arrival in found] == [0, 2.5]
    assert [(len(turn.text.split()), turn.output_tokens) for one in found for turn in one.conversation] == [
        (20, 3),
        (30, 4),
    ]
    assert read_trace(path, seed=1) == found != read_trace(path, seed=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no request"),
        ('{"time": 1, "prompt_tokens": 1, "output_tokens": 1}\n{"time"', "line 2"),
        ('{"time": 1, "prompt_tokens": 0, "output_tokens": 1}', "line 1: .*between 1"),
        ('{"time": -1, "prompt_tokens": 1, "output_tokens": 1}', "not be negative"),
        ('{"time": 1, "prompt_tokens": 99999999, "output_tokens": 1}', "between 1"),
        ('{"time": 1, "prompt_tokens": 1}', "output_tokens"),
    ],
)
def test_a_wrong_trace_is_one_sentence(tmp_path, text, words):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_trace(path, seed=1)


def test_a_missing_trace_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.jsonl cannot be read: No such file"):
        read_trace(tmp_path / "no.jsonl", seed=1)
