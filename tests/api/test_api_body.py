"""Strict JSON: what two parsers could read differently is refused."""

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.api.body import MAX_DEPTH, decode
from branchline.base.errors import InvalidRequest

Anything = dict[str, Any]


class Shape(msgspec.Struct):
    count: int | None = None
    share: float | None = None
    words: list[str] | None = None


def nested(depth):
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b'"x"', b"{", b'{"a":1}x', b'{"a":1}{}', b"\xef\xbb\xbf{}", b"{'a':1}", b'{"a":01}',
        b'{"a":+1}',
        b'{"a":NaN}', b'{"a":Infinity}', b'{"a":-Infinity}', b'{"a":1e400}', b'{"a":-1e400}', b'{"a":"\\ud800"}',
        b'{"a":"\\udc00\\ud800"}', b'{"a":"\xff"}', b'{"a":"\xed\xa0\x80"}', b'{"a":"\xc0\xaf"}', b'{"a":"\x00"}',
        b'{"a":1,"a":1}', b'{"a":[{"b":1,"\\u0062":2}]}', b'{"a":9223372036854775808}', b'{"a":-9223372036854775809}',
        b'{"a":' + b"1" * 5000 + b"}", nested(MAX_DEPTH + 1), nested(100_000), b'{"a":' * 100_000, b"{" * 100_000,
    ],
)  # fmt: skip
def test_refused(body):
    with pytest.raises(InvalidRequest) as caught:
        decode(body, Anything)
    assert len(caught.value.message) < 120


@pytest.mark.parametrize("kind", [Anything, Shape])
@pytest.mark.parametrize(
    "body", [b'{"z":NaN}', b'{"z":"\\ud800"}', b'{"z":"\xff"}', b'{"z":1,"z":2}', nested(MAX_DEPTH + 1)]
)
def test_unknown_fields_are_ignored_but_not_their_faults(body, kind):
    with pytest.raises(InvalidRequest):
        decode(body, kind)


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b'{"a":"\\ud83d\\ude00"}', "😀"),
        (b'{"a":"\\u0000"}', "\x00"),
        (b'{"a":9223372036854775807}', 2**63 - 1),
        (b'{"a":-9223372036854775808}', -(2**63)),
        (b'{"a":12345678901234567890.5}', 12345678901234567890.5),
        (b'{"a":"99999999999999999999"}', "99999999999999999999"),
        (b'{"a":"\\\\","b":1}', "\\"),
        (b'{"a":"\\\\\\"[[[[","b":1}', '\\"[[[['),
    ],
)
def test_accepted(body, value):
    assert decode(body, Anything)["a"] == value


def test_deepest():
    assert decode(nested(MAX_DEPTH), Anything)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"count":true}', "count"), (b'{"count":"5"}', "count"), (b'{"count":5.0}', "count"), (b'{"share":true}', "share"),
        (b'{"share":"0.5"}', "share"), (b'{"words":["a",1]}', "words[1]"), (b'{"words":"a"}', "words"),
    ],
)  # fmt: skip
def test_types_are_strict_and_the_place_is_named(body, param):
    with pytest.raises(InvalidRequest) as caught:
        decode(body, Shape)
    assert caught.value.param == param


def test_one_quadratic_body_would_stop_the_server():
    bodies = [b'{"a":"' + b'\\"' * 500_000 + b'"}', nested(500_000), b'{"a":[' + b"[]," * 300_000 + b"1]}"]
    start = time.perf_counter()
    for body in bodies:
        try:
            decode(body, Shape)
        except InvalidRequest:
            continue
    assert time.perf_counter() - start < 5


documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), documents, max_size=5), st.booleans())
def test_every_plain_document_survives(document, escape):
    body = json.dumps(document, ensure_ascii=escape).encode("utf-8", "surrogatepass")
    assert decode(body, Anything) == document


@given(st.binary(max_size=60))
def test_nothing_but_the_one_error(body):
    try:
        decode(body, Anything)
    except InvalidRequest:
        return
    assert json.loads(body) is not None
