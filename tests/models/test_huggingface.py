"""Hugging Face folders: names, settings, tokenizers, shards, and folders that lie."""

import dataclasses
import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from branchline.base.errors import ModelError
from branchline.models.checkpoint import TURN_ENDS
from branchline.models.facts import Facts
from branchline.models.huggingface import HuggingFaceCheckpoint, canonical_name
from branchline.models.huggingface_config import model_config
from branchline.models.quants import dequantize
from branchline.models.random import RandomCheckpoint, tiny_config
from branchline.models.registry import BUILDERS, build_graph
from tests.support.checkpoints import assert_one_sentence, hf_config, hf_name, safetensors_bytes, write_folder


def open_tiny(path, **changes):
    return HuggingFaceCheckpoint.open(str(write_folder(path, RandomCheckpoint(tiny_config()), **changes)))


def config_of(architecture="llama", **changes):
    return model_config(Facts(hf_config(tiny_config(architecture), **changes)), "m")


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "tiny", RandomCheckpoint(tiny_config()))


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("architecture", BUILDERS)
@pytest.mark.parametrize("shards", [1, 3])
def test_round_trip(architecture, shards, tmp_path):
    source = RandomCheckpoint(tiny_config(architecture))
    checkpoint = HuggingFaceCheckpoint.open(str(write_folder(tmp_path / "m", source, shards)))
    assert checkpoint.names == source.names
    for name in source.names:
        np.testing.assert_array_equal(dequantize(checkpoint.tensor(name)), dequantize(source.tensor(name)))
    rope = dataclasses.replace(source.config.rope, layout="half")
    assert checkpoint.config == dataclasses.replace(source.config, name="m", rope=rope)
    build_graph(checkpoint.config, checkpoint.names)


def test_names():
    for name in RandomCheckpoint(tiny_config("qwen3", tied_embeddings=False)).names:
        assert canonical_name(hf_name(name)) == name
    for name in ("model.layers.01.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.scale", "blk.0.attn_q.weight"):
        assert canonical_name(name) == name


def test_a_single_weight_file_may_have_any_name(folder):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert HuggingFaceCheckpoint.open(str(folder)).names


def test_derived_tables_are_left_out(folder):
    source = RandomCheckpoint(tiny_config())
    arrays = {hf_name(name): dequantize(source.tensor(name)) for name in source.names}
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(arrays))
    assert HuggingFaceCheckpoint.open(str(folder)).names == source.names


def test_digest_sees_settings_and_weights(tmp_path):
    digests = {
        open_tiny(tmp_path / "a").digest,
        open_tiny(tmp_path / "b", rope_theta=5e5).digest,
        HuggingFaceCheckpoint.open(str(write_folder(tmp_path / "c", RandomCheckpoint(tiny_config(), seed=1)))).digest,
    }
    assert len(digests) == 3


# ---------------------------------------------------------------- settings


def test_rope_as_transformers_4_and_5_spell_it():
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    four = config_of(rope_theta=5e5, rope_scaling={"type": "llama3", **llama3})
    five = config_of(rope_theta=None, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3})
    assert four.rope == five.rope
    assert (four.rope.scaling, four.rope.theta, four.rope.original_context) == ("llama3", 5e5, 256)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, {"scaling": "none"}),
        ({"rope_type": "default"}, {"scaling": "none", "factor": 1.0}),
        ({"type": "linear", "factor": 4}, {"scaling": "linear", "factor": 4.0}),
        ({"type": "yarn", "factor": 4.0}, {"scaling": "yarn", "original_context": 512, "magnitude": 1.138629436}),
        ({"type": "yarn", "factor": 4.0, "attention_factor": 1.5}, {"magnitude": 1.5}),
        ({"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}, {"magnitude": 1.0}),
        ({"type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 1.0}, {"magnitude": 1.277258872 / 1.138629436}),
    ],
)
def test_rope_scaling(scaling, expected):
    rope = config_of(rope_scaling=scaling).rope
    assert {key: getattr(rope, key) for key in expected} == pytest.approx(expected)


def test_defaults_of_the_classes():
    absent = dict.fromkeys(("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings"))
    config = config_of(**absent)
    assert (config.kv_heads, config.head_dim, config.norm_eps, config.rope.theta) == (4, 8, 1e-6, 1e4)
    assert not config.tied_embeddings
    assert config_of("qwen3", head_dim=None).head_dim == 128


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("mistral", {"sliding_window": 128}, 128),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 512}, None),
        ("llama", {"sliding_window": 128}, None),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 0}, 128),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 28}, None),
        ("qwen3", {"sliding_window": 128, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 128),
    ],
)
def test_sliding_window(architecture, changes, expected):
    assert config_of(architecture, **changes).sliding_window == expected


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "gemma"}, "architecture 'gemma' is not supported"),
        ({"model_type": ["llama"]}, "model_type should be a text"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size should be a whole number"),
        ({"hidden_size": 32.0}, "hidden_size should be a whole number"),
        ({"num_hidden_layers": 1 << 80}, "num_hidden_layers should be a whole number"),
        ({"num_hidden_layers": 5000}, "layers = 5000, which is not between 1 and 1024"),
        ({"num_attention_heads": 0}, "heads = 0"),
        ({"rms_norm_eps": 2.0}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized safetensors are not supported"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "differ between layers"),
        ({"rope_scaling": "yarn"}, "rope_scaling should be a mapping"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "rope scaling 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_theta": -1.0}, "rope theta"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            "in some layers only",
        ),
        ({"attention_bias": "yes"}, "attention_bias should be true or false"),
    ],
)
def test_settings_that_cannot_be_served(changes, complaint):
    with pytest.raises(ModelError, match=complaint):
        config_of(**changes)


KEYS = st.sampled_from(["rope_type", "factor", "a"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None)
@given(
    architecture=st.sampled_from(sorted(BUILDERS)),
    changes=st.dictionaries(
        st.sampled_from([*hf_config(tiny_config()), "rope_parameters", "rope_scaling", "use_sliding_window", "layer_types"]),
        JSON,
        min_size=1,
        max_size=3,
    ),
)
def test_arbitrary_settings_give_a_configuration_or_one_sentence(architecture, changes):
    try:
        config = config_of(architecture, **changes)
    except ModelError as error:
        assert_one_sentence(error)
    else:
        assert config.architecture in BUILDERS


# ---------------------------------------------------------------- tokenizer


def test_tokenizer(folder):
    source = HuggingFaceCheckpoint.open(str(folder)).tokenizer
    assert json.loads(source.tokenizer_json)["model"]["type"] == "BPE"
    assert (source.bos_token_id, source.pad_token_id, source.add_bos, source.vocab_size) == (257, None, None, 264)
    assert set(source.eos_token_ids) == {258, 256}
    assert source.eos_token_ids[0] == 258
    assert {"<|im_end|>", "<|endoftext|>"} <= TURN_ENDS
    assert source.chat_template is None


def test_ids_come_from_all_files(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8, 999_999]}))
    names = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_start|>"}, "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    source = HuggingFaceCheckpoint.open(str(folder)).tokenizer
    assert source.eos_token_ids == (258, 7, 8, 257, 256)
    assert source.pad_token_id == 256


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ 1 }}", "{{ 1 }}"),
        ([{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}], "D"),
        ([{"name": "tool_use", "template": "T"}], None),
    ],
)
def test_chat_template_of_the_settings(template, expected, folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert HuggingFaceCheckpoint.open(str(folder)).tokenizer.chat_template == expected


def test_chat_template_file_comes_first(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "settings"}))
    (folder / "chat_template.jinja").write_text("file é")
    assert HuggingFaceCheckpoint.open(str(folder)).tokenizer.chat_template == "file é"


# ---------------------------------------------------------------- folders that cannot be served


def complaint_of(folder):
    with pytest.raises(ModelError) as caught:
        HuggingFaceCheckpoint.open(str(folder))
    message = str(caught.value)
    assert_one_sentence(message, "tiny: ")
    return message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_files_are_named(name, folder):
    (folder / name).unlink()
    assert f"{name} is missing" in complaint_of(folder)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe", b'{"a": ' + b"[" * 10_000, b" " * ((1 << 20) + 1)])
def test_configuration_that_is_no_json_object(content, folder):
    (folder / "config.json").write_bytes(content)
    assert "config.json: it is" in complaint_of(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"added_tokens": 5}', b'{"added_tokens": [{"id": "x"}]}'])
def test_tokenizer_that_is_none(content, folder):
    (folder / "tokenizer.json").write_bytes(content)
    assert "tokenizer.json: it is not the description of a tokenizer" in complaint_of(folder)


def test_damaged_weights_are_named(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-4])
    assert "model.safetensors: the file is truncated" in complaint_of(folder)


def test_missing_tensors_are_named(folder):
    (folder / "model.safetensors").write_bytes(safetensors_bytes({"lm_head.weight": np.ones((264, 32), np.float32)}))
    assert "tensors are missing, the first is 'token_embd.weight'" in complaint_of(folder)


def index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", ".hidden", "a\0b", "x" * 300]
)
def test_the_index_cannot_name_files_elsewhere(name, folder):
    index(folder, {"model.norm.weight": name})
    assert "is not the name of a file of this folder" in complaint_of(folder)


@pytest.mark.parametrize("weight_map", [5, ["model.safetensors"], {"a": 1}, {"a": None}])
def test_an_index_of_the_wrong_shape(weight_map, folder):
    index(folder, weight_map)
    assert "should be" in complaint_of(folder)


def test_shards_may_not_repeat_a_tensor(folder):
    (folder / "copy.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    index(folder, {"a": "model.safetensors", "b": "copy.safetensors"})
    assert "appears twice" in complaint_of(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_links_may_not_leave_the_folder(name, folder, tmp_path):
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    assert f"{name} leads out of the folder" in complaint_of(folder)


def test_links_inside_the_folder_and_into_the_blobs_of_a_cache(tmp_path):
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "0123abc"
    snapshot.parent.mkdir(parents=True)
    write_folder(snapshot, RandomCheckpoint(tiny_config()))
    blobs = tmp_path / "models--org--tiny" / "blobs"
    blobs.mkdir()
    for name in os.listdir(snapshot):
        (snapshot / name).rename(blobs / f"blob-{name}")
        (snapshot / name).symlink_to(f"../../blobs/blob-{name}")
    assert HuggingFaceCheckpoint.open(str(snapshot)).config.name == "tiny"


def test_link_loops(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    assert "config.json" in complaint_of(folder)


def test_code_is_never_looked_at(tmp_path):
    folder = write_folder(tmp_path / "tiny", RandomCheckpoint(tiny_config()), auto_map={"AutoModel": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit('code was run')")
    assert HuggingFaceCheckpoint.open(str(folder)).names


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["config", "tokenizer", "generation_config", "tokenizer_config"]),
    data=st.data(),
)
def test_arbitrary_json_files(kind, data, folder):
    name = f"{kind}.json"
    keys = st.sampled_from(["eos_token_id", "bos_token", "chat_template", "added_tokens", "model_type"])
    original = (folder / name).read_bytes() if (folder / name).exists() else None
    (folder / name).write_text(json.dumps(data.draw(st.dictionaries(keys, JSON, max_size=4) | JSON)))
    try:
        HuggingFaceCheckpoint.open(str(folder))
    except ModelError as error:
        assert_one_sentence(error)
    finally:
        (folder / name).unlink() if original is None else (folder / name).write_bytes(original)
