"""Every encoding against the ``gguf`` package, bit by bit."""

import gguf
import numpy as np
import pytest

from branchline.base.errors import ModelError
from branchline.models import quants
from branchline.models.checkpoint import Tensor
from branchline.models.quants import KINDS, dequantize

QUANTIZABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def random_blocks(kind, rows, columns, seed=0):
    """Random bytes of ``[rows, columns]`` numbers, every half-precision scale finite."""
    rng = np.random.default_rng(seed)
    shape = KINDS[kind]
    blocks = rng.integers(0, 256, (rows * columns // shape.block_values, shape.block_bytes), np.uint8)
    for offset in {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q6_K": [208]}.get(kind, [0, 2]):
        blocks[:, offset : offset + 2] = rng.standard_normal((len(blocks), 1)).astype("<f2").view(np.uint8)
    return blocks


def expected(kind, data, shape):
    rows = data.reshape(shape[0], -1)
    if kind in ("F32", "F16"):
        rows = rows.view({"F32": "<f4", "F16": "<f2"}[kind])
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]).reshape(shape)


def assert_same_bits(a, b):
    assert a.dtype == b.dtype == np.float32
    assert a.shape == b.shape
    np.testing.assert_array_equal(a.view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


@pytest.mark.parametrize("kind", QUANTIZABLE)
def test_quantized_numbers_come_back_as_gguf_says(kind):
    values = np.random.default_rng(1).standard_normal((6, 96), np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    assert flat.size == KINDS[kind].byte_count(values.shape)
    assert_same_bits(dequantize(Tensor("t", values.shape, kind, flat)), expected(kind, flat, values.shape))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("Q")])
def test_random_bytes_come_back_as_gguf_says(kind, monkeypatch):
    monkeypatch.setattr(quants, "SLAB_VALUES", 1000)  # several slabs, the last one short
    shape = (7, 768)
    flat = random_blocks(kind, *shape).reshape(-1)
    assert_same_bits(dequantize(Tensor("t", shape, kind, flat)), expected(kind, flat, shape))


def test_table_agrees_with_gguf():
    for name, kind in KINDS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (kind.block_values, kind.block_bytes)


def test_unaligned_f32_is_copied():
    values = np.arange(6, dtype=np.float32)
    shifted = np.concatenate([np.zeros(1, np.uint8), values.view(np.uint8)])[1:]
    np.testing.assert_array_equal(dequantize(Tensor("t", (2, 3), "F32", shifted)), values.reshape(2, 3))


def test_aligned_f32_is_a_view():
    values = np.arange(6, dtype=np.float32)
    assert np.shares_memory(dequantize(Tensor("t", (6,), "F32", values.view(np.uint8))), values)


def test_a_row_is_a_whole_number_of_blocks():
    with pytest.raises(ModelError, match="whole number of blocks"):
        KINDS["Q4_K"].byte_count((4, 320))
