"""Every message survives the journey; whatever is no message is a counted drop."""

import enum
import types
import typing
from collections import abc

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from branchline.base.errors import InvalidRequest
from branchline.core.request import SamplingParams
from branchline.wire import codec as codec_module
from branchline.wire.codec import Codec
from branchline.wire.messages import (
    Cancel,
    CancelText,
    ChatPrompt,
    FromEngine,
    Generate,
    TextPrompt,
    ToClient,
    ToEngine,
    ToText,
)

UNIONS = {"to_text": ToText, "to_client": ToClient, "to_engine": ToEngine, "from_engine": FromEngine}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
SCALARS = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
    type(None): st.none(),
    typing.Any: JSON_VALUES,
}


def strategy(kind):
    """Any value of an annotation that occurs in a message."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in SCALARS:
        return SCALARS[kind]
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(strategy, arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(strategy(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(strategy, arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (dict, abc.Mapping):
        return st.dictionaries(strategy(arguments[0]), strategy(arguments[1]), max_size=3)
    if issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    fields = {field.name: strategy(field.type) for field in msgspec.structs.fields(kind)}
    return st.fixed_dictionaries(fields).map(lambda values: kind(**values))


MESSAGE_TYPES = [(name, kind) for name, union in UNIONS.items() for kind in typing.get_args(union)]


@pytest.mark.parametrize(("union", "kind"), MESSAGE_TYPES, ids=lambda value: getattr(value, "__name__", value))
def test_every_message_comes_back_equal(union, kind):
    codec = Codec(UNIONS[union])

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(strategy(kind))
    def round_trip(message):
        back = codec.decode(codec.encode(message))
        assert type(back) is kind
        assert back == message

    round_trip()
    assert codec.dropped == 0


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(UNIONS)), st.binary(max_size=200))
def test_garbage_is_dropped_and_counted(union, data):
    codec = Codec(UNIONS[union])
    message = codec.decode(data)
    assert (message is None) == (codec.dropped == 1)


@settings(max_examples=100, deadline=None)
@given(strategy(ToClient), st.data())
def test_a_truncated_message_is_dropped_and_counted(message, data):
    codec = Codec(ToClient)
    encoded = codec.encode(message)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    assert codec.decode(encoded[:cut]) is None
    assert codec.dropped == 1


def test_a_message_of_another_union_is_dropped():
    codec = Codec(ToEngine)
    assert codec.decode(Codec(ToText).encode(CancelText("r"))) is None
    assert codec.dropped == 1


@pytest.mark.parametrize(
    "bomb",
    [b"\x91" * 200_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x81\xa4type"],
    ids=["deep", "long list", "long map", "long bytes", "cut"],
)
def test_lengths_and_depths_that_lie_cost_nothing(bomb):
    codec = Codec(ToText)
    chat = Generate(request_id="r", prompt=ChatPrompt(messages=({"role": "x"},)), sampling=SamplingParams())
    head, _, _ = codec.encode(chat).partition(b"\xa1x")
    assert codec.decode(bomb) is None
    assert codec.decode(head + bomb) is None
    assert codec.dropped == 2


def test_what_is_too_long_is_refused_on_both_sides(monkeypatch):
    codec = Codec(ToEngine)
    encoded = codec.encode(Cancel("r" * 100))
    monkeypatch.setattr(codec_module, "MAX_MESSAGE_BYTES", 64)
    with pytest.raises(InvalidRequest, match="at most 64"):
        codec.encode(Cancel("r" * 100))
    assert codec.decode(encoded) is None
    assert codec.dropped == 1


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, "\ud800"], ids=repr)
def test_a_value_without_a_form_is_the_clients_fault(value):
    prompt = ChatPrompt(messages=({"role": "user", "content": value},))
    with pytest.raises(InvalidRequest):
        Codec(ToText).encode(Generate(request_id="r", prompt=prompt, sampling=SamplingParams()))


def test_a_codec_goes_on_after_a_drop():
    codec = Codec(ToText)
    good = Generate(request_id="r", prompt=TextPrompt("hello"), sampling=SamplingParams(temperature=0.0))
    assert codec.decode(b"\xc1") is None
    assert codec.decode(codec.encode(good)) == good
