"""What rounding weights on load costs: KL divergence of whole models from the same ones with all their bits."""

from pathlib import Path

import numpy as np
import pytest

from branchline.base.config import QUANTIZE_NAMES, EngineConfig
from branchline.base.errors import ConfigError
from branchline.core.request import SamplingParams
from branchline.engine.offline import LLM
from branchline.models.checkpoint import Tensor
from branchline.models.quants import dequantize
from branchline.models.random import RandomCheckpoint, tiny_config
from branchline.ops.batch import Batch
from branchline.text.tokenizer import Tokenizer
from tests.support.checkpoints import write_gguf
from tests.support.executors import BEST, EXECUTORS, NATIVE, executor_with_pool

PAGE = 16


class Shuffled:
    """A checkpoint as F32 with its channels in another order: the same function. The groups of a quantized checkpoint are
    torn apart, so that rounding to groups is as hard as for weights that have never been in any."""

    def __init__(self, checkpoint, seed=0):
        self.config, self.names, self._checkpoint = checkpoint.config, checkpoint.names, checkpoint
        rng = np.random.default_rng(seed)
        self._hidden = rng.permutation(self.config.hidden)
        self._ffn = rng.permutation(self.config.ffn)
        head = rng.permutation(self.config.head_dim)
        self._values, self._mixed = (
            (np.arange(heads)[:, None] * self.config.head_dim + head).reshape(-1)
            for heads in (self.config.kv_heads, self.config.heads)
        )

    def tensor(self, name):
        whole = slice(None)
        rows, columns = {
            "attn_v": (self._values, self._hidden),
            "attn_output": (self._hidden, self._mixed),
            "ffn_gate": (self._ffn, self._hidden),
            "ffn_up": (self._ffn, self._hidden),
            "ffn_down": (self._hidden, self._ffn),
        }.get(name.split(".")[-2], (whole, self._hidden))
        values = dequantize(self._checkpoint.tensor(name))
        values = values[self._hidden] if values.ndim == 1 else values[rows][:, columns]
        return Tensor(name, values.shape, "F32", np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def log_softmax(logits):
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def predictions(name, checkpoint, tokens, quantize=None):
    pages = -(-len(tokens) // PAGE)
    executor = executor_with_pool(name, checkpoint, page_size=PAGE, page_count=pages, quantize=quantize)
    batch = Batch(np.array(tokens), np.arange(len(tokens)), np.array([0, len(tokens)]), np.arange(pages)[None])
    return log_softmax(executor.logits(executor.forward(batch)))


def divergence(expected, found):
    return float((np.exp(expected) * (expected - found)).sum(axis=1).mean())


@pytest.fixture(scope="module")
def text(default_checkpoint):
    words = (Path(__file__).parents[2] / "LICENSE").read_text()
    return Tokenizer.from_source(default_checkpoint.tokenizer).encode(words, add_special=False)[:128]


@pytest.fixture(scope="module")
def exact(default_checkpoint, text):
    return predictions("reference", Shuffled(default_checkpoint), text)


def test_another_order_of_channels_is_the_same_model(default_checkpoint, exact, text):
    assert divergence(exact, predictions("reference", default_checkpoint, text)) < 1e-8


@pytest.mark.parametrize(("quantize", "bound"), [("int8", 0.01), ("int4", 0.8)])
def test_a_rounded_model_is_near_the_one_with_all_its_bits(default_checkpoint, exact, text, quantize, bound):
    """Measured: docs/decisions/0005-rounding-on-load.md. Four bits without calibration are much for so small a model."""
    found = predictions(BEST[-1], Shuffled(default_checkpoint), text, quantize)
    assert 1e-5 < divergence(exact, found) < bound


# ---------------------------------------------------------------- executors


@pytest.fixture(scope="module")
def small():
    return RandomCheckpoint(tiny_config(hidden=96, ffn=128, layers=2, heads=3, kv_heads=1, head_dim=32))


TOKENS = list(range(40, 90))


@pytest.mark.parametrize("quantize", QUANTIZE_NAMES)
@pytest.mark.parametrize("name", EXECUTORS)
def test_every_executor_takes_the_same_rounded_weights(name, quantize, small):
    """What is left between them is the rounding of inputs."""
    reference = predictions("reference", small, TOKENS, quantize)
    assert divergence(reference, predictions(name, small, TOKENS, quantize)) < 0.003
    assert divergence(reference, predictions("reference", small, TOKENS)) > (0.0005 if quantize == "int8" else 0.03)


@pytest.mark.skipif(not NATIVE, reason="the native kernels were not built")
@pytest.mark.parametrize("quantize", QUANTIZE_NAMES)
def test_every_instruction_set_gives_the_same_bits(quantize, small):
    portable = predictions("native-portable", small, TOKENS, quantize)
    for name in NATIVE:
        assert (predictions(name, small, TOKENS, quantize) == portable).all()


@pytest.mark.skipif(not NATIVE, reason="the native kernels were not built")
def test_rounding_takes_the_memory_that_groups_take(small):
    taken = {
        quantize: executor_with_pool(NATIVE[0], small, page_size=PAGE, page_count=1, quantize=quantize).weight_bytes
        for quantize in (None, *QUANTIZE_NAMES)
    }
    assert taken["int8"] * 32 == taken[None] // 4 * 34
    assert taken["int4"] * 32 == taken[None] // 4 * 20


def test_rows_that_are_not_whole_groups_still_work():
    """Some matrices are rounded, others (here those that read 48 numbers) are not."""
    odd = RandomCheckpoint(tiny_config(hidden=48, ffn=64))
    for name in EXECUTORS:
        exact, found = predictions(name, odd, TOKENS), predictions(name, odd, TOKENS, "int8")
        assert 1e-7 < divergence(exact, found) < 0.01


# ---------------------------------------------------------------- an engine


@pytest.mark.parametrize("executor", ["reference", *(["native"] if NATIVE else [])])
def test_an_engine_rounds_on_load_and_says_so(executor, tmp_path, capsys):
    plain = str(write_gguf(tmp_path / "plain.gguf", RandomCheckpoint(tiny_config())))
    grouped = str(write_gguf(tmp_path / "grouped.gguf", RandomCheckpoint(tiny_config()), kind="Q4_0"))
    settings = {"executor": executor, "pages": 8, "threads": 1}
    facts = []
    for model, quantize in ((plain, None), (plain, "int4"), (grouped, "int4")):
        capsys.readouterr()
        with LLM(model, quantize=quantize, **settings) as llm:
            facts.append(llm.facts)
            llm.generate("abc", SamplingParams(max_tokens=3, temperature=0))
        assert ("changes nothing" in capsys.readouterr().err) == (model == grouped)
    assert facts[1].executor.endswith(", int4 weights")
    assert facts[1].digest != facts[0].digest


def test_other_roundings_are_refused():
    with pytest.raises(ConfigError, match="no quantization 'int3'; choose one of int8, int4"):
        EngineConfig(quantize="int3")
