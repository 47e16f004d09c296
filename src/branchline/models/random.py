"""A checkpoint out of thin air: right shapes, random weights, a byte-level tokenizer. For tests and benches.

Knows: how to draw weights that keep activations tame. Refuses to know: files.
"""

import dataclasses
import hashlib
import zlib
from typing import Any

import numpy as np

from branchline.base.errors import ModelError
from branchline.models.checkpoint import Tensor, TokenizerSource
from branchline.models.config import ModelConfig, RopeConfig
from branchline.models.shapes import weight_shapes

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Token ids 256, 257 and 258; the last one ends a turn."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_config(architecture: str = "llama", **changes: Any) -> ModelConfig:
    """Two layers, a vocabulary of 264: big enough for grouped queries, small enough for a unit test."""
    head_dim = 16 if architecture == "qwen3" else 8
    config = ModelConfig(
        architecture=architecture,
        name=f"tiny-{architecture}",
        layers=2,
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=head_dim,
        ffn=64,
        vocab_size=264,
        context_length=512,
        norm_eps=1e-5,
        rope=RopeConfig(rotary_dim=head_dim, layout="half" if "qwen" in architecture else "interleaved"),
        tied_embeddings=architecture != "mistral",
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        sliding_window=16 if architecture == "mistral" else None,
    )
    return dataclasses.replace(config, **changes)


class RandomCheckpoint:
    """Implements ``Checkpoint``. Float32, drawn anew at each call of ``tensor``: the same for the same seed and name."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.config = config
        self._seed = seed
        self._shapes = weight_shapes(config)

    @property
    def tokenizer(self) -> TokenizerSource:
        """One token per byte, then ``CONTROL_TOKENS``. Needs a vocabulary of at least 259."""
        tokens = [*byte_letters(), *CONTROL_TOKENS]
        if self.config.vocab_size < len(tokens):
            raise ModelError(f"a random model with a tokenizer needs a vocabulary of at least {len(tokens)}")
        return TokenizerSource(
            metadata={
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "gpt-2",
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.token_type": [1] * 256 + [3] * len(CONTROL_TOKENS),
                "tokenizer.ggml.merges": [],
                "tokenizer.ggml.bos_token_id": 257,
                "tokenizer.ggml.eos_token_id": 258,
                "tokenizer.ggml.padding_token_id": 256,
                "tokenizer.ggml.add_bos_token": False,
            },
            chat_template=CHAT_TEMPLATE,
            bos_token_id=257,
            eos_token_ids=(258,),
            pad_token_id=256,
            add_bos=False,
            vocab_size=self.config.vocab_size,
        )

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.config!r} seed {self._seed}".encode()).hexdigest()[:16]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def tensor(self, name: str) -> Tensor:
        """Norms near one, biases near zero, matrices of variance ``1 / in``. Embeddings are small enough for the layers to
        outweigh them: else a tied head would repeat its own input for ever."""
        if name not in self._shapes:
            raise ModelError(f"{self.config.name}: there is no tensor {name!r}")
        shape = self._shapes[name]
        rng = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        values = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2:
            values *= np.float32((2 if name == "token_embd.weight" else 1) * shape[1] ** -0.5)
        else:
            values = np.float32("norm" in name) + values * np.float32(0.1)
        return Tensor(name, shape, "F32", values.reshape(-1).view(np.uint8))


def byte_letters() -> list[str]:
    """GPT-2's printable letter for each byte, 0 to 255: itself where it is printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
