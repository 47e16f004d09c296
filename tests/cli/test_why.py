"""`branchline why`: words on the terminal, from a scripted server and from a real one."""

import socket
import threading

import httpx
import msgspec
import pytest

from branchline.cli.main import main
from branchline.core.explain import (
    BudgetView,
    CacheView,
    Holder,
    KvShort,
    KvView,
    Miss,
    MissReason,
    QueueView,
    RequestAnswer,
    RequestStory,
    SchedulerView,
    SettingsView,
    WaitingView,
)
from branchline.core.words import remedy
from tests.support.live_server import live_server
from tests.support.server import ADMIN_KEY, Server

S = 1_000_000_000
SHORT = KvShort(20, 4, 12, 12, 3, (Holder("r1", 9, 2, 40),), 40, 55)
WAITING = WaitingView(
    request_id="cmpl-1-0", position=2, waited_ns=3 * S // 2, prompt_tokens=300, cached_tokens=64, retractions=1,
    cause=SHORT, would_admit=remedy(SHORT), starts_in_ns=2 * S,
)  # fmt: skip
STORY = RequestStory(
    request_id="cmpl-2-0", tenant="", is_finished=True, finish="length", arrived_at_ns=S, queue_ns=S // 4, prefill_ns=S // 2,
    decode_ns=3 * S, requeued_ns=0, prompt_tokens=300, completion_tokens=40, chunks=2, steps=42, cached_page_tokens=96,
    cached_tail_tokens=7, retractions=0,
    missed=(Miss(MissReason.EVICTED, 103, 150, 5 * S, "cmpl-9-0"), Miss(MissReason.NEVER_SEEN, 253, 47)),
)  # fmt: skip


def scheduler_view(waiting=5, **stops):
    return SchedulerView(
        now_ns=10 * S, paused=False, draining=False,
        queue=QueueView(
            waiting=waiting, running=8, oldest_waited_ns=4 * S, waiting_prompt_tokens=900, by_cause={"row_cap": 5},
            head=WAITING if waiting else None, recent_stops=stops,
        ),
        budget=BudgetView(
            step_tokens=512, decode_tokens=8, prefill_tokens=0, recent_step_ns=S // 50, recent_tokens_per_s=400
        ),
        kv=KvView(
            pages=100, free=20, evictable=30, private=40, tree=40, retired=0, promised=10, new_token_ratio=0.5,
            peak_wanted=150, holders=(Holder("r1", 9, 2, 40),),
        ),
        cache=CacheView(
            prompt_tokens=1000, cached_tokens=500, missed_tokens={}, recent_prompt_tokens=1000, recent_cached_tokens=500,
            recent_missed_tokens={}, evicted_pages=0, retractions=0, evictions=(),
        ),
        settings=SettingsView(
            policy="hrrn", max_running=8, max_queued=256, max_step_tokens=512, max_chunk_tokens=None, pages=100,
            page_size=16, context_length=2048, prefix_cache=True,
        ),
    )  # fmt: skip


@pytest.fixture
def why(capsys, monkeypatch):
    """Run the command against answers; ``(exit code, words on stdout and stderr without line breaks)``."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.delenv("BRANCHLINE_ADMIN_KEYS", raising=False)
    monkeypatch.delenv("BRANCHLINE_API_KEYS", raising=False)

    def run(*words, answers=(), **config):
        with live_server(**config) as server:
            told = {key: msgspec.json.encode(value) for key, value in answers}
            server.call(server.text.told.update, told)
            code = main(["why", "--url", server.url, *words])
        printed = capsys.readouterr()
        return code, " ".join((printed.out + printed.err).split())

    return run


def test_a_waiting_request(why):
    code, words = why("cmpl-1", answers=[(("request", "cmpl-1"), RequestAnswer("cmpl-1", 10 * S, (WAITING,)))])
    assert code == 0
    for part in (
        "cmpl-1-0 waits: number 2 in the line, for 1.5 s; 64 of its 300 prompt tokens are cached.",
        "It ran already and was sent back 1 time",
        "KV memory is short by 12 pages: 20 needed and 4 for output to come, 12 available, held by 3 running requests",
        "the next of them ends in 40 tokens at the latest",
        "What would admit it: 12 more free KV pages: when running requests end (in 55 tokens at the latest)",
        "Estimated start: in 2.0 s or sooner.",
    ):
        assert part in words


def test_a_finished_request(why):
    code, words = why("cmpl-2", answers=[(("request", "cmpl-2"), RequestAnswer("cmpl-2", 10 * S, (STORY,)))])
    assert code == 0
    for part in (
        "cmpl-2-0 ended (length); it came 9.0 s ago.",
        "queue 0.2 s",
        "prompt 0.5 s for 300 tokens in 2 chunks",
        "output 3.0 s for 40 tokens; 42 steps in all",
        "from the cache 103 of 300 tokens, 7 of them copied from a page that goes on differently",
        "150 tokens from number 103 on had been cached and were evicted 5.0 s ago, to make room for cmpl-9-0",
        "47 tokens from number 253 on had never been seen",
    ):
        assert part in words


def test_the_queue_and_the_setting_to_change(why):
    code, words = why("--queue", answers=[(("scheduler", ""), scheduler_view(row_cap=40, kv_short=2))])
    assert code == 0
    assert "5 requests waiting, 8 running; the longest has waited 4.0 s." in words
    assert "The queue grows because of the row cap: only 8 requests may run at a time." in words
    assert "Try --max-running 13 (now 8)" in words


def test_no_words_means_the_queue(why):
    code, words = why(answers=[(("scheduler", ""), scheduler_view(waiting=0))])
    assert code == 0
    assert "Nobody waits" in words


def test_an_unknown_request(why):
    code, words = why("cmpl-7")
    assert code == 1
    assert words == "branchline: There is no such request, or it ended too long ago."


def test_a_key_that_lacks(why, monkeypatch):
    answers = [(("scheduler", ""), scheduler_view())]
    code, words = why(answers=answers, admin_keys=("boss",))
    assert code == 1
    assert "BRANCHLINE_ADMIN_KEYS" in words
    monkeypatch.setenv("BRANCHLINE_ADMIN_KEYS", "boss")
    assert why(answers=answers, admin_keys=("boss",))[0] == 0


def test_nobody_there(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert main(["why", "--url", f"http://127.0.0.1:{port}"]) == 1
    assert "No server answers at" in capsys.readouterr().err
    assert main(["why", "--url", "file:///etc/passwd"]) == 1
    assert "must begin with http" in capsys.readouterr().err


def test_somebody_else_there(why):
    code, words = why(answers=[(("scheduler", ""), {"hello": 1})])
    assert code == 1
    assert "not a Branchline server of this version" in words


# ---------------------------------------------------------------- a real server


def test_a_real_server_names_the_row_cap_and_explains_its_requests(capsys, monkeypatch):
    """Two rows, many long answers: the queue grows, and why."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("BRANCHLINE_ADMIN_KEYS", ADMIN_KEY)
    with Server("--max-running", "2", "--pages", "400", "--threads", "1") as server:
        load = [threading.Thread(target=ask, args=(server, index)) for index in range(6)]
        for thread in load:
            thread.start()
        server.wait_for(lambda metrics: metrics['branchline_waiting_requests_by_cause{cause="row_cap"}'] >= 3)
        assert main(["why", "--queue", "--url", server.url]) == 0
        queue = capsys.readouterr().out
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        lines = httpx.get(f"{server.url}/v1/requests", headers=headers, timeout=30).json()["requests"]
        waiting = [line["request_id"] for line in lines if line["state"] == "waiting"][-1]
        assert main(["why", waiting.rsplit("-", 1)[0], "--url", server.url]) == 0
        request = capsys.readouterr().out
        server.admin("/abort_all")
        for thread in load:
            thread.join(30)
        assert main(["why", waiting, "--url", server.url]) == 0
        story = capsys.readouterr().out
        tree = httpx.get(f"{server.url}/v1/cache/tree", headers=headers, timeout=30).json()
    assert "The queue grows because of the row cap" in queue
    assert "Try --max-running" in queue
    assert waiting in request
    assert "all 2 rows are taken" in request
    assert "Estimated start: in" in request
    assert "ended (cancelled)" in story
    assert tree["pages"] > 0


def ask(server, index):
    prompt = f"Story number {index}: " + "once upon a time in a small town by the sea " * 5
    server.post("/v1/completions", prompt=prompt, max_tokens=400, ignore_eos=True)
