"""Frequencies against the formulas of transformers' ``modeling_rope_utils``, retold here with numpy."""

import dataclasses
import math

import numpy as np
import pytest

from branchline.base.errors import ModelError
from branchline.models.config import RopeConfig
from branchline.models.rope import rope_spec, yarn_magnitude

LLAMA3 = [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (2.0, 2.0, 3.0, 256)]
YARN = [(1e6, 128, 4.0, 32768), (1e4, 64, 16.0, 4096), (1e4, 8, 2.0, 64)]


def plain(theta, dim):
    return 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)


def frequencies(rope, head_dim=None):
    return np.array(rope_spec(rope, head_dim or rope.rotary_dim).inverse_frequencies)


def test_default():
    np.testing.assert_allclose(frequencies(RopeConfig(theta=1e5, rotary_dim=64)), plain(1e5, 64), rtol=1e-14)


def test_linear():
    rope = RopeConfig(theta=1e4, rotary_dim=128, scaling="linear", factor=4.0)
    np.testing.assert_allclose(frequencies(rope), plain(1e4, 128) / 4, rtol=1e-14)


@pytest.mark.parametrize(("factor", "low", "high", "context"), LLAMA3)
def test_llama3(factor, low, high, context):
    rope = RopeConfig(
        theta=5e5, rotary_dim=128, scaling="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high,
        original_context=context,
    )  # fmt: skip
    inv_freq = plain(5e5, 128)
    low_freq_wavelen, high_freq_wavelen = context / low, context / high
    wavelen = 2 * math.pi / inv_freq
    scaled = np.where(wavelen > low_freq_wavelen, inv_freq / factor, inv_freq)
    smooth = (context / wavelen - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    medium = ~(wavelen < high_freq_wavelen) & ~(wavelen > low_freq_wavelen)
    assert medium.any()
    np.testing.assert_allclose(frequencies(rope), np.where(medium, smoothed, scaled), rtol=1e-12)


def test_llama3_as_precomputed_divisors():
    """GGUF files carry the same scaling as numbers to divide by."""
    rope = RopeConfig(theta=5e5, rotary_dim=128, scaling="llama3", factor=8.0, original_context=8192)
    divisors = tuple(plain(5e5, 128) / frequencies(rope))
    precomputed = RopeConfig(theta=5e5, rotary_dim=128, frequency_divisors=divisors)
    np.testing.assert_allclose(frequencies(precomputed), frequencies(rope), rtol=1e-14)


@pytest.mark.parametrize(("theta", "dim", "factor", "context"), YARN)
def test_yarn(theta, dim, factor, context):
    def correction_dim(rotations):
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(correction_dim(32)), 0), min(math.ceil(correction_dim(1)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low + (0.001 if low == high else 0)), 0, 1)
    keep = 1 - ramp
    expected = plain(theta, dim) / factor * (1 - keep) + plain(theta, dim) * keep
    rope = RopeConfig(
        theta=theta,
        rotary_dim=dim,
        scaling="yarn",
        factor=factor,
        original_context=context,
        magnitude=yarn_magnitude(factor),
    )
    np.testing.assert_allclose(frequencies(rope), expected, rtol=1e-12)
    assert rope_spec(rope, dim).magnitude == pytest.approx(0.1 * math.log(factor) + 1)


def test_layout_and_partial_rotation_are_passed_on():
    spec = rope_spec(RopeConfig(rotary_dim=32, layout="interleaved"), 64)
    assert (spec.layout, spec.head_dim, len(spec.inverse_frequencies), spec.magnitude) == ("interleaved", 64, 16, 1.0)


@pytest.mark.parametrize("rotary_dim", [0, 7, 66])
def test_rotary_dimension_must_suit_the_head(rotary_dim):
    with pytest.raises(ModelError, match="does not suit"):
        rope_spec(RopeConfig(rotary_dim=rotary_dim), 64)


def test_there_is_a_divisor_for_each_frequency():
    with pytest.raises(ModelError, match="3 rope frequency divisors for 4"):
        rope_spec(RopeConfig(rotary_dim=8, frequency_divisors=(1.0, 1.0, 1.0)), 8)


@pytest.mark.parametrize(
    "changes",
    [
        {"theta": 1.0},
        {"theta": math.nan},
        {"theta": math.inf},
        {"factor": 0.5},
        {"scaling": "llama3", "low_freq_factor": 4.0, "original_context": 8192},
        {"scaling": "llama3"},
        {"scaling": "yarn"},
        {"scaling": "yarn", "original_context": 64, "beta_slow": 40.0},
        {"frequency_divisors": (0.0,)},
        {"frequency_divisors": (math.nan,)},
    ],
)
def test_numbers_out_of_range_are_refused(changes):
    with pytest.raises(ModelError):
        dataclasses.replace(RopeConfig(rotary_dim=8), **changes)
