"""The latency model: what a plan asks for, what a fit finds, what a file keeps."""

import random

import msgspec
import pytest

from branchline.base.errors import ConfigError
from branchline.core.plan import PlanRow, StepPlan
from branchline.sim.latency import FitError, LatencyFile, LatencyModel, Load, Sample, fit

TRUTH = LatencyModel(
    fixed_ns=5e6, per_new_token_ns=40_000, per_context_token_ns=300, per_row_ns=200_000, per_pair_ns=7
)  # fmt: skip


def load(rng):
    rows = [(rng.randrange(2000), rng.choice([1, 1, 1, 16, 200])) for _ in range(rng.randint(1, 16))]
    return Load.of(StepPlan(1, tuple(row(i, start, count) for i, (start, count) in enumerate(rows))))


def row(slot, start, count):
    return PlanRow(slot, slot, 0, start, count, True, ())


def samples(model, count=60, noise=0.0):
    rng = random.Random(1)
    loads = [load(rng) for _ in range(count)]
    return [Sample(each, round(model.predict_ns(each) * (1 + noise * (2 * rng.random() - 1)))) for each in loads]


def test_a_plan_is_counted_by_hand():
    plan = StepPlan(1, (row(0, 10, 1), row(1, 100, 4)))
    # One token sees 11 positions; four see 101, 102, 103 and 104.
    assert Load.of(plan) == Load(new_tokens=5, context_tokens=11 + 104, pairs=11 + 101 + 102 + 103 + 104, rows=2)


def test_a_prediction_is_the_sum_of_the_parts():
    assert TRUTH.predict_ns(Load(10, 100, 500, 2)) == 5_000_000 + 400_000 + 30_000 + 3_500 + 400_000


def test_a_fit_finds_the_model_that_made_the_samples():
    fitted = fit(samples(TRUTH))
    for found, true in zip(msgspec.structs.astuple(fitted.model), msgspec.structs.astuple(TRUTH), strict=True):
        assert found == pytest.approx(true, rel=0.01)
    assert fitted.error.held_out_p95 < 0.001


def test_noise_is_reported_as_error():
    fitted = fit(samples(TRUTH, 400, noise=0.2))
    assert 0.08 < fitted.error.mean < 0.12  # evenly between 0 and 20 %
    assert 0.17 < fitted.error.held_out_p95 < 0.22


def test_no_coefficient_becomes_negative():
    """Rows that seem to save time would make a step of many rows end before it began."""
    rng = random.Random(2)
    made = [
        Sample(each, 9_000_000 + 50_000 * each.new_tokens - 100_000 * each.rows) for each in (load(rng) for _ in range(80))
    ]
    fitted = fit([sample for sample in made if sample.duration_ns > 0])
    assert min(msgspec.structs.astuple(fitted.model)) >= 0
    assert fitted.model.per_row_ns == 0
    assert fitted.error.mean > 0.01


def test_samples_of_decode_only_are_enough_to_predict_decode():
    """Then pairs and context tokens are the same, and no solution is the only one."""
    decode = [
        Sample(Load(n, n * c, n * c, n), round(4e6 + 1e5 * n + 90 * n * c)) for n in (1, 2, 4, 8) for c in (5, 500, 900)
    ]
    fitted = fit(decode)
    assert fitted.model.predict_ns(Load(6, 1800, 1800, 6)) == pytest.approx(4e6 + 6e5 + 90 * 1800, rel=0.02)


def test_too_few_samples_are_refused():
    with pytest.raises(ConfigError, match="at least 8"):
        fit(samples(TRUTH, 7))


@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan")])
def test_impossible_coefficients_are_refused(bad):
    with pytest.raises(ConfigError, match="not negative"):
        LatencyModel(fixed_ns=bad, per_new_token_ns=1, per_context_token_ns=1, per_row_ns=1)


def test_a_worker_that_takes_no_time_is_refused():
    with pytest.raises(ConfigError, match="above zero"):
        LatencyModel(fixed_ns=0, per_new_token_ns=0, per_context_token_ns=0, per_row_ns=0)


def test_twice_as_fast_takes_half_as_long():
    assert TRUTH.faster(2).predict_ns(Load(10, 100, 500, 2)) == TRUTH.predict_ns(Load(10, 100, 500, 2)) // 2


def make_file():
    error = FitError(mean=0.01, p95=0.02, held_out_mean=0.03, held_out_p95=0.04)
    return LatencyFile(
        model="tiny", executor="none", machine="here", measured="now", samples=9, page_size=16, pages=100,
        context_length=2048, latency=TRUTH, error=error,
    )  # fmt: skip


def test_a_file_comes_back_as_it_was(tmp_path):
    make_file().save(tmp_path / "latency.json")
    assert LatencyFile.load(tmp_path / "latency.json") == make_file()


def test_a_file_that_cannot_be_read_or_written_is_said_so(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read"):
        LatencyFile.load(tmp_path / "nowhere.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        make_file().save(tmp_path / "file" / "latency.json")


@pytest.mark.parametrize("change", [{"kind": "other"}, {"latency": {"fixed_ns": -1}}, {"samples": "many"}, {"error": None}])
def test_a_file_that_is_something_else_is_said_so(tmp_path, change):
    content = msgspec.to_builtins(make_file())
    content["latency"] |= change.pop("latency", {})
    path = tmp_path / "latency.json"
    path.write_bytes(msgspec.json.encode(content | change))
    with pytest.raises(ConfigError, match=r"latency\.json"):
        LatencyFile.load(path)
