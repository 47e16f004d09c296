"""GGUF files written by the ``gguf`` package, whole and damaged."""

import dataclasses
import struct

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from branchline.base.errors import ModelError
from branchline.models import gguf_file
from branchline.models.gguf import GgufCheckpoint
from branchline.models.gguf_file import read_gguf
from branchline.models.quants import KINDS, dequantize
from branchline.models.random import RandomCheckpoint, tiny_config
from branchline.models.registry import BUILDERS, build_graph
from tests.support.checkpoints import assert_one_sentence, write_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", RandomCheckpoint(tiny_config()))


def open_or_complain(path):
    """A checkpoint, or the one error that is allowed."""
    try:
        checkpoint = GgufCheckpoint.open(str(path))
    except ModelError as error:
        assert_one_sentence(error, f"{path.name}: ")
        return None
    for name in checkpoint.names:
        checkpoint.tensor(name)
    assert len(checkpoint.digest) == 16
    return checkpoint


# ---------------------------------------------------------------- whole files


@pytest.mark.parametrize("architecture", BUILDERS)
def test_round_trip(architecture, tmp_path):
    source = RandomCheckpoint(tiny_config(architecture))
    checkpoint = GgufCheckpoint.open(str(write_gguf(tmp_path / "model.gguf", source)))
    assert checkpoint.names == source.names
    for name in source.names:
        np.testing.assert_array_equal(dequantize(checkpoint.tensor(name)), dequantize(source.tensor(name)))
    written = "llama" if architecture == "mistral" else architecture
    rope = dataclasses.replace(source.config.rope, original_context=512)
    expected = dataclasses.replace(source.config, architecture=written, name="model", rope=rope, sliding_window=None)
    assert checkpoint.config == dataclasses.replace(expected, norm_eps=checkpoint.config.norm_eps)
    assert checkpoint.config.norm_eps == pytest.approx(1e-5)
    assert build_graph(checkpoint.config, checkpoint.names).vocab_size == 264


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith("_K")])
def test_kinds(kind, tmp_path):
    source = RandomCheckpoint(tiny_config())
    tensor = GgufCheckpoint.open(str(write_gguf(tmp_path / "m.gguf", source, kind))).tensor("blk.0.ffn_down.weight")
    assert tensor.kind == kind
    error = np.abs(dequantize(tensor) - dequantize(source.tensor("blk.0.ffn_down.weight"))).max()
    assert error < 0.1


def test_tokenizer(tiny):
    source = GgufCheckpoint.open(str(tiny)).tokenizer
    expected = RandomCheckpoint(tiny_config()).tokenizer
    assert source.metadata["tokenizer.ggml.tokens"] == expected.metadata["tokenizer.ggml.tokens"]
    assert (source.bos_token_id, source.pad_token_id, source.add_bos, source.vocab_size) == (257, 256, False, 264)
    assert source.eos_token_ids == (258, 256)  # <|im_end|> by its id, <|endoftext|> by its name
    assert source.chat_template == expected.chat_template


@pytest.mark.parametrize(
    ("model", "pre", "said", "expected"),
    [
        ("llama", None, None, True),
        ("gpt2", "llama-bpe", None, True),
        ("gpt2", "qwen2", None, False),
        ("llama", None, False, False),
    ],
)
def test_start_token_as_llama_cpp_decides(model, pre, said, expected, tmp_path):
    metadata = {"tokenizer.ggml.model": model, "tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": said}
    path = write_gguf(tmp_path / "m.gguf", RandomCheckpoint(tiny_config()), metadata=metadata)
    assert GgufCheckpoint.open(str(path)).tokenizer.add_bos is expected


def test_token_ids_outside_the_vocabulary_mean_none(tmp_path):
    metadata = {"tokenizer.ggml.bos_token_id": 0xFFFFFFFF, "tokenizer.ggml.eot_token_id": 10}
    path = write_gguf(tmp_path / "m.gguf", RandomCheckpoint(tiny_config()), metadata=metadata)
    source = GgufCheckpoint.open(str(path)).tokenizer
    assert source.bos_token_id is None
    assert source.eos_token_ids == (258, 10, 256)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, {"scaling": "linear", "factor": 2.0}),
        ({"llama.rope.scaling.factor": 2.0}, {"scaling": "linear", "factor": 2.0}),
        ({"llama.rope.scale_linear": 2.0}, {"scaling": "linear", "factor": 2.0}),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0}, {"scaling": "none", "factor": 1.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 128,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            {"scaling": "yarn", "factor": 4.0, "original_context": 128, "beta_fast": 16.0, "beta_slow": 1.0},
        ),
    ],
)
def test_rope_scaling(metadata, expected, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", RandomCheckpoint(tiny_config()), metadata=metadata)
    rope = GgufCheckpoint.open(str(path)).config.rope
    assert {key: getattr(rope, key) for key in expected} == expected
    assert rope.magnitude == pytest.approx(1.13862943 if rope.scaling == "yarn" else 1.0)


def test_precomputed_rope_divisors(tmp_path):
    divisors = np.array([1, 1, 2, 8], np.float32)
    path = write_gguf(tmp_path / "m.gguf", RandomCheckpoint(tiny_config()), extra={"rope_freqs.weight": divisors})
    assert GgufCheckpoint.open(str(path)).config.rope.frequency_divisors == (1.0, 1.0, 2.0, 8.0)


def test_per_layer_lists_of_one_number(tmp_path):
    metadata = {"llama.attention.head_count_kv": [2, 2], "llama.attention.sliding_window": 100}
    path = write_gguf(tmp_path / "m.gguf", RandomCheckpoint(tiny_config()), metadata=metadata)
    config = GgufCheckpoint.open(str(path)).config
    assert (config.kv_heads, config.sliding_window) == (2, 100)


def test_defaults(tmp_path):
    """Old files say neither how long a key is nor how many key heads there are."""
    absent = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count")
    metadata = {f"llama.{key}": None for key in (*absent, "rope.freq_base")}
    path = write_gguf(tmp_path / "m.gguf", RandomCheckpoint(tiny_config(kv_heads=4)), metadata=metadata)
    config = GgufCheckpoint.open(str(path)).config
    assert (config.kv_heads, config.head_dim, config.rope.rotary_dim, config.rope.theta) == (4, 8, 8, 10_000.0)


def test_digest_tells_weights_and_metadata_apart(tiny, tmp_path):
    other_weights = write_gguf(tmp_path / "a.gguf", RandomCheckpoint(tiny_config(), seed=1))
    other_rope = write_gguf(tmp_path / "b.gguf", RandomCheckpoint(tiny_config()), metadata={"llama.rope.freq_base": 5e5})
    digests = {GgufCheckpoint.open(str(path)).digest for path in (tiny, other_weights, other_rope)}
    assert len(digests) == 3
    assert GgufCheckpoint.open(str(tiny)).digest in digests


def test_there_is_no_other_tensor(tiny):
    with pytest.raises(ModelError, match=r"tiny.gguf: there is no tensor 'nonsense'"):
        GgufCheckpoint.open(str(tiny)).tensor("nonsense")


def test_all_types_of_metadata(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "llama")
    kinds = gguf.GGUFValueType
    values = {
        "u8": (200, kinds.UINT8), "i8": (-100, kinds.INT8), "u16": (60_000, kinds.UINT16), "i16": (-30_000, kinds.INT16),
        "u32": (1 << 31, kinds.UINT32), "i32": (-(1 << 31), kinds.INT32), "u64": (1 << 63, kinds.UINT64),
        "i64": (-(1 << 63), kinds.INT64), "f32": (0.5, kinds.FLOAT32), "f64": (0.1, kinds.FLOAT64),
        "bool": (True, kinds.BOOL), "text": ("Ünïcode €", kinds.STRING),
    }  # fmt: skip
    for key, (value, kind) in values.items():
        writer.add_key_value(key, value, kind)
    lists = {"texts": ["a", "", "é"], "flags": [True, False], "floats": [0.5, -1.5], "nested": [[1, 2], [3]]}
    for key, value in lists.items():
        writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_gguf(str(tmp_path / "types.gguf")).metadata
    assert {key: metadata[key] for key in values} == {key: value for key, (value, _) in values.items()}
    assert {key: metadata[key] for key in lists} == lists
    assert type(metadata["bool"]) is bool


def test_version_2_reads_like_version_3(tiny, tmp_path):
    data = bytearray(tiny.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    (tmp_path / "tiny.gguf").write_bytes(data)
    assert GgufCheckpoint.open(str(tmp_path / "tiny.gguf")).config == GgufCheckpoint.open(str(tiny)).config


# ---------------------------------------------------------------- files that cannot be served


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"metadata": {"general.architecture": "mamba"}}, "architecture 'mamba' is not supported"),
        ({"metadata": {"general.architecture": "x" * 5000}}, "is not supported"),
        ({"without": ["blk.1.attn_k.weight"]}, "1 of 20 tensors are missing, the first is 'blk.1.attn_k.weight'"),
        ({"without": ["token_embd.weight"]}, "tensor 'token_embd.weight' is missing"),
        ({"extra": {"blk.0.attn_q.bias": np.zeros(32, np.float32)}}, "tensors are missing"),
        ({"extra": {"blk.0.attn_output.bias": np.zeros(32, np.float32)}}, "not part of a llama model"),
        ({"extra": {"rope_freqs.weight": np.ones(99, np.float32)}}, "99 numbers"),
        ({"metadata": {"llama.embedding_length": 64}}, "implies"),
        ({"metadata": {"llama.block_count": None}}, "llama.block_count is missing"),
        ({"metadata": {"llama.block_count": "two"}}, "should be a whole number"),
        ({"metadata": {"llama.block_count": True}}, "should be a whole number"),
        ({"metadata": {"llama.block_count": -1}}, "not between 1 and"),
        ({"metadata": {"llama.attention.head_count": 0}}, "not between 1 and"),
        ({"metadata": {"llama.attention.head_count_kv": [1, 2]}}, "should be a whole number"),
        ({"metadata": {"llama.attention.value_length": 16}}, "different length"),
        ({"metadata": {"llama.attention.layer_norm_rms_epsilon": float("nan")}}, "finite"),
        ({"metadata": {"llama.attention.layer_norm_rms_epsilon": 0.0}}, "epsilon"),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "rope scaling 'longrope' is not supported"),
        ({"metadata": {"llama.rope.scaling.yarn_ext_factor": 0.5}}, "yarn_ext_factor"),
        ({"metadata": {"llama.expert_count": 8}}, "mixture-of-experts"),
        ({"metadata": {"split.count": 2}}, "split"),
        ({"metadata": {"general.alignment": 48}}, "power of two"),
        ({"metadata": {"tokenizer.ggml.tokens": [[1], [2]]}}, "list of texts"),
        ({"metadata": {"tokenizer.ggml.tokens": ["a"] * 300}}, "knows 300 tokens"),
        ({"metadata": {"tokenizer.chat_template": 5}}, "should be a text"),
    ],
)
def test_one_sentence_says_what_is_wrong(arguments, complaint, tmp_path):
    path = write_gguf(tmp_path / "bad.gguf", RandomCheckpoint(tiny_config()), **arguments)
    with pytest.raises(ModelError, match=complaint) as caught:
        GgufCheckpoint.open(str(path))
    assert_one_sentence(caught.value, "bad.gguf: ")


@pytest.mark.parametrize(
    ("offset", "value", "complaint"),
    [
        (0, b"GGML", "does not begin with 'GGUF'"),
        (4, struct.pack("<I", 1), "version 1 of GGUF is not supported"),
        (4, struct.pack("<I", 4), "version 4 of GGUF is not supported"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 62), "announces 4611686018427387904 tensors"),
        (16, struct.pack("<Q", 1 << 40), "metadata entries"),
        (24, struct.pack("<Q", 1 << 63), "bytes of text"),
    ],
)
def test_damaged_beginnings(offset, value, complaint, tiny, tmp_path):
    data = bytearray(tiny.read_bytes())
    data[offset : offset + len(value)] = value
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=complaint) as caught:
        GgufCheckpoint.open(str(tmp_path / "bad.gguf"))
    assert_one_sentence(caught.value, "bad.gguf: ")


def table_entry(data, name):
    """Offsets of the fields rank, first extent, kind and offset of a tensor with two dimensions."""
    at = bytes(data).index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    return {"rank": at, "extent": at + 4, "kind": at + 20, "offset": at + 24}


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("rank", struct.pack("<I", 5), "has 5 dimensions"),
        ("rank", struct.pack("<I", 0), "has 0 dimensions"),
        ("extent", struct.pack("<Q", 0), "impossible shape"),
        ("extent", struct.pack("<Q", 1 << 63), "impossible shape"),
        ("extent", struct.pack("<Q", 1 << 20), "overlaps another|truncated"),
        ("kind", struct.pack("<I", 10), "encoded as Q2_K, which is not supported"),
        ("kind", struct.pack("<I", 999), "encoded as number 999"),
        ("kind", struct.pack("<I", 12), "whole number of blocks"),
        ("offset", struct.pack("<Q", 1 << 40), "truncated or damaged: tensor 'blk.0.attn_q.weight' ends at byte"),
        ("offset", struct.pack("<Q", 0), "overlaps"),
    ],
)
def test_damaged_tables(field, value, complaint, tiny, tmp_path):
    data = bytearray(tiny.read_bytes())
    at = table_entry(data, b"blk.0.attn_q.weight")[field]
    data[at : at + len(value)] = value
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=complaint) as caught:
        GgufCheckpoint.open(str(tmp_path / "bad.gguf"))
    assert_one_sentence(caught.value, "bad.gguf: ")


def test_same_names_twice(tiny, tmp_path):
    data = tiny.read_bytes()
    for old, new in ((b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"), (b"llama.rope.freq_base", b"general.architecture")):
        assert len(old) == len(new)
        (tmp_path / "bad.gguf").write_bytes(data.replace(old, new))
        with pytest.raises(ModelError, match=f"'{new.decode()}' appears twice"):
            GgufCheckpoint.open(str(tmp_path / "bad.gguf"))


def test_too_many_list_items(tiny, monkeypatch):
    monkeypatch.setattr(gguf_file, "MAX_LIST_ITEMS", 500)  # tokens and their types are 259 each
    with pytest.raises(ModelError, match="more than 500 items"):
        GgufCheckpoint.open(str(tiny))


def test_deep_nesting(tmp_path):
    entry = struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry + struct.pack("<IQ", 9, 1) * 5000
    (tmp_path / "deep.gguf").write_bytes(data + bytes(64))
    with pytest.raises(ModelError, match="nested too deeply"):
        GgufCheckpoint.open(str(tmp_path / "deep.gguf"))


def test_missing_and_unreadable_files(tmp_path):
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ModelError, match="cannot be read"):
            GgufCheckpoint.open(str(path))
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelError, match="too short"):
        GgufCheckpoint.open(str(tmp_path / "empty.gguf"))


# ---------------------------------------------------------------- random damage


def test_truncation_anywhere(tiny, tmp_path):
    data = tiny.read_bytes()
    header_size = len(read_gguf(str(tiny)).header)
    path = tmp_path / "cut.gguf"
    for size in (*range(0, header_size, 64), *np.random.default_rng(0).integers(header_size, len(data), 40)):
        path.write_bytes(data[:size])
        assert open_or_complain(path) is None


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes(data, tiny, tmp_path):
    content = bytearray(tiny.read_bytes())
    header_size = len(read_gguf(str(tiny)).header)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header_size - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "flipped.gguf"
    path.write_bytes(content)
    open_or_complain(path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=st.binary(max_size=300), counts=st.tuples(st.integers(0, 1 << 64), st.integers(0, 3)))
def test_arbitrary_headers(tail, counts, tmp_path):
    path = tmp_path / "noise.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, counts[0] % (1 << 64), counts[1]) + tail)
    assert open_or_complain(path) is None
