import math

import pytest

from branchline.base.errors import InvalidRequest
from branchline.core.limits import check_sampling, settle_sampling
from branchline.core.request import SamplingParams


def check(**fields):
    check_sampling(SamplingParams(**fields), vocab_size=100, context_length=64)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0},
        {"temperature": 100.0, "top_p": 1, "min_p": 1.0, "top_k": -1},
        {"top_p": 1e-9, "repetition_penalty": 10.0, "presence_penalty": -2, "frequency_penalty": 2},
        {"max_tokens": 10**12, "min_tokens": 64},
        {"max_tokens": 5, "min_tokens": 5},
        {"seed": -(1 << 63)},
        {"seed": (1 << 64) - 1},
        {"stop": ("x" * 256,) * 16},
        {"stop_token_ids": (0, 99) * 32},
        {"logit_bias": ((0, -100.0), (99, 100)) * 512},
        {"logprobs": 0, "prompt_logprobs": 20},
    ],
)
def test_values_at_the_edge_pass(fields):
    check(**fields)


@pytest.mark.parametrize(
    ("param", "values"),
    [
        ("temperature", [-0.1, 100.1, math.nan, math.inf, "hot", True, None]),
        ("top_p", [0.0, 1.1, math.nan]),
        ("min_p", [-0.1, 1.1]),
        ("top_k", [-2, 1.5, True]),
        ("repetition_penalty", [0.0, 10.1, math.nan]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1, -math.inf]),
        ("max_tokens", [0, -1, 2.0]),
        ("min_tokens", [-1, 65]),
        ("seed", [1 << 64, -(1 << 63) - 1, 1.0]),
        ("stop", [("",), ("x" * 257,), ("x",) * 17, (1,), ("\ud800",)]),
        ("stop_token_ids", [(100,), (-1,), (True,), (1,) * 65]),
        ("logit_bias", [((100, 0.0),), ((-1, 0.0),), ((1, math.nan),), ((1, 100.5),), ((1, 0.0),) * 1025]),
        ("logprobs", [-1, 21]),
        ("prompt_logprobs", [-1, 21]),
        ("ignore_eos", [1]),
    ],
)
def test_values_beyond_name_their_field(param, values):
    for value in values:
        with pytest.raises(InvalidRequest) as caught:
            check(**{param: value})
        assert caught.value.param == param, value


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(InvalidRequest, match="max_tokens") as caught:
        check(min_tokens=6, max_tokens=5)
    assert caught.value.param == "min_tokens"


def test_settled_parameters_have_one_spelling():
    settled = settle_sampling(SamplingParams(top_k=-1, temperature=1e-5, seed=-1))
    assert settled == SamplingParams(top_k=0, temperature=0.0, seed=(1 << 64) - 1)
    assert settle_sampling(SamplingParams(seed=5)).seed == 5
    assert settle_sampling(SamplingParams()) == SamplingParams()
