"""Who dies with whom: the server's processes under SIGKILL, SIGTERM and wrong settings."""

import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest

from tests.support.server import Server, gone

LIMIT_S = 3.0
LONG = 150
"""Tokens of a request that outlives several heartbeats: what the metrics say of it is at most one heartbeat old."""


def wait_until(condition, timeout_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


@pytest.fixture(params=["0", "1"], ids=["text-inside", "text-apart"])
def server(request, default_checkpoint):
    with Server("--pages", "64", "--text-workers", request.param) as server:
        yield server


def test_a_killed_child_takes_the_server_down(server):
    children = server.children
    assert children
    for victim in children[-1:]:
        victim.kill()
    assert server.process.wait(LIMIT_S) == 70
    wait_until(lambda: all(gone(child) for child in children))
    assert any("process was killed by SIGKILL" in line for line in server.lines)


def test_a_killed_server_leaves_no_orphan(server):
    children = server.children
    server.process.kill()
    wait_until(lambda: all(gone(child) for child in children))


def test_requests_in_flight_hear_of_the_engines_death(server):
    answers = []

    def ask():
        answers.append(server.post("/v1/completions", prompt="Hello", max_tokens=500, ignore_eos=True))

    thread = threading.Thread(target=ask)
    thread.start()
    server.wait_for(lambda metrics: metrics["branchline_running_requests"] == 1)
    for child in server.children:
        child.kill()
    thread.join(LIMIT_S)
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["message"]


def test_sigterm_lets_running_requests_finish(server):
    answers = []

    def ask():
        answers.append(server.post("/v1/completions", prompt="Hello", max_tokens=LONG, ignore_eos=True))

    thread = threading.Thread(target=ask)
    thread.start()
    server.wait_for(lambda metrics: metrics["branchline_running_requests"] == 1)
    server.process.terminate()
    thread.join(60)
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == LONG
    assert server.process.wait(10) == 0


def test_a_stopped_engine_is_not_ready_and_its_server_still_healthy(server):
    engine = next(child for child in server.children if "engine.process" in " ".join(child.cmdline()))
    assert httpx.get(server.url + "/ready").status_code == 200
    engine.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: httpx.get(server.url + "/ready").status_code == 503, timeout_s=5)
        assert httpx.get(server.url + "/health").status_code == 200
    finally:
        engine.send_signal(signal.SIGCONT)
    wait_until(lambda: httpx.get(server.url + "/ready").status_code == 200)


def run_serve(*options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "branchline.cli.main", "serve", *options], capture_output=True, text=True, timeout=60,
        check=False, env={**os.environ},
    )  # fmt: skip


def test_wrong_settings_get_one_sentence(tmp_path):
    bad = tmp_path / "broken.gguf"
    bad.write_bytes(b"GGUF\x03\x00\x00\x00 and then nothing")
    for options, word in (
        ((str(bad),), "broken.gguf"),
        (("/nowhere/model.gguf",), "model.gguf"),
        (("--host", "0.0.0.0"), "key"),
        (("--max-step-tokens", "2"), "max_step_tokens"),
        (("--policy", "magic"), "magic"),
    ):
        done = run_serve("--port", "0", *options)
        assert done.returncode == 78, done
        assert word in done.stderr
        assert "Traceback" not in done.stderr


def test_a_taken_port_is_said_at_once(server):
    port = server.url.rsplit(":", 1)[1]
    started = time.monotonic()
    done = run_serve("--port", port)
    assert done.returncode == 78
    assert "in use" in done.stderr
    assert time.monotonic() - started < 10
    assert psutil.pid_exists(server.process.pid)
