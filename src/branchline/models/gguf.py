"""A GGUF file as a checkpoint: what llama.cpp's metadata keys say, in this engine's vocabulary.

Knows: the keys of llama, mistral, qwen2 and qwen3 files and of their tokenizers. Refuses to know: bytes (``gguf_file``).
"""

import functools
import os
from collections.abc import Mapping
from typing import Any, Literal

from branchline.base.errors import ModelError
from branchline.models.checkpoint import TURN_ENDS, Tensor, TokenizerSource, checkpoint_digest
from branchline.models.config import ModelConfig, RopeConfig
from branchline.models.facts import Facts, blame, clip
from branchline.models.gguf_file import GgufFile, read_gguf
from branchline.models.quants import dequantize
from branchline.models.registry import require_architecture
from branchline.models.rope import yarn_magnitude
from branchline.models.shapes import check_shapes

_INTERLEAVED = ("llama", "mistral")
"""Converters permute the rows of q and k of these architectures, so that rope turns neighbours."""
_CONTROL = 3
"""Token type of control tokens."""


class GgufCheckpoint:
    """Implements ``Checkpoint``."""

    def __init__(self, file_name: str, file: GgufFile) -> None:
        self._file_name = file_name
        self._file = file
        self.config = _config(file_name, file)
        check_shapes(self.config, {name: tensor.shape for name, tensor in file.tensors.items()})
        self.tokenizer = _tokenizer(file.metadata, self.config.vocab_size)

    @classmethod
    def open(cls, path: str) -> "GgufCheckpoint":
        """Raises ModelError, one sentence with the name of the file, if it cannot be served."""
        file_name = os.path.basename(path)
        with blame(file_name):
            return cls(file_name, read_gguf(path))

    @functools.cached_property
    def digest(self) -> str:
        return checkpoint_digest(self._file.header, self._file.tensors.values())

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file.tensors)

    def tensor(self, name: str) -> Tensor:
        try:
            return self._file.tensors[name]
        except KeyError:
            raise ModelError(f"{self._file_name}: there is no tensor {clip(name)}") from None


# ---------------------------------------------------------------- configuration


def _config(file_name: str, file: GgufFile) -> ModelConfig:
    facts = Facts(file.metadata)
    if facts.integer("split.count", 1) > 1:
        raise ModelError("this is one part of a split model; join the parts first (llama-gguf-split --merge)")
    architecture = require_architecture(facts.text("general.architecture"))
    own = _Own(facts, architecture)
    if own.integer("expert_count", 0):
        raise ModelError("mixture-of-experts models are not supported")
    hidden, heads = own.integer("embedding_length"), own.same_for_all_layers("attention.head_count")
    head_dim = own.integer("attention.key_length", hidden // max(heads, 1))
    if own.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError("keys and values of different length are not supported")
    return ModelConfig(
        architecture=architecture,
        name=os.path.splitext(file_name)[0],
        layers=own.integer("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=own.same_for_all_layers("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=own.same_for_all_layers("feed_forward_length"),
        vocab_size=_vocab_size(file.tensors),
        context_length=own.integer("context_length"),
        norm_eps=_epsilon(own.number("attention.layer_norm_rms_epsilon")),
        rope=_rope(own, file.tensors, architecture, head_dim),
        tied_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_window=_sliding_window(own, architecture),
    )


class _Own:
    """Keys that begin with the name of the architecture."""

    def __init__(self, facts: Facts, architecture: str) -> None:
        self._facts = facts
        self._prefix = f"{architecture}."

    def has(self, key: str) -> bool:
        return self._prefix + key in self._facts

    def integer(self, key: str, default: int | None = None) -> int:
        return self._facts.integer(self._prefix + key, default)

    def number(self, key: str, default: float | None = None) -> float:
        return self._facts.number(self._prefix + key, default)

    def text(self, key: str, default: str) -> str:
        return self._facts.text(self._prefix + key, default)

    def same_for_all_layers(self, key: str, default: int | None = None) -> int:
        """A number, or a list that says the same number for each layer."""
        try:
            return self.integer(key, default)
        except ModelError:
            values = self._facts.items(self._prefix + key) if self.has(key) else []
            if not values or any(value != values[0] for value in values):
                raise
            return Facts({key: values[0]}).integer(key)


def _rope(own: _Own, tensors: Mapping[str, Tensor], architecture: str, head_dim: int) -> RopeConfig:
    scaling, factor = _scaling(own)
    if own.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise ModelError("a yarn_ext_factor other than 1 is not supported")
    return RopeConfig(
        theta=own.number("rope.freq_base", 10_000.0),
        rotary_dim=own.integer("rope.dimension_count", head_dim),
        layout="interleaved" if architecture in _INTERLEAVED else "half",
        scaling=scaling,
        factor=factor,
        original_context=own.integer("rope.scaling.original_context_length", own.integer("context_length")),
        frequency_divisors=_divisors(tensors, head_dim),
        magnitude=yarn_magnitude(factor) * own.number("rope.scaling.attn_factor", 1.0) if scaling == "yarn" else 1.0,
        beta_fast=own.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=own.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _scaling(own: _Own) -> tuple[Literal["none", "linear", "yarn"], float]:
    """As llama.cpp: a factor without a type is linear; zero stands for no scaling."""
    factor = own.number("rope.scaling.factor", own.number("rope.scale_linear", 0.0)) or 1.0
    match own.text("rope.scaling.type", "linear"):
        case "none":
            return "none", 1.0
        case "linear":
            return ("linear", factor) if factor != 1.0 else ("none", 1.0)
        case "yarn":
            return "yarn", factor
        case other:
            raise ModelError(f"rope scaling {clip(other)} is not supported")


def _divisors(tensors: Mapping[str, Tensor], head_dim: int) -> tuple[float, ...]:
    tensor = tensors.get("rope_freqs.weight")
    if tensor is None:
        return ()
    if tensor.size > head_dim:
        raise ModelError(f"rope_freqs.weight has {tensor.size} numbers for heads of {head_dim}")
    return tuple(float(value) for value in dequantize(tensor).reshape(-1))


def _sliding_window(own: _Own, architecture: str) -> int | None:
    """Only Mistral files mean it for every layer; as in llama.cpp the key has no force for Qwen."""
    window = own.integer("attention.sliding_window", 0) if architecture in _INTERLEAVED else 0
    return window if 0 < window < own.integer("context_length") else None


def _vocab_size(tensors: Mapping[str, Tensor]) -> int:
    if "token_embd.weight" not in tensors:
        raise ModelError("tensor 'token_embd.weight' is missing")
    return tensors["token_embd.weight"].shape[0]


def _epsilon(value: float) -> float:
    if not 0 < value < 1:
        raise ModelError(f"the epsilon of norms is {value}, which is not between 0 and 1")
    return value


# ---------------------------------------------------------------- tokenizer


def _tokenizer(metadata: Mapping[str, Any], vocab_size: int) -> TokenizerSource:
    own = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    facts = Facts(own)
    tokens = facts.texts("tokenizer.ggml.tokens")
    if len(tokens) > vocab_size:
        raise ModelError(f"the tokenizer knows {len(tokens)} tokens, the model only {vocab_size}")
    ends = [_token_id(facts, key, len(tokens)) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    ends += [token for token in _turn_ends(facts, tokens) if token not in ends]
    return TokenizerSource(
        metadata=own,
        chat_template=facts.text("tokenizer.chat_template") if "tokenizer.chat_template" in facts else None,
        bos_token_id=_token_id(facts, "bos_token_id", len(tokens)),
        eos_token_ids=tuple(dict.fromkeys(token for token in ends if token is not None)),
        pad_token_id=_token_id(facts, "padding_token_id", len(tokens)),
        add_bos=_add_bos(facts),
        vocab_size=vocab_size,
    )


def _turn_ends(facts: Facts, tokens: list[str]) -> list[int]:
    """Ids of control tokens that end a turn by their name; chat models often name only one of them in the metadata."""
    types = facts.items("tokenizer.ggml.token_type")
    return [i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL and token in TURN_ENDS]


def _token_id(facts: Facts, key: str, count: int) -> int | None:
    """Files say 'none' with an absent key or with an id outside the vocabulary."""
    value = facts.integer(f"tokenizer.ggml.{key}", -1)
    return value if 0 <= value < count else None


def _add_bos(facts: Facts) -> bool:
    """As llama.cpp: without the key, SentencePiece models and Llama 3 begin with a start token, other BPE ones do not."""
    usual = facts.text("tokenizer.ggml.model", "") == "llama" or facts.text("tokenizer.ggml.pre", "") in (
        "llama3",
        "llama-v3",
        "llama-bpe",
    )
    return facts.flag("tokenizer.ggml.add_bos_token", usual)
