"""Replay: random lives of an engine give the same plans once more, and whatever was tampered with is noticed."""

import argparse
import json
import logging
import random
import struct
import typing

import msgspec
import pytest

from branchline.base.config import POLICY_NAMES, EngineConfig
from branchline.base.errors import ConfigError, InvariantBroken
from branchline.cli.main import main
from branchline.cli.options import add_engine_options, engine_settings
from branchline.core.request import Namespace, RequestSpec, SamplingParams
from branchline.observe.journal import Journal, JournalReader, list_runs
from branchline.sched.scheduler import Scheduler
from branchline.sim.record import Arrived, Batch, Closed, Collected, Drained, Launched, Recorder
from branchline.sim.replay import Replay
from branchline.sim.veil import BEGINNING, HashedNames, OwnNames, PieceReader, PieceWriter, pack, unpack
from branchline.wire.messages import Ask, Cancel, Control, PinTokens, Submit, ToEngine
from tests.sim.test_journal import HEADER, FullDisk
from tests.support.recorded import ScriptInbox, record_schedule, recorded_engine, submit

SCHEDULES = 96


def finish(engine):
    engine.run()
    engine.close()


def assert_identical(replay, engine, worker):
    assert (replay.difference, replay.broken, replay.lost_bytes, replay.is_complete) == ("", "", 0, True)
    assert replay.plan_count == len(worker.plans)
    live, again = engine.parts.scheduler.stats(), replay.story.stats
    for name in (
        "steps",
        "submitted",
        "finished",
        "prompt_tokens",
        "cached_tokens",
        "retractions",
        "evicted_pages",
        "late_results",
    ):
        assert getattr(live, name) == getattr(again, name), name


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="branchline.engine.loop")  # failed steps are injected by the hundred


# ---------------------------------------------------------------- the same again


@pytest.mark.parametrize("start", range(0, SCHEDULES, 8))
def test_every_life_of_an_engine_can_be_lived_again(tmp_path, start):
    for seed in range(start, start + 8):
        engine, worker, _, _ = record_schedule(seed, tmp_path / str(seed), POLICY_NAMES)
        assert_identical(Replay.of(tmp_path / str(seed)), engine, worker)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_under_every_policy(tmp_path, policy):
    totals = dict.fromkeys(("retractions", "late_results", "cached_tokens", "evicted_pages", "failed_steps"), 0)
    ends = set()
    for seed in range(100, 104):
        engine, worker, _, _ = record_schedule(seed, tmp_path / str(seed), [policy])
        assert_identical(Replay.of(tmp_path / str(seed)), engine, worker)
        for name in totals:
            totals[name] += getattr(engine.stats(), name)
        ends |= set(engine.stats().finished)
    assert totals["cached_tokens"]
    assert totals["late_results"]
    assert ends >= {"stop", "length", "cancelled"}


def test_the_lives_reach_the_interesting_places(tmp_path):
    """Otherwise the tests above prove little."""
    totals = dict.fromkeys(("retractions", "late_results", "cached_tokens", "evicted_pages", "failed_steps"), 0)
    ends = set()
    for seed in range(40):
        engine, _, _, _ = record_schedule(seed, tmp_path / str(seed), POLICY_NAMES)
        for name in totals:
            totals[name] += getattr(engine.stats(), name)
        ends |= set(engine.stats().finished)
    assert all(totals.values()), totals
    assert ends >= {"stop", "length", "cancelled", "waiting_timeout", "running_timeout", "error", "rejected"}


def test_text_can_be_kept_on_request(tmp_path):
    for seed in range(8):
        engine, worker, outbox, _ = record_schedule(seed, tmp_path / str(seed), ["hrrn"], text=True)
        replay = Replay.of(tmp_path / str(seed))
        assert_identical(replay, engine, worker)
        spoken = {}
        for output in outbox.outputs:
            spoken.setdefault(output.request_id, []).extend(output.tokens)
        assert replay.story.outputs == spoken


def test_parts_are_replayed_as_one(tmp_path):
    engine, worker, _, _ = record_schedule(
        3, tmp_path / "j", ["fcfs"], journal_options={"part_bytes": 700}, overlap=True
    )  # fmt: skip
    assert len(list_runs(tmp_path / "j")[1]) > 4
    assert_identical(Replay.of(tmp_path / "j"), engine, worker)


def test_prompts_longer_than_the_memory_for_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("branchline.sim.veil.PIECES_KNOWN", 3)
    shared = list(range(64))
    script = [[submit(f"r{i}", shared + [i] * 40, max_new=6)] for i in range(8)] * 2
    engine, worker, _, _ = recorded_engine(tmp_path / "j", script, vocabulary=97, pages=400)
    finish(engine)
    assert engine.stats().cached_tokens > 500
    assert_identical(Replay.of(tmp_path / "j"), engine, worker)


# ---------------------------------------------------------------- cut off, full, broken


def test_a_journal_that_was_cut_off_proves_what_is_there(tmp_path):
    record_schedule(1, tmp_path / "j", ["fcfs"])
    (part,) = list_runs(tmp_path / "j")[1]
    data = part.path.read_bytes()
    counts = []
    for length in range(len(data) - 1, 1000, -97):
        part.path.write_bytes(data[:length])
        replay = Replay.of(tmp_path / "j")
        assert (replay.difference, replay.broken, replay.is_complete) == ("", "", False)
        counts.append(replay.plan_count)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_a_full_disk_does_not_disturb_serving(tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    script = [[submit(f"r{i}", range(i, i + 20), max_new=20)] for i in range(8)]
    engine, worker, _, journal = recorded_engine(
        tmp_path / "j", script, journal_options={"open_sink": lambda path: FullDisk(path, 2500, partly=True)}
    )  # fmt: skip
    finish(engine)
    assert engine.stats().finished == {"length": 8}
    assert sum("serving goes on" in record.message for record in caplog.records) == 1
    assert engine.stats().journal_lost == journal.lost_records > 0
    replay = Replay.of(tmp_path / "j")
    assert (replay.difference, replay.is_complete) == ("", False)
    assert 0 < replay.plan_count < len(worker.plans)


def test_broken_books_break_again(tmp_path, monkeypatch):
    """The plan of the incident: the same mistake at the same step; once it is mended, the replay shows where."""

    def broken(self):
        raise InvariantBroken("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "rest", broken)
        engine, worker, _, _ = recorded_engine(tmp_path / "j", [[submit("a", range(9))]])
        with pytest.raises(InvariantBroken):
            engine.run()
        engine.close()
        replay = Replay.of(tmp_path / "j")
        assert (replay.broken, replay.difference, replay.plan_count) == ("planted", "", len(worker.plans))
    mended = Replay.of(tmp_path / "j")
    assert mended.broken == ""
    assert mended.difference == "", "it was the last thing that happened"


def test_what_cannot_be_recorded_ends_the_journal_and_nothing_else(tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    script = [[submit("a", [1, 2, 3])], [submit("b", [1 << 70, 1])], [submit("c", [1, 2, 3])]]
    engine, _, _, journal = recorded_engine(tmp_path / "j", script)
    finish(engine)
    assert engine.stats().finished == {"length": 3}
    assert not journal.is_open
    assert journal.lost_records > 0
    assert Replay.of(tmp_path / "j").difference == ""


def test_without_its_beginning_a_run_proves_nothing(tmp_path):
    record_schedule(3, tmp_path / "j", ["fcfs"], journal_options={"part_bytes": 700})
    list_runs(tmp_path / "j")[1][0].path.unlink()
    with pytest.raises(ConfigError, match="beginning of run 1 was deleted"):
        Replay.of(tmp_path / "j")


# ---------------------------------------------------------------- tampering


def batches(directory):
    return [msgspec.msgpack.decode(frame, type=Batch) for frame in JournalReader(directory).frames()]


def rewrite(source, target, change):
    """``change`` gets each entry and returns those that shall stand in its place."""
    journal = Journal(target, JournalReader(source).header)
    for batch in batches(source):
        entries = [new for entry in batch.entries for new in change(entry)]
        journal.append(msgspec.msgpack.encode(Batch(batch.clock_ns, batch.starts_part, entries)), 1)
    journal.close()


def once(kind, mend, skip=0):
    """Change the first entry of ``kind`` that ``mend`` does not refuse (by returning None), after ``skip`` of them."""
    state = {"left": skip}

    def change(entry):
        if state["left"] < 0 or not isinstance(entry, kind) or (new := mend(entry)) is None:
            return [entry]
        state["left"] -= 1
        return new if state["left"] < 0 else [entry]

    return change


def other_output_limit(entry):
    for place, message in enumerate(entry.messages):
        if isinstance(message, Arrived) and message.spec.max_new_tokens > 1:
            messages = list(entry.messages)
            messages[place] = Arrived(msgspec.structs.replace(message.spec, max_new_tokens=1), message.prompt)
            return [Drained(messages)]
    return None


def shorter_prompt(entry):
    for place, message in enumerate(entry.messages):
        if isinstance(message, Arrived) and isinstance(message.prompt[-1], bytes) and len(message.prompt[-1]) > 8:
            messages = list(entry.messages)
            messages[place] = Arrived(message.spec, [*message.prompt[:-1], message.prompt[-1][:-8]])
            return [Drained(messages)]
    return None


TAMPERINGS = {
    "a digest": once(Launched, lambda e: [Launched(bytes(8), e.rows)], skip=5),
    "a plan is missing": once(Launched, lambda e: [], skip=5),
    "a result is missing": once(Collected, lambda e: [], skip=5),
    "a token more": once(Collected, lambda e: [Collected(e.duration_ns, e.tokens + b"12345678", e.oddities)], skip=5),
    "a row failed": once(Collected, lambda e: [Collected(e.duration_ns, e.tokens[8:], {0: ("x", 0)})] if e.tokens else None),
    "a reading of the clock is missing": once(int, lambda e: [], skip=20),
    "a reading of the clock more": once(int, lambda e: [e, 0], skip=20),
    "a request is missing": once(Drained, lambda e: [None] if any(isinstance(m, Arrived) for m in e.messages) else None),
    "another limit": once(Drained, other_output_limit),
    "a shorter prompt": once(Drained, shorter_prompt),
    "a turn more": once(type(None), lambda e: [e, e], skip=3),
}


@pytest.fixture(scope="module")
def tape(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tape") / "j"
    shared = list(range(40))
    script = [[submit(f"r{i}", shared[: i * 3] + [50 + i] * 7, max_new=9)] for i in range(12)]
    engine, worker, _, _ = recorded_engine(directory, script, vocabulary=97)
    finish(engine)
    assert_identical(Replay.of(directory), engine, worker)
    return directory


def test_rewriting_without_a_change_changes_nothing(tape, tmp_path):
    rewrite(tape, tmp_path / "j", lambda entry: [entry])
    assert Replay.of(tmp_path / "j").difference == ""


@pytest.mark.parametrize("change", TAMPERINGS.values(), ids=TAMPERINGS.keys())
def test_tampering_is_noticed(tape, tmp_path, change):
    rewrite(tape, tmp_path / "j", change)
    assert batches(tmp_path / "j") != batches(tape)
    assert Replay.of(tmp_path / "j").difference


def test_records_of_another_version_are_refused_in_words(tape, tmp_path):
    journal = Journal(tmp_path / "j", JournalReader(tape).header)
    journal.append(msgspec.msgpack.encode([0, True, [["what", "is", "this"]]]), 1)
    journal.close()
    with pytest.raises(ConfigError, match="knows other records"):
        Replay.of(tmp_path / "j")
    rewrite(tape, tmp_path / "k", once(type(None), lambda e: [Drained([b"\x81\xa4type\xa3new"])]))
    with pytest.raises(ConfigError, match="knows other records"):
        Replay.of(tmp_path / "k")


def test_a_difference_can_be_read(tape, tmp_path):
    rewrite(tape, tmp_path / "j", once(Drained, other_output_limit, skip=3))
    difference = Replay.of(tmp_path / "j").difference
    assert "differs (- then, + now)" in difference
    assert "    - sequence 4, position " in difference
    assert "    = sequence " in difference
    rewrite(tape, tmp_path / "i", once(Drained, other_output_limit))
    assert "the loop collects step 1; then it launched sequence 1, position 7" in Replay.of(tmp_path / "i").difference
    rewrite(tape, tmp_path / "k", once(Launched, lambda e: [Launched(bytes(8), e.rows)], skip=5))
    difference = Replay.of(tmp_path / "k").difference
    assert "not in the same pages or slots" in difference
    assert "slot 0, pages " in difference


def test_a_scheduler_that_has_changed_since_is_noticed(tape, monkeypatch):
    monkeypatch.setattr("branchline.sched.admission.FOLLOW_PAGES", 0)
    monkeypatch.setattr("branchline.sched.budget.INITIAL_RATIO", 0.7)
    monkeypatch.setattr("branchline.cache.fan.Fan.nearest", lambda self, rest: None)
    replay = Replay.of(tape)
    assert "step" in replay.difference
    assert replay.plan_count < len([e for batch in batches(tape) for e in batch.entries if isinstance(e, Launched)])


# ---------------------------------------------------------------- privacy

MARKED = [0x5EC2E7, 0xC0FFEE, 0xFACADE, 0xBADCAB, 0xDEFACE]


def traces_of(token):
    """A token as it may stand in a file: msgpack, 4 and 8 bytes either way, decimal."""
    return {
        msgspec.msgpack.encode(token), struct.pack("<I", token), struct.pack(">I", token), struct.pack("<q", token),
        str(token).encode(),
    }  # fmt: skip


def everything_in(directory):
    """All bytes of all files, packed and unpacked."""
    files = b"".join(path.read_bytes() for path in directory.iterdir())
    return files + b"".join(JournalReader(directory).frames())


def record_secrets(directory, **options):
    script = [
        [submit(f"r{i}", MARKED * 9 + [i], max_new=12, stop_ids=(MARKED[0], 5), salt="salt-of-mine", tenant="tenant-of-mine",
                user="user-of-mine", stop=("stop-of-mine",), stop_token_ids=(MARKED[1],), logit_bias=((MARKED[2], 1.0),),
                logprobs=2, prompt_logprobs=1),
         Ask(call_id="q", what="request", request_id=f"r{i}", tenant="tenant-of-mine"),
         PinTokens(call_id="p", namespace=Namespace(tenant="tenant-of-mine"), tokens=tuple(MARKED), seconds=1.0)]
        for i in range(6)
    ]  # fmt: skip
    engine, worker, outbox, _ = recorded_engine(directory, script, vocabulary=1 << 23, **options)
    finish(engine)
    generated = {token for output in outbox.outputs for token in output.tokens}
    assert len(generated) > 20
    return engine, worker, generated


def test_no_token_and_no_word_of_a_request_is_in_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr("branchline.sim.veil.secrets.token_bytes", lambda count: bytes(range(count)))  # no bad luck
    engine, worker, generated = record_secrets(tmp_path / "j")
    assert_identical(Replay.of(tmp_path / "j"), engine, worker)
    assert engine.stats().cached_tokens == 0 < engine.stats().prompt_tokens
    data = everything_in(tmp_path / "j")
    for token in [*MARKED, *(token for token in generated if token > 1 << 16)]:
        assert not [trace for trace in traces_of(token) if trace in data], token
    assert b"of-mine" not in data
    assert b"r0" in data


def test_the_test_above_would_find_them(tmp_path):
    record_secrets(tmp_path / "j", text=True)
    data = everything_in(tmp_path / "j")
    assert all(any(trace in data for trace in traces_of(token)) for token in MARKED)
    assert b"of-mine" in data


def test_names_tell_which_beginnings_are_equal_and_nothing_else():
    rng = random.Random(2)
    names = HashedNames()
    sequences = [[rng.randrange(2) for _ in range(rng.randint(1, 12))] for _ in range(60)]
    named = [unpack(names.after(BEGINNING, pack(tokens))) for tokens in sequences]
    for a, x in zip(sequences, named, strict=True):
        for b, y in zip(sequences, named, strict=True):
            for i in range(min(len(a), len(b))):
                assert (x[i] == y[i]) == (a[: i + 1] == b[: i + 1])
    bits = [name >> 40 & 1 for x in named for name in x]
    assert 0.35 < sum(bits) / len(bits) < 0.65
    other = HashedNames()
    assert unpack(other.after(BEGINNING, pack(sequences[0]))) != named[0], "every journal has a key of its own"


def test_every_field_of_a_request_is_kept_or_withheld_on_purpose():
    """A new field: decide whether the scheduler needs it and whether it may be known, then change `sim.veil` and this."""
    sampling = SamplingParams(
        max_tokens=3, min_tokens=1, temperature=0.5, top_k=4, top_p=0.5, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.1, frequency_penalty=0.2, logit_bias=((1, 2.0),), seed=4, stop=("x",), stop_token_ids=(7,),
        ignore_eos=True, logprobs=1, prompt_logprobs=1,
    )  # fmt: skip
    spec = RequestSpec(
        request_id="r", prompt=(1, 2), sampling=sampling, max_new_tokens=3, seed=8, eos_token_ids=(9,), priority=2,
        group="g", namespace=Namespace(model="m", adapter="a", tenant="t", salt="s"), user="u", timeout_s=1.5,
    )  # fmt: skip
    for struct_type, value in ((RequestSpec, spec), (SamplingParams, sampling)):
        fields = msgspec.structs.fields(struct_type)
        left_out = [f.name for f in fields if not f.required and getattr(value, f.name) == f.default]
        assert not left_out, "this test must give every field a value"
    kept = HashedNames(["t"]).spec(spec)
    changed = {f for f in RequestSpec.__struct_fields__ if getattr(kept, f) != getattr(spec, f)}
    assert changed == {"prompt", "seed", "eos_token_ids", "sampling", "namespace", "user"}
    changed = {f for f in SamplingParams.__struct_fields__ if getattr(kept.sampling, f) != getattr(sampling, f)}
    assert changed == {"logit_bias", "seed", "stop", "stop_token_ids"}
    assert (kept.namespace.tenant, kept.namespace.model) == ("t", "m"), "a tenant of the configuration keeps its name"
    assert HashedNames().spec(spec).namespace.tenant not in ("t", "")


def test_every_kind_of_message_is_recorded_on_purpose(tmp_path):
    """A new kind: see whether it holds anything that may not be known, then change `sim.record` and this."""
    spec = RequestSpec(request_id="r", prompt=(1,), sampling=SamplingParams(), max_new_tokens=1, seed=0)
    pin = PinTokens(call_id="p", namespace=Namespace(), tokens=(1, 2), seconds=5)
    known = [Submit(spec), Cancel("r"), Control(call_id="c", verb="pause"), Ask(call_id="c", what="tree"), pin]
    assert {type(message) for message in known} == set(typing.get_args(ToEngine))
    journal = Journal(tmp_path / "j", HEADER)
    recorder = Recorder(journal, HashedNames())
    recorder.note_messages(known)
    recorder.write()
    assert journal.is_open
    recorder.note_messages([object()])
    recorder.write()
    assert not journal.is_open


# ---------------------------------------------------------------- pieces, time


@pytest.mark.parametrize("names", [HashedNames(), OwnNames()])
def test_what_prompts_share_is_written_once(names):
    writer, reader = PieceWriter(names), PieceReader()
    prompt = list(range(100))
    first = writer.write(prompt)
    assert [type(piece) for piece in first] == [bytes] * 7
    again = writer.write([*prompt, 7])
    assert again[:6] == [0, 1, 2, 3, 4, 5]
    other = writer.write([*prompt[:40], 3, *prompt[41:]])
    assert other[:2] == [0, 1]
    assert reader.read(first) == unpack(names.after(BEGINNING, pack(prompt)))
    assert reader.read(again)[:100] == reader.read(first)
    writer.start_part()
    reader.start_part()
    assert writer.write(prompt) == first
    with pytest.raises(InvariantBroken):
        reader.read([99])


def test_an_idle_engine_writes_little_but_a_busy_one_at_once(tmp_path):
    engine, _, _, journal = recorded_engine(tmp_path / "j", [])
    inbox = engine._loop._inbox
    sizes = [journal.bytes_written]
    for _ in range(100):  # five seconds of naps
        engine._loop.turn()
        engine._loop.idle(10**9)
        sizes.append(journal.bytes_written)
    assert 4 <= len(set(sizes)) <= 8
    assert sizes[-1] - sizes[0] < 500
    inbox._inner.script = [[submit("a", range(9))]]
    engine._loop.turn()
    while engine._loop.turn():
        pass
    before = journal.bytes_written
    engine._loop.idle(10**9)
    assert journal.bytes_written > before
    engine.close()
    assert any(isinstance(entry, Closed) for batch in batches(tmp_path / "j") for entry in batch.entries)
    assert isinstance(inbox._inner, ScriptInbox)


# ---------------------------------------------------------------- the command


def test_the_command_proves_and_says_so(tape, tmp_path, capsys):
    assert main(["replay", str(tape), "--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    assert "plans byte-identical" in out
    assert "from the cache" in out
    record = json.loads((tmp_path / "out.json").read_bytes())
    assert (record["identical"], record["summary"]["requests"], len(record["requests"])) == (True, 12, 12)


def test_the_command_shows_a_difference_and_fails(tape, tmp_path, capsys):
    rewrite(tape, tmp_path / "j", once(Drained, other_output_limit, skip=3))
    assert main(["replay", str(tmp_path / "j")]) == 1
    out = capsys.readouterr().out
    assert "identical plans there is a difference" in out
    assert "- sequence 4, position" in out


def test_the_options_of_serve_become_settings(tmp_path):
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    options = parser.parse_args(["--journal", "d", "--journal-text", "--journal-max-bytes", "1000"])
    config = EngineConfig(**engine_settings(options))
    assert (config.journal, config.journal_text, config.journal_max_bytes) == ("d", True, 1000)
    config = EngineConfig(**engine_settings(parser.parse_args([])))
    assert (config.journal, config.journal_text, config.journal_max_bytes) == (None, False, None)


def test_the_command_without_a_journal(tmp_path, capsys):
    assert main(["replay", str(tmp_path)]) == 78
    assert "there is no journal in" in capsys.readouterr().err
