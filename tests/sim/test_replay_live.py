"""Journals of real servers under load: real processes, a real model, real time; replayed without any of them."""

import asyncio
import random

import httpx

from branchline.core.request import SamplingParams
from branchline.engine.offline import LLM
from branchline.models.random import RandomCheckpoint, tiny_config
from branchline.sim.replay import Replay
from tests.support.checkpoints import write_folder
from tests.support.server import Server

REQUESTS = 64


def serve(directory, *options, tokens, patience):
    """64 requests at once, some of which are given up; outcomes and the metrics at the end."""
    with Server(*options, "--journal", str(directory)) as server:
        outcomes = asyncio.run(everyone(server.url, tokens, patience))
        metrics = server.wait_for(lambda m: m["branchline_running_requests"] + m["branchline_waiting_requests"] == 0, 120)
    return outcomes, metrics


async def everyone(url, tokens, patience):
    async with httpx.AsyncClient(base_url=url, timeout=240, limits=httpx.Limits(max_connections=None)) as client:
        return await asyncio.gather(*(one(client, index, tokens, patience) for index in range(REQUESTS)))


async def one(client, index, tokens, patience):
    rng = random.Random(index)
    body = {
        "prompt": f"xylophone quagmire {index % 4} is" + " very" * (index % 5), "max_tokens": rng.randint(*tokens),
        "temperature": 1, "ignore_eos": True, "stream": rng.random() < 0.7,
    }  # fmt: skip
    try:
        async with asyncio.timeout(rng.choice([None, None, *patience])):
            if index % 5 == 0:  # who has read the first word has certainly been running when it goes
                return await first_word(client, body)
            (await client.post("/v1/completions", json=body)).raise_for_status()
            return "done"
    except TimeoutError:
        return "given up"


async def first_word(client, body):
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        answer.raise_for_status()
        async for _ in answer.aiter_lines():
            return "given up"
    raise AssertionError("a stream without a line")


def assert_identical(directory, metrics):
    replay = Replay.of(directory)
    assert (replay.difference, replay.broken, replay.lost_bytes, replay.is_complete) == ("", "", 0, True)
    stats = replay.story.stats
    assert stats.steps == replay.plan_count == metrics["branchline_steps_total"]
    assert stats.retractions == metrics["branchline_retractions_total"]
    assert stats.late_results == metrics["branchline_late_results_total"]
    assert stats.cached_tokens == metrics["branchline_cached_prompt_tokens_total"] > 0
    assert stats.finished["length"] == metrics['branchline_finished_requests_total{reason="length"}']
    assert stats.finished["cancelled"] == metrics['branchline_finished_requests_total{reason="cancelled"}'] > 5
    assert metrics["branchline_journal_lost_records_total"] == 0 < metrics["branchline_journal_bytes_total"]
    assert stats.running == stats.waiting == stats.pages_private == stats.locked_nodes == 0
    assert b"xylophone" not in b"".join(path.read_bytes() for path in directory.iterdir())
    return stats


def test_a_live_run_of_the_default_model_gives_the_same_plans_again(default_checkpoint, tmp_path):
    options = ("--page-size", "4", "--max-running", "32")
    outcomes, metrics = serve(tmp_path / "j", *options, tokens=(24, 32), patience=[0.02, 0.3])
    assert outcomes.count("done") > 10
    assert outcomes.count("given up") > 10
    assert_identical(tmp_path / "j", metrics)


def test_a_live_run_that_is_short_of_memory_does_too(tmp_path):
    """A tiny model, so that much can happen in little time: hundreds of steps, retractions, evictions."""
    model = write_folder(tmp_path / "tiny", RandomCheckpoint(tiny_config()))
    outcomes, metrics = serve(
        tmp_path / "j", str(model), "--page-size", "2", "--pages", "120", "--max-running", "16", "--policy", "hrrn",
        tokens=(60, 90), patience=[0.05, 0.5],
    )  # fmt: skip
    assert outcomes.count("done") > 10
    stats = assert_identical(tmp_path / "j", metrics)
    assert stats.steps > 100
    assert stats.retractions > 0
    assert stats.evicted_pages > 0


def test_the_offline_engine_keeps_a_journal_too(tmp_path):
    model = write_folder(tmp_path / "tiny", RandomCheckpoint(tiny_config()))
    with LLM(str(model), journal=str(tmp_path / "j"), pages=64, threads=1) as llm:
        llm.generate(["One two", "One two three"], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
        assert llm.stats().journal_lost == 0
    replay = Replay.of(tmp_path / "j")
    assert (replay.difference, replay.is_complete) == ("", True)
    assert replay.summary is not None
    assert replay.summary.finished == {"length": 2}
