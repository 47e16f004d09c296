"""Float weights rounded to groups of 32: by how much at most, which ones, and what is refused."""

import math

import numpy as np
import pytest

from branchline.base.config import QUANTIZE_NAMES
from branchline.base.errors import ModelError
from branchline.models import repack as repacking
from branchline.models.checkpoint import Tensor
from branchline.models.quants import KINDS, dequantize
from branchline.models.repack import repack
from branchline.models.rounding import ROUNDINGS

STEPS = {"int8": 127, "int4": 15}


def tensor_of(values, kind="F32"):
    numbers = np.ascontiguousarray(values, np.float32)
    if kind != "F32":
        numbers = numbers.astype(np.float16) if kind == "F16" else (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return Tensor("w", numbers.shape, kind, numbers.reshape(-1).view(np.uint8))


def bound(values, quantize):
    """Half a scale, by group: a scale is the range over the steps, rounded up to 16 bits; so is the range of int4 itself."""
    groups = values.astype(np.float64).reshape(-1, 32)
    reach = np.abs(groups).max(axis=1) if quantize == "int8" else np.ptp(groups, axis=1)
    lowered = 0 if quantize == "int8" else np.abs(groups.min(axis=1)) / 1024 + 2.0**-24
    scale = (reach + lowered) / STEPS[quantize] * (1 + 1 / 1024) + 2.0**-24
    return np.repeat(scale / 2, 32).reshape(values.shape) + np.abs(values) * 1e-6


def weights(seed=0, out=24, width=192):
    """Groups of all sizes, a few of them strange."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((out, width), dtype=np.float32) * np.float32(10) ** rng.integers(-9, 4, (out, 1))
    values[0, :32] = 0
    values[1, 32:64] = 0.7
    values[2, :32] = -3
    values[3, :32] = np.linspace(5, 5.001, 32)
    values[4, 64] = 1000
    values[5, :32] = 1e-30
    return values.astype(np.float32)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("quantize", QUANTIZE_NAMES)
def test_no_weight_moves_by_more_than_half_a_step(quantize, kind):
    tensor = tensor_of(weights(), kind)
    exact = dequantize(tensor)
    assert (np.abs(repack(tensor, quantize).to_float() - exact) <= bound(exact, quantize)).all()


@pytest.mark.parametrize("quantize", QUANTIZE_NAMES)
def test_the_largest_is_reached_and_zero_stays_zero(quantize):
    values = weights()
    rounded = repack(tensor_of(values), quantize).to_float()
    assert (rounded[0, :32] == 0).all()
    assert np.abs(rounded[4, 64] - 1000) < 0.6
    for slab in repack(tensor_of(values), quantize).slabs:
        assert (slab.scales == slab.scales.astype(np.float16)).all()
        codes = slab.codes.view(np.int8) if quantize == "int8" else slab.codes
        assert np.abs(codes.astype(int)).max() == STEPS[quantize]


def test_what_lies_on_the_grid_stays_there():
    once = repack(tensor_of(np.random.default_rng(2).standard_normal((9, 64))), "int8").to_float()
    assert (repack(tensor_of(once), "int8").to_float() == once).all()


@pytest.mark.parametrize("quantize", QUANTIZE_NAMES)
def test_slabs_do_not_matter(quantize, monkeypatch):
    whole = repack(tensor_of(weights()), quantize).to_float()
    monkeypatch.setattr(repacking, "SLAB_VALUES", 500)
    assert len(list(repack(tensor_of(weights()), quantize).slabs)) == 12
    assert (repack(tensor_of(weights()), quantize).to_float() == whole).all()


@pytest.mark.parametrize("quantize", QUANTIZE_NAMES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("Q")])
def test_quantized_weights_stay_what_they_are(kind, quantize):
    data = np.random.default_rng(0).integers(0, 60, KINDS[kind].byte_count((3, 512)), np.uint8)
    tensor = Tensor("w", (3, 512), kind, data)
    assert (repack(tensor, quantize).to_float() == dequantize(tensor)).all()


@pytest.mark.parametrize("quantize", QUANTIZE_NAMES)
@pytest.mark.parametrize("width", [1, 31, 33, 80])
def test_rows_that_are_not_whole_groups_stay_what_they_are(width, quantize):
    tensor = tensor_of(np.random.default_rng(width).standard_normal((5, width)))
    assert (repack(tensor, quantize).to_float() == dequantize(tensor)).all()


@pytest.mark.parametrize("quantize", QUANTIZE_NAMES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 3e8, -3e8])
def test_what_cannot_be_rounded_is_refused(poison, quantize):
    values = weights()
    values[7, 100] = poison
    with pytest.raises(ModelError, match="'w' cannot be rounded"):
        repack(tensor_of(values), quantize).to_float()


def test_every_name_has_its_rounding():
    assert set(ROUNDINGS) == set(QUANTIZE_NAMES)


# ---------------------------------------------------------------- nothing asked for, nothing lost


@pytest.mark.parametrize("kind", list(KINDS))
def test_without_quantize_every_bit_is_kept(kind):
    data = np.random.default_rng(1).integers(0, 60, KINDS[kind].byte_count((3, 512)), np.uint8)
    tensor = Tensor("w", (3, 512), kind, data)
    assert (repack(tensor).to_float() == dequantize(tensor)).all()


def test_f32_that_was_bf16_once_takes_half_the_memory_and_loses_nothing():
    was = weights().view(np.uint32) & 0xFFFF0000
    tensor = tensor_of(was.view(np.float32))
    assert repack(tensor).encoding == "bf16"
    assert (repack(tensor).to_float() == was.view(np.float32)).all()
    was[-1, -1] |= 1
    assert repack(tensor_of(was.view(np.float32))).encoding == "f32"
