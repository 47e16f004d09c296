"""Graphs of all architectures: wired as the papers say, out of the weights that a checkpoint has."""

import dataclasses

import numpy as np
import pytest

from branchline.base.errors import ModelError
from branchline.models.config import ModelConfig
from branchline.models.quants import dequantize
from branchline.models.random import RandomCheckpoint, tiny_config
from branchline.models.registry import BUILDERS, build_graph
from branchline.models.shapes import check_shapes, weight_shapes
from branchline.ops.graph import Linear, Logits, Norm, PagedAttention, Rope


def graph_of(config):
    return build_graph(config, RandomCheckpoint(config).names)


@pytest.mark.parametrize("architecture", BUILDERS)
def test_a_graph_uses_every_weight_once_defined(architecture):
    config = tiny_config(architecture)
    graph = graph_of(config)
    assert set(graph.weights) == RandomCheckpoint(config).names
    assert isinstance(graph.ops[-1], Logits)
    defined = set()
    for op in graph.ops:
        inputs = {getattr(op, field) for field in ("x", "q", "k", "v", "a", "b", "gate", "up") if hasattr(op, field)}
        assert inputs <= defined
        defined.add(op.out)
    assert [op.layer for op in graph.ops if isinstance(op, PagedAttention)] == list(range(config.layers))


def test_llama_is_plain():
    graph = graph_of(tiny_config("llama"))
    assert all(op.bias is None for op in graph.ops if isinstance(op, Linear))
    assert {op.width for op in graph.ops if isinstance(op, Norm)} == {32}


def test_mistral_looks_back_through_a_window_and_has_a_head_of_its_own():
    graph = graph_of(tiny_config("mistral"))
    assert {op.window for op in graph.ops if isinstance(op, PagedAttention)} == {16}
    assert graph.ops[-1].weight == "output.weight"


def test_qwen2_has_biases_on_q_k_and_v_only():
    biased = {op.out for op in graph_of(tiny_config("qwen2")).ops if isinstance(op, Linear) and op.bias}
    assert biased == {"q", "k", "v"}


def test_qwen3_norms_each_head_before_rope():
    ops = graph_of(tiny_config("qwen3")).ops
    q_norm = next(i for i, op in enumerate(ops) if isinstance(op, Norm) and op.weight == "blk.0.attn_q_norm.weight")
    q_rope = next(i for i, op in enumerate(ops) if isinstance(op, Rope) and op.out == "q")
    assert ops[q_norm].width == 16
    assert q_norm < q_rope


@pytest.mark.parametrize(("architecture", "changes"), [("llama", {"qk_norm": True}), ("qwen2", {"qkv_bias": False})])
def test_a_variation_the_architecture_does_not_have_is_refused(architecture, changes):
    with pytest.raises(ModelError):
        graph_of(tiny_config(architecture, **changes))


def test_qwen3_without_head_norms_is_refused():
    with pytest.raises(ModelError, match="lacks them"):
        graph_of(tiny_config("qwen3", qk_norm=False))


def test_unknown_architecture_names_the_known_ones():
    with pytest.raises(ModelError, match=r"'mamba' is not supported .*llama.*qwen3"):
        build_graph(dataclasses.replace(tiny_config(), architecture="mamba"), frozenset())


def test_missing_weight_is_named():
    config = tiny_config()
    with pytest.raises(ModelError, match=r"1 tensors are missing, the first is 'blk.1.ffn_up.weight'"):
        build_graph(config, RandomCheckpoint(config).names - {"blk.1.ffn_up.weight"})


# ---------------------------------------------------------------- shapes


def test_shapes_are_checked():
    config = tiny_config()
    shapes = weight_shapes(config)
    check_shapes(config, shapes | {"rope_freqs.weight": (4,), "output.weight": (1, 1)})
    with pytest.raises(ModelError, match="implies"):
        check_shapes(config, shapes | {"blk.0.attn_q.weight": (32, 31)})
    with pytest.raises(ModelError, match="not part of a llama model"):
        check_shapes(config, shapes | {"blk.0.attn_output.bias": (32,)})


@pytest.mark.parametrize("field", ["layers", "heads", "vocab_size", "context_length"])
@pytest.mark.parametrize("value", [0, -1, 1 << 40, 2.0])
def test_absurd_numbers_are_refused(field, value):
    with pytest.raises(ModelError, match=field):
        tiny_config(**{field: value})


def test_uneven_head_groups_are_refused():
    with pytest.raises(ModelError, match="evenly"):
        tiny_config(heads=4, kv_heads=3)


# ---------------------------------------------------------------- random checkpoints


@pytest.mark.parametrize("architecture", BUILDERS)
def test_random_checkpoint_is_whole_and_repeatable(architecture):
    one, same, other = (RandomCheckpoint(tiny_config(architecture), seed) for seed in (1, 1, 2))
    assert isinstance(one.config, ModelConfig)
    for name in one.names:
        array = dequantize(one.tensor(name))
        assert array.shape == weight_shapes(one.config)[name]
        np.testing.assert_array_equal(array, dequantize(same.tensor(name)))
        assert not np.array_equal(array, dequantize(other.tensor(name)))
    assert one.digest == same.digest != other.digest


def test_random_checkpoint_has_no_other_tensors():
    with pytest.raises(ModelError, match="no tensor"):
        RandomCheckpoint(tiny_config()).tensor("blk.9.attn_q.weight")


def test_random_tokenizer_needs_room():
    assert len(RandomCheckpoint(tiny_config()).tokenizer.metadata["tokenizer.ggml.tokens"]) == 259
    with pytest.raises(ModelError, match="259"):
        _ = RandomCheckpoint(dataclasses.replace(tiny_config(), vocab_size=100)).tokenizer
