"""Workloads: readers of traces, made-up traffic, and the best hit rate there can be."""

import gzip
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from branchline.base.clock import NS_PER_S
from branchline.base.errors import ConfigError
from branchline.sim.synthetic import KINDS, make_workload, output_of
from branchline.sim.traces import read_trace
from branchline.sim.workload import Arrival, Workload, best_hit_rate

SAMPLE = Path(__file__).parent.parent / "data" / "mooncake_60.jsonl"


def mooncake(path, *lines):
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def line(at, length, output, *ids):
    return {"timestamp": at, "input_length": length, "output_length": output, "hash_ids": list(ids), "more": "ignored"}


# ---------------------------------------------------------------- mooncake


def test_equal_ids_become_equal_tokens_and_different_ids_share_nothing(tmp_path):
    trace = mooncake(tmp_path / "t.jsonl", line(1000, 1024, 64, 7, 8), line(1500, 1200, 1, 7, 8, 9), line(3000, 512, 3, 8))
    workload = read_trace(trace)
    one, two, three = (arrival.prompt for arrival in workload.arrivals)
    assert (len(one), len(two), len(three)) == (32, 38, 16)
    assert two[:32] == one
    assert three == one[16:]
    assert len({*one, *two}) == 38
    assert [arrival.at_ns for arrival in workload.arrivals] == [0, 500_000_000, 2_000_000_000]
    assert [arrival.output_tokens for arrival in workload.arrivals] == [2, 1, 1]
    assert "a block of 512 is 16 tokens" in workload.note


def test_a_scale_changes_the_lengths(tmp_path):
    workload = read_trace(mooncake(tmp_path / "t.jsonl", line(0, 1000, 64, 7, 8)), scale=1)
    assert len(workload.arrivals[0].prompt) == 1000
    assert workload.arrivals[0].output_tokens == 64
    assert workload.note == ""


def test_tokens_without_an_id_are_nobody_elses(tmp_path):
    trace = mooncake(tmp_path / "t.jsonl", line(0, 1024, 1, 7), line(0, 1024, 1, 7), line(0, 1024, 1))
    one, two, three = (set(arrival.prompt) for arrival in read_trace(trace).arrivals)
    assert len(one & two) == 16
    assert not one & three


def test_requests_out_of_order_are_sorted(tmp_path):
    trace = mooncake(tmp_path / "t.jsonl", line(9, 512, 1, 1), line(4, 512, 1, 2), line(4, 512, 1, 3))
    assert [arrival.request_id for arrival in read_trace(trace).arrivals] == ["line-2", "line-3", "line-1"]


@pytest.mark.parametrize(
    "bad", ['{"timestamp": 0}', "nonsense", '{"timestamp":0,"input_length":-1,"output_length":1}', "[]"]
)
def test_a_bad_line_is_named(tmp_path, bad):
    path = mooncake(tmp_path / "t.jsonl", line(0, 512, 1, 1))
    path.write_text(path.read_text() + "\n\n" + bad + "\n")
    with pytest.raises(ConfigError, match=r"t\.jsonl, line 3: "):
        read_trace(path)


def test_a_gzipped_trace_reads_the_same(tmp_path):
    packed = tmp_path / "mooncake_60.jsonl.gz"
    packed.write_bytes(gzip.compress(SAMPLE.read_bytes()))
    assert read_trace(packed).arrivals == read_trace(SAMPLE).arrivals


def test_a_torn_gzip_is_said_so(tmp_path):
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(SAMPLE.read_bytes())[:-20])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(packed)


# ---------------------------------------------------------------- azure

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:50.1000000,0,0
"""


def test_azure_lines_have_times_and_lengths_and_share_nothing(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    arrivals = read_trace(path).arrivals
    assert [(len(a.prompt), a.output_tokens) for a in arrivals] == [(374, 44), (1, 1), (396, 109)]
    assert [a.at_ns for a in arrivals] == [0, 3_419_410_000, 4_314_579_000]
    assert len({token for a in arrivals for token in a.prompt}) == 374 + 1 + 396


def test_azure_times_may_have_a_zone_and_a_byte_order_mark_does_no_harm(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "﻿TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,5,1\n2024-05-10 00:00:01+00:00,6,1\n"
    )
    assert [a.at_ns for a in read_trace(path).arrivals] == [0, 990_070_000]


@pytest.mark.parametrize("bad", ["2023-11-16 18:15:46.1,5", "yesterday,5,5", "2023-11-16 18:15:46.1,x,5", "2023-11-16,-1,5"])
def test_a_bad_azure_line_is_named(tmp_path, bad):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE + bad + "\n")
    with pytest.raises(ConfigError, match=r"azure\.csv, line 5: "):
        read_trace(path)


# ---------------------------------------------------------------- any trace


def test_an_empty_or_missing_trace_is_said_so(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty\.jsonl holds no requests"):
        read_trace(tmp_path / "empty.jsonl")
    (tmp_path / "empty.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    with pytest.raises(ConfigError, match=r"empty\.csv holds no requests"):
        read_trace(tmp_path / "empty.csv")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "nowhere.jsonl")


def test_a_format_that_cannot_be_told_is_asked_for(tmp_path):
    with pytest.raises(ConfigError, match="--format"):
        read_trace(tmp_path / "trace.dat")
    with pytest.raises(ConfigError, match="no trace format 'other'"):
        read_trace(SAMPLE, "other")


# ---------------------------------------------------------------- workloads


def arrivals(*prompts, tenants=()):
    names = tenants or [""] * len(prompts)
    return tuple(
        Arrival(at_ns=i * NS_PER_S, request_id=str(i), prompt=tuple(prompt), output_tokens=2, tenant=tenant)
        for i, (prompt, tenant) in enumerate(zip(prompts, names, strict=True))
    )


def brute_force_hit_rate(requests):
    """Every prompt against every earlier one, token by token."""
    hit = total = 0
    for number, request in enumerate(requests):
        shared = 0
        for other in requests[:number]:
            same = 0
            while same < min(len(request.prompt), len(other.prompt)) and request.prompt[same] == other.prompt[same]:
                same += 1
            shared = max(shared, same if other.tenant == request.tenant else 0)
        hit += min(shared, len(request.prompt) - 1)
        total += len(request.prompt)
    return hit / total


def test_the_best_hit_rate_by_hand():
    assert best_hit_rate(arrivals([1, 2, 3, 4], [1, 2, 9, 9], [1, 2, 3, 4])) == (2 + 3) / 12
    assert best_hit_rate(arrivals([1, 2, 3], [1, 2, 3], tenants=["a", "b"])) == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_best_hit_rate_is_that_of_brute_force(seed):
    rng = random.Random(seed)
    prompts = [[rng.randrange(2) for _ in range(rng.randint(1, 12))] for _ in range(40)]
    requests = arrivals(*prompts, tenants=[rng.choice("ab") for _ in prompts])
    assert best_hit_rate(requests) == brute_force_hit_rate(requests)


def test_a_workload_in_disorder_is_refused():
    with pytest.raises(ConfigError, match="not in the order"):
        Workload("w", arrivals([1], [2])[::-1])


def test_a_faster_rate_moves_arrivals_together():
    workload = Workload("w", arrivals([1], [2], [3])).at_rate(2)
    assert [a.at_ns for a in workload.arrivals] == [0, NS_PER_S // 2, NS_PER_S]
    assert "2 times as fast" in workload.note


def test_the_busiest_part_is_found():
    quiet, busy = [[1]] * 5, [[1] * 50] * 4
    workload = Workload("w", arrivals(*quiet, *busy, *quiet)).busiest(4)
    assert [len(a.prompt) for a in workload.arrivals] == [50] * 4
    assert Workload("w", arrivals(*quiet)).busiest(9).note == ""


def test_there_are_pages_for_everyone_at_once():
    assert Workload("w", arrivals([1] * 16, [1] * 3)).most_pages(16) == (2 + 1) + (1 + 1)


# ---------------------------------------------------------------- synthetic


@pytest.mark.parametrize("kind", KINDS)
def test_made_up_traffic_is_repeatable_and_as_long_as_asked_for(kind):
    words = f"{kind},requests=203,rate=4"
    workload = make_workload(words)
    assert len(workload) == 203
    assert workload.arrivals == make_workload(words).arrivals
    assert workload.arrivals != make_workload(words + ",seed=1").arrivals
    assert len({arrival.request_id for arrival in workload.arrivals}) == 203
    assert all(one.at_ns <= other.at_ns for one, other in pairwise(workload.arrivals))


def test_arrivals_come_at_the_rate_asked_for():
    span_s = make_workload("independent,requests=4000,rate=5").span_ns / NS_PER_S
    assert span_s == pytest.approx(800, rel=0.05)


def test_a_turn_of_a_chat_begins_with_all_that_was_said_before():
    workload = make_workload("chat,requests=20,turns=4,system=30")
    begun = 0
    for arrival in workload.arrivals:
        assert arrival.prompt[:30] == workload.arrivals[0].prompt[:30]
        said = [a for a in workload.arrivals if arrival.prompt[: len(a.prompt)] == a.prompt and a is not arrival]
        if not said:
            begun += 1
            continue
        before = max(said, key=lambda a: len(a.prompt))
        assert arrival.prompt[len(before.prompt) :][: before.output_tokens] == output_of(before)
    assert begun == 5


def test_hot_prompts_share_all_but_the_question_and_cold_ones_nothing():
    workload = make_workload("hot-cold,requests=400,cold=0.1,prompt=100,question=10")
    groups = {name: [a.prompt for a in workload.arrivals if a.group == name] for name in ("hot", "cold")}
    assert len({prompt[:90] for prompt in groups["hot"]}) == 1
    assert len({prompt[90] for prompt in groups["hot"]}) == len(groups["hot"])
    assert len({prompt[0] for prompt in groups["cold"]}) == len(groups["cold"])
    assert 20 <= len(groups["cold"]) <= 60


def test_the_heavy_tenant_asks_for_its_share():
    workload = make_workload("tenants,requests=2000,tenants=3,heavy=8")
    heavy = sum(arrival.tenant == "tenant 0" for arrival in workload.arrivals)
    assert heavy / 2000 == pytest.approx(0.8, abs=0.03)
    assert {arrival.tenant for arrival in workload.arrivals} == {"tenant 0", "tenant 1", "tenant 2"}


@pytest.mark.parametrize(
    "words", ["other", "chat,turns", "chat,turns=0", "chat,rate=fast", "chat,colour=1", "chat,rate=inf"]
)
def test_made_up_traffic_that_cannot_be_made_up_is_refused(words):
    with pytest.raises(ConfigError):
        make_workload(words)
