"""`branchline simulate`, `advise` and `calibrate` as a user meets them."""

import json
from pathlib import Path

import msgspec
import pytest

from branchline.cli.main import main
from branchline.cli.traffic import latency_path, packaged_latency
from branchline.models.random import RandomCheckpoint, tiny_config
from branchline.sim.latency import LatencyFile
from tests.support.checkpoints import write_gguf

SAMPLE = str(Path(__file__).parent.parent / "data" / "mooncake_60.jsonl")
CHAT = ("--synthetic", "chat,requests=30,rate=0.5,output=8")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No latency file of this machine, and wide tables."""
    monkeypatch.setenv("BRANCHLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")


def run(capsys, *arguments):
    code = main(list(arguments))
    out = capsys.readouterr()
    return code, out.out, out.err


# ---------------------------------------------------------------- simulate


def test_a_trace_is_simulated_and_told_in_a_table(capsys):
    code, out, err = run(capsys, "simulate", "--trace", SAMPLE, "--pages", "unlimited")
    assert code == 0
    assert err == ""
    assert "mooncake_60.jsonl: 60 requests" in out
    assert "a block of 512 is 16 tokens" in out
    assert "length 60" in out
    assert "time to first token" in out


def test_the_same_command_writes_the_same_bytes(capsys, tmp_path):
    for name in ("one", "two"):
        assert run(capsys, "simulate", *CHAT, "--json", str(tmp_path / name))[0] == 0
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    answer = json.loads((tmp_path / "one").read_text())
    (only,) = answer["runs"]
    assert answer["workload"]["requests"] == len(only["requests"]["rows"]) == only["summary"]["requests"] == 30
    assert len(only["requests"]["columns"]) == len(only["requests"]["rows"][0])
    assert only["settings"]["pages"] == packaged_latency().pages
    assert answer["latency"]["model"] == packaged_latency().model


def test_sweeps_multiply_and_stand_side_by_side(capsys, tmp_path):
    path = tmp_path / "out.json"
    code, out, _ = run(
        capsys, "simulate", *CHAT, "--sweep", "policy=fcfs,lpm", "--sweep", "max-running=2,64", "--json", str(path)
    )
    assert code == 0
    names = [each["name"] for each in json.loads(path.read_text())["runs"]]
    assert names == [f"policy={policy}, max_running={rows}" for policy in ("fcfs", "lpm") for rows in (2, 64)]
    assert "TTFT p99" in out
    assert out.count("fcfs") == out.count("lpm") == 2


def test_pages_rate_fleet_and_switches_can_be_swept(capsys, tmp_path):
    path = tmp_path / "out.json"
    arguments = [
        "--sweep",
        "pages=200,unlimited",
        "--sweep",
        "replicas=1,2",
        "--sweep",
        "rate=1,4",
        "--sweep",
        "overlap=on,off",
    ]
    assert run(capsys, "simulate", *CHAT, *arguments, "--json", str(path))[0] == 0
    runs = json.loads(path.read_text())["runs"]
    assert len(runs) == 16
    assert {each["replicas"] for each in runs} == {1, 2}
    assert {each["rate"] for each in runs} == {1.0, 4.0}
    assert {each["settings"]["overlap"] for each in runs} == {True, False}
    assert 200 in {each["settings"]["pages"] for each in runs}


def test_a_fleet_is_simulated(capsys):
    code, out, _ = run(capsys, "simulate", *CHAT, "--replicas", "2", "--routing", "round-robin")
    assert code == 0
    assert "requests per replica" in out
    assert "15, 15" in out


def test_groups_are_shown_apart(capsys):
    _, out, _ = run(capsys, "simulate", "--synthetic", "hot-cold,requests=40,cold=0.3,prompt=64,output=4")
    assert "TTFT, hot" in out
    assert "TTFT, cold" in out


def test_a_calibrated_latency_file_is_used(capsys, tmp_path):
    packaged = packaged_latency()
    fast = msgspec.structs.replace(packaged, model="fast", machine="a fast machine", latency=packaged.latency.faster(1000))
    fast.save(tmp_path / "fast.json")
    _, out, _ = run(capsys, "simulate", *CHAT, "--latency", str(tmp_path / "fast.json"))
    assert "a fast machine" in out
    assert run(capsys, "simulate", *CHAT, "--model", "/models/Fast.gguf")[0] == 78
    path = latency_path(str(tmp_path / "cache"), "Fast")
    path.parent.mkdir(parents=True)
    fast.save(path)
    assert "a fast machine" in run(capsys, "simulate", *CHAT, "--model", "/models/Fast.gguf")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--trace", "nowhere.txt"], "use --format"),
        (["--synthetic", "other"], "no synthetic workload 'other'"),
        ([*CHAT, "--latency", "nowhere.json"], "nowhere.json cannot be read"),
        ([*CHAT, "--model", "org/name"], "run `branchline calibrate org/name` first"),
        ([*CHAT, "--pages", "0"], "pages must be"),
        ([*CHAT, "--pages", "many"], "pages must be"),
        ([*CHAT, "--rate", "0"], "--rate must be above zero"),
        ([*CHAT, "--first", "-1"], "--first must be above zero"),
        ([*CHAT, "--replicas", "0"], "at least one replica"),
        ([*CHAT, "--sweep", "colour=red"], "--sweep takes KEY=A,B,C"),
        ([*CHAT, "--sweep", "policy"], "--sweep takes KEY=A,B,C"),
        ([*CHAT, "--sweep", "max-running=few"], "--sweep max-running=few"),
        ([*CHAT, "--sweep", "routing=sideways"], "'sideways' is not one of"),
        ([*CHAT, "--sweep", "rate=" + ",".join(["1"] * 65)], "at most 64"),
        ([*CHAT, "--policy", "sideways"], "sideways"),
        ([*CHAT, "--json", "/nowhere/out.json"], "cannot be written"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_sentence(capsys, arguments, words):
    code, _, err = run(capsys, "simulate", *arguments)
    assert code == 78
    assert words in err
    assert err.startswith("branchline: ")


def test_traffic_must_come_from_somewhere(capsys):
    with pytest.raises(SystemExit) as error:
        main(["simulate"])
    assert error.value.code == 2


# ---------------------------------------------------------------- advise


def test_advice_is_given_in_words_and_as_json(capsys, tmp_path):
    path = tmp_path / "advice.json"
    code, out, _ = run(capsys, "advise", *CHAT, "--ttft-ms", "2000", "--json", str(path))
    assert code == 0
    assert "Recommended: branchline serve --pages" in out
    assert "The first bottleneck is the" in out
    advice = json.loads(path.read_text())
    assert set(advice["settings"]) == {"pages", "max_step_tokens", "max_running", "policy"}
    assert 0 <= advice["share_within_goal"] <= 1
    assert advice["runs"] < 60


def test_of_a_long_trace_the_busiest_part_is_looked_at(capsys):
    _, out, _ = run(capsys, "advise", *CHAT, "--requests", "10")
    assert "the busiest 10 of 30 requests" in out


def test_a_goal_out_of_range_is_refused(capsys):
    code, _, err = run(capsys, "advise", *CHAT, "--tpot-ms", "-1")
    assert code == 78
    assert "--tpot-ms must be above zero" in err


# ---------------------------------------------------------------- calibrate


def test_a_model_is_calibrated_and_simulated(capsys, tmp_path):
    model = write_gguf(str(tmp_path / "tiny.gguf"), RandomCheckpoint(tiny_config()))
    options = ["--seconds", "0", "--pages", "200", "--max-step-tokens", "64", "--threads", "1"]
    code, out, _ = run(capsys, "calibrate", str(model), *options)
    assert code == 0
    assert "a step takes" in out
    path = latency_path(str(tmp_path / "cache"), str(model))
    file = LatencyFile.load(path)
    assert file.pages == 200
    assert file.samples >= 8
    code, out, _ = run(capsys, "simulate", *CHAT, "--model", str(model))
    assert code == 0
    assert file.machine in out


def test_the_packaged_latency_file_says_where_it_was_measured():
    packaged = packaged_latency()
    assert packaged.samples >= 30
    assert packaged.error.held_out_mean < 0.1
    assert packaged.machine
    assert packaged.measured
