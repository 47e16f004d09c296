"""Shapes as bytes: templates give the same JSON that encoding the whole would give."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.api.dialect import ChatDialect, CompletionDialect, Envelope, Frames, Offsets, usage_json
from branchline.core.result import Usage
from branchline.wire.messages import TextLogprob

ENVELOPE = Envelope(id='cmpl-"\\', created=7, model="näme\n")


def parse(frame):
    assert frame.startswith(b"data: ")
    assert frame.endswith(b"\n\n")
    assert frame.count(b"\n") == 2
    return json.loads(frame[6:])


@given(st.text(), st.integers(0, 300), st.booleans(), st.booleans())
def test_frames_are_the_json_they_stand_for(text, index, is_first, include_usage):
    frames = Frames(CompletionDialect(False), ENVELOPE, include_usage=include_usage)
    expected = {"id": 'cmpl-"\\', "object": "text_completion", "created": 7, "model": "näme\n"}
    expected["choices"] = [{"index": index, "text": text, "logprobs": None, "finish_reason": None}]
    assert parse(frames.text(index, text, None, is_first=is_first)) == expected | ({"usage": None} if include_usage else {})


@given(st.text(), st.booleans())
def test_chat_frames(text, is_first):
    chunk = parse(
        Frames(ChatDialect(False), ENVELOPE, include_usage=False).text(3, text, {"content": []}, is_first=is_first)
    )
    delta = {"role": "assistant", "content": text} if is_first else {"content": text}
    assert chunk["choices"] == [{"index": 3, "delta": delta, "logprobs": {"content": []}, "finish_reason": None}]


@pytest.mark.parametrize("dialect", [CompletionDialect(False), ChatDialect(False)])
def test_last_frames(dialect):
    frames = Frames(dialect, ENVELOPE, include_usage=True)
    (choice,) = parse(frames.finish(1, "length", "st\nop"))["choices"]
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (1, "length", "st\nop")
    usage = parse(frames.usage(usage_json(Usage(5, 3, 2))))
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 8


@given(st.text(max_size=30), st.data())
def test_offsets_are_those_of_the_characters(text, data):
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=10)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    offsets = Offsets()
    position = 0
    for piece in pieces:
        whole = len(raw[:position].decode("utf-8", "ignore"))
        assert offsets.next(piece) == whole
        position += len(piece)


def test_tokens_inside_a_character_have_names_that_differ():
    halves = [TextLogprob(1, "", b"\xf0\x9f", -1.0, ()), TextLogprob(2, "\ufffd", b"\x98\x80", -2.0, ())]
    rows = CompletionDialect(True).logprobs(halves, Offsets())
    assert rows["tokens"] == ["bytes:\\xf0\\x9f", "bytes:\\x98\\x80"]
    assert rows["text_offset"] == [0, 0]
    content = ChatDialect(True).logprobs(halves, Offsets())["content"]
    assert bytes(content[0]["bytes"] + content[1]["bytes"]).decode() == "😀"
