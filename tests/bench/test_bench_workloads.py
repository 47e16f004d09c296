"""The workloads are those that published figures were measured with, to the byte."""

import hashlib
import itertools
import json

import pytest

from branchline.base.errors import ConfigError
from branchline.bench.workloads import WORKLOADS, find_workload

# SHA-256 of the JSON of all conversations, recorded from the load generator of the peers' figures: seed 1, seed 7.
RECORDED = {
    "single": (
        "bca9918902ffbbec5c74836ba7f86bca984f68a3d2c2150a3585c6a05d6fa952",
        "25d5a066701f5f651273df20274f506e65d67a0eaee08bd1058485b5bde0b0df",
    ),
    "batch": (
        "62cc52fe95bf49a625dcc0f5c6563f81bb4df3490998b879827099d0909606cb",
        "120c8ad945b96ec7fd17eb53673ae80cb6cce613eaa527330cb0f70d76b1d012",
    ),
    "prefix": (
        "66912501b7909e0e81fdc654e29f94f4209edaf41a99ea9a3ffb9d7b95ef8be6",
        "498bc08d069e0135ed338698c5c5d1a2303382d66e336d72d11ef524112ae21e",
    ),
    "chat": (
        "6aebbcf20ddacfd72cdf5d4f77f6a942b5032d779572441cab036072d50c5232",
        "89f76e4e33a8b2737b97325e2123517cbb691d8d93c55e64354491bcce24883a",
    ),
    "long": (
        "45765d80af57908ad7b3394b1015c88bb20610e01d74163d004094545524b59f",
        "c639c2de047803dacf2dec938e9195d15f7bf150a1c771874966a5bde75bd747",
    ),
}
CLIENTS = {"single": (1, 8), "batch": (16, 64), "prefix": (16, 64), "chat": (8, 8), "long": (4, 8)}


def drawn(name, seed, count):
    return list(itertools.islice(WORKLOADS[name].conversations(seed), count))


def test_there_are_five():
    assert {name: (one.clients, one.count) for name, one in WORKLOADS.items()} == CLIENTS


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("seed", [1, 7])
def test_prompts_are_the_recorded_ones(name, seed):
    text = json.dumps(drawn(name, seed, WORKLOADS[name].count))
    assert hashlib.sha256(text.encode()).hexdigest() == RECORDED[name][seed == 7]


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others():
    assert drawn("chat", 3, 2) == drawn("chat", 3, 2)
    assert drawn("chat", 3, 1) != drawn("chat", 4, 1)


def test_conversations_do_not_end_and_do_not_repeat():
    many = drawn("single", 1, 40)
    assert len(set(many)) == 40
    assert many[:8] == drawn("single", 1, 8)


def test_an_unknown_workload_is_named():
    with pytest.raises(ConfigError, match="no workload 'fast'"):
        find_workload("fast")
