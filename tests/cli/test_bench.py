"""`branchline bench` from its words to its exit code."""

import asyncio
import json
import threading
from functools import partial

import pytest

from branchline.bench import limits
from branchline.cli.main import main
from branchline.models.random import RandomCheckpoint, tiny_config
from branchline.ops.native import usable_isas
from tests.support.checkpoints import write_gguf
from tests.support.sse_server import SseServer, refusal, stream_of


class Background:
    """A small server in a thread, for commands that run a loop of their own."""

    def __init__(self, script):
        self.server = SseServer(script)
        self._ready = threading.Event()

    def __enter__(self):
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(10)
        return self.server

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with self.server:
            self._ready.set()
            await self._stop.wait()


def counted(body):
    return stream_of(["word"] * body["max_tokens"], prompt_tokens=len(body["prompt"].split()))


def test_serve_prints_and_saves_figures(tmp_path, capsys):
    path = tmp_path / "figures.json"
    with Background(counted) as server:
        assert main(["bench", "serve", "--url", server.url, "--workload", "single,long", "--json", str(path)]) == 0
    single, long = json.loads(path.read_text())
    assert (single["workload"], single["requests"], single["failed"]) == ("single", 8, 0)
    assert (single["output_tokens"], single["prompt_tokens"]) == (8 * 128, 8 * 128)
    assert (long["output_tokens"], long["prompt_tokens"]) == (8 * 16, 8 * 3000)
    assert {body["model"] for body in server.bodies} == {"tiny"}
    shown = capsys.readouterr().out
    assert "output tok/s" in shown
    assert shown.count("\n") == 3


def test_serve_by_rate_and_by_trace(tmp_path):
    path, trace = tmp_path / "figures.json", tmp_path / "trace.jsonl"
    trace.write_text('{"time": 5, "prompt_tokens": 9, "output_tokens": 2}\n' * 3)
    with Background(counted) as server:
        words = ["bench", "serve", "--url", server.url, "--model", "m", "--json", str(path)]
        assert main([*words, "--workload", "batch", "--rate", "40", "--duration", "0.5"]) == 0
        by_rate = json.loads(path.read_text())[0]
        assert main([*words, "--trace", str(trace)]) == 0
        by_trace = json.loads(path.read_text())[0]
    assert by_rate["workload"] == "batch"
    assert 5 < by_rate["requests"] < 40
    assert by_rate["wall_s"] > 0.3
    assert (by_trace["workload"], by_trace["requests"], by_trace["prompt_tokens"]) == ("trace", 3, 27)


def test_serve_counts_failures_and_says_why(capsys):
    with Background(lambda body: refusal(503, "No [room].")) as server:
        assert main(["bench", "serve", "--url", server.url, "--workload", "single"]) == 1
    shown = capsys.readouterr().out
    assert "single: 8 × HTTP 503: No [room]." in shown


def test_serve_without_a_server_is_one_sentence(capsys):
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("branchline: 127.0.0.1:1 cannot be reached: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["serve"], 2),
        (["serve", "--url", "http://h", "--rate", "1", "--trace", "x"], 2),
        (["step", "--executor", "magic"], 2),
        (["step", "--quantize", "int3"], 2),
        (["step", "--rows", "a"], 2),
        (["serve", "--url", "h"], 78),
        (["serve", "--url", "http://h", "--workload", "quick"], 78),
        (["serve", "--url", "http://h", "--workload", ","], 78),
        (["serve", "--url", "http://h", "--rate", "-1"], 78),
        (["serve", "--url", "http://h", "--timeout", "0"], 78),
        (["step", "no-such-model"], 78),
    ],
)
def test_wrong_words(words, code, capsys):
    try:
        found = main(["bench", *words])
    except SystemExit as error:
        found = error.code
    assert found == code
    assert "Traceback" not in capsys.readouterr().err


def test_step_prints_and_saves(tmp_path, capsys, monkeypatch):
    small = partial(limits.measure_limits, matrix_width=64, byte_rounds=100, page_rounds=10)
    monkeypatch.setattr("branchline.cli.bench.measure_limits", small)
    monkeypatch.setattr("branchline.cli.bench.BUFFER_BYTES", 1 << 20)
    model, path = write_gguf(tmp_path / "tiny.gguf", RandomCheckpoint(tiny_config())), tmp_path / "steps.json"
    words = ["--rows", "1,4", "--prompts", "64,1024", "--prefix", "64", "--repeat", "1", "--profile", "--json", str(path)]
    words += ["--quantize", "int8"]
    assert main(["bench", "step", str(model), *words]) == 0
    record = json.loads(path.read_text())
    assert [(one["kind"], one["rows"], one["tokens"], one["prefix"]) for one in record["cases"]] == [
        ("decode", 1, 1, 0), ("decode", 4, 1, 0), ("decode", 1, 1, 64), ("decode", 4, 1, 64), ("prefill", 1, 64, 0),
        ("prefill", 1, 64, 64),
    ]  # fmt: skip
    assert all(one["tok_s"] > 0 and "Linear" in one["operators_ms"] for one in record["cases"])
    assert record["limits"]["read_bytes_s"] > 0
    assert len(record["skipped"]) == 2
    shown = capsys.readouterr().out
    assert "decode 4 rows, prefix 64" in shown
    assert "share of the time" in shown
    assert "int8 weights, " in shown
    assert ("multiply-adds of bytes" in shown) == bool(usable_isas())
    assert all(one["compute_share"] > 0 for one in record["cases"])
    assert "Left out: a prompt of 1024 takes 1024 positions" in shown
