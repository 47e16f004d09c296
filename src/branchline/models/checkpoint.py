"""What every kind of checkpoint offers, whatever the file format: the records and the port.

Knows: configuration, tensors by canonical (GGUF) name, the raw material of a tokenizer. Refuses to know: how files
are laid out (``gguf``, ``safetensors``), what a tokenizer does with its material (``text``).
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from branchline.base.errors import ModelError
from branchline.base.ids import TokenId
from branchline.models.config import ModelConfig
from branchline.models.mapped import let_go


@dataclass(frozen=True, slots=True)
class Tensor:
    """One weight, still in the file's encoding (memory-mapped)."""

    name: str
    shape: tuple[int, ...]
    """``(out, in)`` or ``(width,)``: row-major, the last axis contiguous."""
    kind: str
    """``F32``, ``F16``, ``BF16``, ``Q4_0``, ... : a key of ``models.quants.KINDS``."""
    data: npt.NDArray[np.uint8]
    """Bytes of the whole tensor, flat."""

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    """Raw material of a tokenizer: the text of a ``tokenizer.json``, or the ``tokenizer.*`` metadata of a GGUF file."""

    tokenizer_json: str | None = None
    metadata: Mapping[str, Any] | None = None
    """GGUF keys such as ``tokenizer.ggml.tokens`` with Python values (lists for arrays)."""
    chat_template: str | None = None
    bos_token_id: TokenId | None = None
    eos_token_ids: tuple[TokenId, ...] = ()
    """Every token that ends a turn: eos, eot, and those of generation_config.json."""
    pad_token_id: TokenId | None = None
    add_bos: bool | None = None
    """``None``: as ``tokenizer.json`` says."""
    vocab_size: int = 0
    """Rows of the embedding table; may be larger than the tokenizer."""

    @property
    def usable_ids(self) -> int:
        """Token ids that mean something, ``0 <= id < usable_ids``: padding rows of the embedding table do not count."""
        if self.metadata is not None:
            return min(self.vocab_size, len(self.metadata.get("tokenizer.ggml.tokens", ())))
        if self.tokenizer_json is not None:
            return min(self.vocab_size, _largest_id(self.tokenizer_json) + 1)
        return self.vocab_size


class _JsonModel(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _JsonAddedToken(msgspec.Struct):
    id: int


class _TokenizerJson(msgspec.Struct):
    """The few fields of a ``tokenizer.json`` that number its tokens."""

    model: _JsonModel
    added_tokens: list[_JsonAddedToken] = []


def _largest_id(tokenizer_json: str) -> int:
    try:
        parsed = msgspec.json.decode(tokenizer_json, type=_TokenizerJson)
    except msgspec.DecodeError as error:
        raise ModelError(f"tokenizer.json cannot be read: {error}") from None
    vocab = parsed.model.vocab
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return max(max(ids, default=-1), max((token.id for token in parsed.added_tokens), default=-1))


class Checkpoint(Protocol):
    """A model on disk, opened: headers are validated, tensors are mapped, nothing is converted yet."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer(self) -> TokenizerSource: ...

    @property
    def digest(self) -> str:
        """Short hexadecimal digest of configuration, tensor table and a sample of the bytes. Cheap."""

    @property
    def names(self) -> frozenset[str]: ...

    def tensor(self, name: str) -> Tensor:
        """Raises ModelError if there is no such tensor."""


TURN_ENDS = frozenset(
    (
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
        *("<EOT>", "<|end▁of▁sentence|>", "<｜end▁of▁sentence｜>", "</s>"),
    )
)
"""Control tokens that end a turn whatever else the metadata says."""

SAMPLE_BYTES = 64


def checkpoint_digest(header: bytes, tensors: Iterable[Tensor]) -> str:
    """Digest of everything that describes a model and of a few bytes of each of its tensors.

    Two checkpoints with the same digest may share cached KV. Reading every byte would take seconds; a sample of the
    beginning, the middle and the end of each tensor tells fine-tunes apart.
    """
    digest, in_order = hashlib.sha256(header), sorted(tensors, key=lambda tensor: tensor.name)
    for tensor in in_order:
        digest.update(f"{tensor.name} {tensor.shape} {tensor.kind}\n".encode())
        middle = len(tensor.data) // 2
        for part in (tensor.data[:SAMPLE_BYTES], tensor.data[middle : middle + SAMPLE_BYTES], tensor.data[-SAMPLE_BYTES:]):
            digest.update(part.tobytes())
    for tensor in in_order:  # each touch has mapped a good deal around it, of other tensors as well
        let_go(tensor.data)
    return digest.hexdigest()[:16]
