"""Safetensors files, whole and damaged."""

import json
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from branchline.base.errors import ModelError
from branchline.models.quants import dequantize
from branchline.models.safetensors import read_safetensors
from tests.support.checkpoints import assert_one_sentence, bf16, safetensors_bytes

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.linspace(-1, 1, 8).astype(np.float16),
}


def file_of(tmp_path, data):
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    return str(path)


def container(table, data=bytes(64)):
    header = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(header)) + header + data


def test_round_trip(tmp_path):
    halves = bf16(np.array([[1.5, -2.0], [0.0, 3.0]], np.float32))
    data = safetensors_bytes(ARRAYS | {"c": halves.view(np.float16)}, kinds={"c": "BF16"})
    tensors = read_safetensors(file_of(tmp_path, data)).tensors
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(dequantize(tensors[name]), array.astype(np.float32))
    np.testing.assert_array_equal(dequantize(tensors["c"]), [[1.5, -2.0], [0.0, 3.0]])


def test_metadata_and_padding_are_skipped(tmp_path):
    table = {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    path = file_of(tmp_path, container(json.dumps(table).encode() + b"    "))
    assert set(read_safetensors(path).tensors) == {"a"}


def entry(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "too short"),
        (b"\0" * 9, "too short"),
        (struct.pack("<Q", 1 << 60) + bytes(20), "header should be"),
        (struct.pack("<Q", 100_000_001) + bytes(20), "header should be"),
        (container(b"not json at all"), "not a table"),
        (container(b"[1, 2, 3]"), "not a table"),
        (container(b'{"a": ' + b"[" * 100_000), "not a table"),
        (container(b'{"\xff": 1}'), "not a table"),
        (container({"a": {"dtype": "F32"}}), "not a table"),
        (container({"a": entry() | {"shape": [True]}}), "not a table"),
        (container({"a": entry() | {"data_offsets": [0, 8, 16]}}), "not a table"),
        (container({"a": entry("I64", (1,))}), "of type 'I64', which is not supported"),
        (container({"a": entry("Q4_0", (32,), 0, 18)}), "of type 'Q4_0'"),
        (container({"a": entry(begin=0, end=80, shape=(20,))}), "ends at byte"),
        (container({"a": entry(begin=-8, end=0)}), "overlaps"),
        (container({"a": entry(begin=8, end=0)}), "overlaps"),
        (container({"a": entry(), "b": entry(begin=4, end=12)}), "overlaps"),
        (container({"a": entry(), "b": entry()}), "overlaps"),
        (container({"a": entry(end=9)}), "cannot have 9 bytes"),
        (container({"a": entry(shape=(3,))}), "cannot have 8 bytes"),
        (container({"a": entry(shape=())}), "impossible shape"),
        (container({"a": entry(shape=(0, 2))}), "impossible shape"),
        (container({"a": entry(shape=(-1, -2))}), "impossible shape"),
        (container({"a": entry(shape=(1 << 70,))}), "impossible shape|not a table"),
        (container({"a": entry(end=1 << 62, shape=(1 << 39, 1 << 39))}), "ends at byte"),
    ],
)
def test_one_sentence_says_what_is_wrong(data, complaint, tmp_path):
    with pytest.raises(ModelError, match=complaint) as caught:
        read_safetensors(file_of(tmp_path, data))
    assert_one_sentence(caught.value)


def read_or_complain(path):
    try:
        tensors = read_safetensors(path).tensors
    except ModelError as error:
        assert_one_sentence(error)
        return
    for tensor in tensors.values():
        assert dequantize(tensor).shape == tensor.shape


def test_truncation_anywhere(tmp_path):
    data = safetensors_bytes(ARRAYS)
    for size in range(len(data)):
        with pytest.raises(ModelError):
            read_safetensors(file_of(tmp_path, data[:size]))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, 160), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes(flips, tmp_path):
    data = bytearray(safetensors_bytes(ARRAYS))
    for at, value in flips:
        data[at % len(data)] = value
    read_or_complain(file_of(tmp_path, data))


NUMBERS = st.integers(-(1 << 65), 1 << 65) | st.integers(-4, 70)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I8", ""]),
        "shape": st.lists(NUMBERS, max_size=5),
        "data_offsets": st.lists(NUMBERS, min_size=1, max_size=3),
    }
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=st.dictionaries(st.text(max_size=5), ENTRIES | st.none() | st.text(max_size=3), max_size=4))
def test_arbitrary_tables(table, tmp_path):
    read_or_complain(file_of(tmp_path, container(table)))
