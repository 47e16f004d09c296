"""Each native kernel against numpy, and every instruction set against the portable one, bit for bit."""

import itertools
import math
import time

import numpy as np
import pytest

from branchline.models.checkpoint import Tensor
from branchline.models.quants import KINDS, dequantize
from branchline.models.repack import repack
from branchline.ops.native import kernels, usable_isas
from branchline.ops.packed import Groups

native = pytest.importorskip("branchline._native", reason="the native kernels were not built")
ISAS = usable_isas()
GROUPED = ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")


def random_tensor(kind, out, width, seed=0):
    """Random bits of a file, scales made harmless."""
    rng = np.random.default_rng(seed)
    of = KINDS[kind]
    data = rng.integers(0, 256, (of.byte_count((out, width)) // of.block_bytes, of.block_bytes), dtype=np.uint8)
    if kind in GROUPED:
        places = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2)}.get(kind, (0,))
        for place in places:
            scales = (rng.standard_normal(len(data)) * 0.02).astype(np.float16)
            data[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    else:
        numbers = rng.standard_normal((out, width)).astype(np.float32)
        halves = {
            "F32": numbers,
            "F16": numbers.astype(np.float16),
            "BF16": (numbers.view(np.uint32) >> 16).astype(np.uint16),
        }
        data = halves[kind]
    return Tensor("w", (out, width), kind, np.ascontiguousarray(data).reshape(-1).view(np.uint8))


def matrix_of(weight):
    matrix = native.Matrix(weight.encoding, *weight.shape, weight.half, weight.minima, weight.splits)
    for slab in weight.slabs:
        if isinstance(slab, Groups):
            matrix.put_groups(slab.first, slab.codes, slab.scales, slab.minima)
        else:
            (matrix.put_numbers if slab.rows.dtype == np.float32 else matrix.put_bits)(slab.first, slab.rows)
    return matrix


def rounded(x):
    """What a grouped linear operator sees of its inputs: the bytes times their scales."""
    groups = x.astype(np.float64).reshape(len(x), -1, 32)
    scales = np.abs(groups).max(axis=-1, keepdims=True) / 127
    codes = np.rint(np.divide(groups, scales, out=np.zeros_like(groups), where=scales > 0))
    return (codes * scales).reshape(x.shape)


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("kind", [*GROUPED, "F32", "F16", "BF16"])
@pytest.mark.parametrize("out", [1, 8, 13])
def test_repacking_rounds_nothing(kind, out):
    tensor = random_tensor(kind, out, 512)
    assert (matrix_of(repack(tensor)).read() == dequantize(tensor)).all()


def test_large_matrices_come_in_slabs():
    tensor = random_tensor("Q4_1", 4100, 512)
    weight = repack(tensor)
    slabs = list(weight.slabs)
    assert [slab.first for slab in slabs] == [0, 2048, 4096]
    assert (matrix_of(repack(tensor)).read() == dequantize(tensor)).all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="whole groups"):
        native.Matrix("q4", 8, 33, False, True)
    with pytest.raises(ValueError, match="no such encoding"):
        native.Matrix("q3", 8, 32)
    matrix = native.Matrix("q8", 8, 32, True)
    codes, scales = np.zeros((8, 32), np.uint8), np.ones((8, 1), np.float32)
    for first, more, match in (
        (1, (codes, scales, None), "do not fit"),
        (0, (codes, scales, scales), "minima"),
        (0, (codes, scales + np.float32(1e-6), None), "16-bit"),
        (0, (codes[:, :16].copy(), scales, None), "do not fit"),
    ):
        with pytest.raises(ValueError, match=match):
            matrix.put_groups(first, *more)


# ---------------------------------------------------------------- linear


@pytest.mark.parametrize("kind", [*GROUPED, "F32", "F16", "BF16"])
@pytest.mark.parametrize(("rows", "out"), [(1, 8), (1, 1), (2, 17), (3, 24), (4, 16), (17, 31)])
@pytest.mark.parametrize("isa", ISAS)
def test_linear_equals_numpy(isa, kind, rows, out):
    """Against float64 over the same rounded inputs: what is left is the error of float32 sums."""
    tensor = random_tensor(kind, out, 512, seed=out)
    x = np.random.default_rng(rows).standard_normal((rows, 512), dtype=np.float32)
    seen = rounded(x) if kind in GROUPED else x.astype(np.float64)
    weights = dequantize(tensor).astype(np.float64)
    bound = 2e-6 * (np.abs(seen) @ np.abs(weights).T)
    assert (np.abs(native.linear(isa, matrix_of(repack(tensor)), x) - seen @ weights.T) <= bound).all()


@pytest.mark.parametrize(("width", "out", "rows"), [(1, 1, 1), (3, 5, 2), (30, 9, 17), (33, 8, 5)])
@pytest.mark.parametrize("isa", ISAS)
def test_linear_of_odd_widths(isa, width, out, rows):
    rng = np.random.default_rng(width)
    weights, x = rng.standard_normal((out, width), dtype=np.float32), rng.standard_normal((rows, width), dtype=np.float32)
    matrix = native.Matrix("f32", out, width)
    matrix.put_numbers(0, weights)
    np.testing.assert_allclose(native.linear(isa, matrix, x), x @ weights.T, rtol=1e-4, atol=1e-5)


def test_linear_of_no_rows():
    for isa in ISAS:
        out = native.linear(isa, matrix_of(repack(random_tensor("Q4_1", 16, 64))), np.zeros((0, 64), np.float32))
        assert out.shape == (0, 16)


@pytest.mark.parametrize("kind", [*GROUPED, "F32", "F16", "BF16"])
def test_extreme_codes_do_not_overflow(kind):
    """All bits of the codes set, or only their signs, against inputs that are all the largest: still exact."""
    for byte, sign in itertools.product((0xFF, 0x80, 0x7F, 0x00), (1, -1)):
        tensor = random_tensor(kind, 8, 256)
        if kind in ("Q4_0", "Q5_0", "Q8_0"):
            tensor.data.reshape(-1, KINDS[kind].block_bytes)[:, 2:] = byte
        elif kind in ("Q4_1", "Q5_1"):
            tensor.data.reshape(-1, KINDS[kind].block_bytes)[:, 4:] = byte
        x = np.full((1, 256), sign, np.float32)
        weights = dequantize(tensor).astype(np.float64)
        for isa in ISAS:
            y = native.linear(isa, matrix_of(repack(tensor)), x)
            np.testing.assert_allclose(y, x @ weights.T, rtol=1e-5, atol=1e-5 * np.abs(weights).sum(axis=1).max())


@pytest.mark.parametrize("kind", [*GROUPED, "F32", "F16", "BF16"])
def test_every_instruction_set_gives_the_same_bits(kind):
    matrix = matrix_of(repack(random_tensor(kind, 77, 768, seed=5)))
    x = np.random.default_rng(1).standard_normal((9, 768), dtype=np.float32) * np.float32(3)
    x[3, 40] = 500
    expected = native.linear("portable", matrix, x)
    for isa in ISAS:
        assert (native.linear(isa, matrix, x) == expected).all()
        alone = np.concatenate([native.linear(isa, matrix, row[None]) for row in x])
        assert (alone == expected).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("isa", ISAS)
def test_numbers_that_are_not_finite_stay_in_their_row_and_are_seen(isa, poison):
    matrix = matrix_of(repack(random_tensor("Q4_1", 24, 64)))
    x = np.random.default_rng(2).standard_normal((5, 64), dtype=np.float32)
    clean = native.linear(isa, matrix, x)
    x[2, 33] = poison
    y = native.linear(isa, matrix, x)
    assert np.isnan(y[2]).all()
    assert (np.delete(y, 2, axis=0) == np.delete(clean, 2, axis=0)).all()


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("isa", ISAS)
def test_quantize(isa):
    x = np.random.default_rng(3).standard_normal(32 * 40, dtype=np.float32)
    x[32:64] = 0
    x[64:96] = np.float32(1e-33)
    x[96:128] *= np.float32(1e20)
    codes, scales, sums = native.quantize(isa, x)
    assert (
        np.abs(codes * np.repeat(scales, 32) - x).max(where=np.arange(x.size) // 32 != 3, initial=0)
        < 0.51 * scales[4:].max()
    )
    assert (codes[32:96] == 0).all()
    assert (scales[1:3] == 0).all()
    np.testing.assert_allclose(sums, codes.reshape(-1, 32).sum(axis=1) * scales, rtol=1e-6)
    for mine, portable in zip((codes, scales, sums), native.quantize("portable", x), strict=True):
        assert (mine == portable).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("count", [1, 8, 37])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gates(isa, count, kind):
    x = np.concatenate([np.linspace(-120, 120, count), [0.0, 1e-4, -1e-4, 30, -30]]).astype(np.float32)
    up = np.random.default_rng(4).standard_normal(len(x), dtype=np.float32)
    wide = x.astype(np.float64)
    expected = {
        "silu": wide / (1 + np.exp(-wide)),
        "gelu_tanh": 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))),
    }[kind]
    y = native.gate(isa, kind, x, up)
    np.testing.assert_allclose(y, expected * up, rtol=2e-6, atol=2e-6)
    assert (y == native.gate("portable", kind, x, up)).all()
    assert math.isnan(native.gate(isa, kind, np.array([math.nan], np.float32), up[:1])[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("width", "group"), [(576, 576), (64, 16), (30, 10), (5, 5), (3, 1)])
def test_norm(isa, width, group):
    rng = np.random.default_rng(width)
    x, weight = rng.standard_normal(width, dtype=np.float32), rng.standard_normal(group, dtype=np.float32)
    wide = x.astype(np.float64).reshape(-1, group)
    expected = (wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight).ravel()
    y = native.norm(isa, x, weight, 1e-5)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert (y == native.norm("portable", x, weight, 1e-5)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000])
def test_argmax(isa, count):
    x = np.random.default_rng(count).integers(-5, 5, count).astype(np.float32)
    assert native.argmax(isa, x) == x.argmax()
    assert native.argmax(isa, -np.abs(x) - 1) == (-np.abs(x) - 1).argmax()
    for poison in (math.nan, math.inf, -math.inf):
        x[-1] = poison
        assert native.argmax(isa, x) == -1


@pytest.mark.parametrize("isa", ISAS)
def test_the_limit_of_multiplying_bytes_is_above_what_the_kernel_does_and_not_out_of_reach(isa):
    """Sums that went through memory would make it too low; a compiler that saw that nobody reads them, far too high."""
    matrix = matrix_of(repack(random_tensor("Q4_1", 256, 512)))
    x = np.random.default_rng(0).standard_normal((64, 512), dtype=np.float32)

    def speed(work, count):
        started_s = time.thread_time()
        work()
        return count / (time.thread_time() - started_s)

    rounds = 1 << 16
    count = native.multiply_bytes(isa, rounds)
    kernel, limit = (
        max(speed(work, number) for _ in range(30))
        for work, number in (
            (lambda: native.linear(isa, matrix, x), 64 * 256 * 512),
            (lambda: native.multiply_bytes(isa, rounds), count),
        )
    )
    assert 0.9 * kernel < limit < 6 * kernel


def test_unknown_instruction_sets_are_refused():
    assert kernels() is native
    with pytest.raises(ValueError, match="no kernels named mmx"):
        native.argmax("mmx", np.zeros(1, np.float32))
