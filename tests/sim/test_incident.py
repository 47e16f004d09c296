"""The traffic of a journal under other settings."""

import json
import random

import pytest

from branchline.base.errors import ConfigError
from branchline.cli.main import main
from branchline.sim.incident import as_workload, compare, read_journal
from branchline.sim.latency import LatencyFile, Load
from branchline.sim.replay import Replay
from branchline.wire.messages import Cancel
from tests.support.recorded import recorded_engine, submit
from tests.support.stamped import reference_output

VOCABULARY = 1000


def record(directory, script, **options):
    engine, _, _, _ = recorded_engine(directory, script, vocabulary=VOCABULARY, turn_ns=10_000, **options)
    engine.run()
    engine.close()
    return Replay.of(directory)


def traffic():
    """Requests of three kinds, a few turns apart: two shared beginnings and strangers."""
    script = []
    for i in range(40):
        beginning = [i % 3 * 100 + place for place in range(60)] if i % 3 else []
        script += [[submit(f"r{i}", [*beginning, *range(500 + 7 * i, 520 + 7 * i)], max_new=5 + i % 7)], [], []]
    return script


@pytest.fixture(scope="module", params=[False, True], ids=["hashed", "text"])
def replay(request, tmp_path_factory):
    return record(tmp_path_factory.mktemp("incident") / "j", traffic(), text=request.param, policy="fcfs", pages=120)


def test_the_same_settings_give_nearly_the_same_figures(replay):
    comparison = compare(replay, {})
    live, simulated = replay.summary, comparison.as_then.summary
    assert comparison.step_error < 0.01
    assert abs(comparison.makespan_error) < 0.05
    assert simulated.finished == live.finished == {"length": 40}
    assert simulated.output_tokens == live.output_tokens
    assert simulated.makespan_s == pytest.approx(live.makespan_s, rel=0.05)
    assert simulated.hit_rate == pytest.approx(live.hit_rate, abs=0.03)
    assert simulated.ttft_ms.mean == pytest.approx(live.ttft_ms.mean, rel=0.2)
    assert comparison.otherwise.summary == simulated


def test_steps_that_scatter_take_as_long_together(tmp_path):
    """Durations between a half and twice the mean, at random: single steps cannot be told, their sum can."""
    rng = random.Random(1)
    engine, worker, _, _ = recorded_engine(tmp_path / "j", traffic(), vocabulary=VOCABULARY, turn_ns=10_000)
    worker.scatter = lambda: rng.choice([0.3, 0.5, 1, 2.5])
    engine.run()
    engine.close()
    comparison = compare(Replay.of(tmp_path / "j"), {})
    assert comparison.step_error > 0.2
    assert abs(comparison.makespan_error) < 0.1


def test_other_settings_have_their_effect(replay):
    comparison = compare(replay, {"prefix_cache": False, "max_step_tokens": 16})
    then, otherwise = comparison.as_then.summary, comparison.otherwise.summary
    assert otherwise.hit_rate == 0 < then.hit_rate
    assert otherwise.steps > then.steps
    assert otherwise.makespan_s > then.makespan_s
    changes = comparison.changes
    assert len(changes) == 40
    assert [c.ttft_ns for c in changes] == sorted((c.ttft_ns for c in changes), reverse=True)
    assert changes[0].ttft_ns > 0
    assert changes[0].before.request_id == changes[0].after.request_id


def test_settings_that_do_not_exist_or_contradict_each_other(replay):
    with pytest.raises(ConfigError, match="no setting 'pagez'"):
        compare(replay, {"pagez": 3})
    with pytest.raises(ConfigError, match="max_step_tokens"):
        compare(replay, {"max_step_tokens": 1})


@pytest.mark.parametrize("text", [False, True])
def test_the_next_turn_of_a_conversation_finds_the_last(tmp_path, text):
    """Its prompt goes on with what was generated; in the simulation with what was made up instead."""
    first = list(range(30))
    answer = reference_output(first, 7, VOCABULARY, 40)
    second = [*first, *answer[:30], 3, 4]
    script = [[submit("one", first, max_new=40)], *[[] for _ in range(60)], [submit("two", second, max_new=5)]]
    replay = record(tmp_path / "j", script, text=text)
    cached = [r.cached_tokens for r in replay.story.records]
    assert cached == [0, 60]
    assert [r.cached_tokens for r in compare(replay, {}).as_then.requests] == cached


def test_what_cannot_be_known_is_filled_in(tmp_path):
    stops = range(0, VOCABULARY, 9)
    script = [[submit(f"r{i}", [i] * 9, max_new=200, stop_ids=stops if i else (), seed=i) for i in range(12)]]
    script += [[], [], [], [Cancel("r0")]]
    replay = record(tmp_path / "j", script, max_running=2, max_queued=4, max_step_tokens=16)
    finished = replay.summary.finished
    assert set(finished) == {"stop", "cancelled", "rejected"}
    workload = as_workload(replay, "w")
    records = {r.request_id: r for r in replay.story.records}
    lengths = sorted(r.output_tokens for r in records.values() if r.reason.value == "stop")
    typical = round((lengths[(len(lengths) - 1) // 2] + lengths[len(lengths) // 2]) / 2)
    for arrival in workload.arrivals:
        reason = records[arrival.request_id].reason.value
        if reason == "cancelled":
            assert (arrival.output_tokens, arrival.leaves_ns is not None) == (200, True)
        elif reason == "stop":
            assert (arrival.output_tokens, arrival.leaves_ns) == (records[arrival.request_id].output_tokens, None)
        else:
            assert (arrival.output_tokens, arrival.leaves_ns) == (typical, None)
    assert workload.arrivals[0].at_ns == 0
    roomy = compare(replay, {"max_queued": 100}).otherwise.summary
    assert roomy.finished == {"cancelled": 1, "length": 11}


def test_a_journal_is_a_workload_for_the_simulator(replay, tmp_path):
    record(tmp_path / "j", traffic())
    workload = read_journal(tmp_path / "j")
    assert (len(workload), workload.name) == (40, "j")
    with pytest.raises(ConfigError, match="cannot be scaled"):
        read_journal(tmp_path / "j", 0.5)


def test_a_journal_tells_how_fast_the_engine_was(replay, tmp_path, capsys):
    record(tmp_path / "j", traffic())
    assert main(["calibrate", "--journal", str(tmp_path / "j"), "--output", str(tmp_path / "latency.json")]) == 0
    assert "latency.json" in capsys.readouterr().out.replace("\n", "")
    file = LatencyFile.load(tmp_path / "latency.json")
    assert (file.model, file.page_size, file.pages) == ("stamped", 4, 64)
    assert file.latency.fixed_ns == pytest.approx(4e6, rel=0.01)
    assert file.latency.per_new_token_ns == pytest.approx(2e5, rel=0.01)
    assert main(["simulate", "--trace", str(tmp_path / "j"), "--latency", str(tmp_path / "latency.json")]) == 0


def test_a_failed_step_does_not_shift_the_others(tmp_path):
    engine, worker, _, _ = recorded_engine(tmp_path / "j", traffic(), vocabulary=VOCABULARY, turn_ns=10_000)
    worker.fail_steps = {5}
    engine.run()
    engine.close()
    replay = Replay.of(tmp_path / "j")
    plans = [plan for plan in worker.plans if plan.step != 5]
    assert [sample.load for sample in replay.story.samples] == [Load.of(plan) for plan in plans]
    assert list(replay.story.steps.rows) == [len(plan.rows) for plan in plans]


def test_no_requests_or_too_few_steps(tmp_path):
    with pytest.raises(ConfigError, match="holds no requests"):
        as_workload(record(tmp_path / "a", []), "empty")
    with pytest.raises(ConfigError, match="at least 8 measured steps"):
        compare(record(tmp_path / "b", [[submit("a", [1, 2], max_new=2)]]), {})


def test_the_command_shows_both_sides(tmp_path, capsys):
    record(tmp_path / "j", traffic(), policy="fcfs", pages=120)
    assert main(["replay", str(tmp_path / "j"), "--policy", "lpm", "--pages", "60", "--json", str(tmp_path / "o.json")]) == 0
    out = capsys.readouterr().out
    assert "as it happened" in out
    assert "policy lpm, pages 60" in out
    assert "plans byte-identical" in out
    record_ = json.loads((tmp_path / "o.json").read_bytes())
    assert record_["settings"] == {"policy": "lpm", "pages": 60}
    assert record_["otherwise"]["pages"] == 60
    assert len(record_["otherwise_requests"]) == 40
