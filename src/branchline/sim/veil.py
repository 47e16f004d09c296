"""Names for tokens: what a journal stores in place of a prompt.

The scheduler and the prefix cache only ever ask whether two sequences begin alike. So the token at position i is replaced by
a keyed hash of the tokens 0..i: equal beginnings have equal names, and nothing else can be learnt, because the key is drawn
when the journal is opened and never written. (A sum of hashed tokens would be quicker to compute, but it is a substitution
cipher: the difference of two neighbours names the token between them.)

    tokens   464   3139   315   9625          names   h(464)   h(464 3139)   h(464 3139 315)   ...

Names are 8 bytes each. A prompt is cut into pieces of 16; a piece that was written before in the same part of the journal is
written as its number, so what requests share costs next to nothing.

Knows: tokens and names. Refuses to know: files, and why somebody wants names.
"""

import secrets
import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Literal, Protocol, TypeAlias

import msgspec

from branchline.base.errors import require
from branchline.base.ids import TokenId
from branchline.core.request import Namespace, RequestSpec, SamplingParams

NAME_BYTES = 8
PIECE_TOKENS = 16
PIECE_BYTES = PIECE_TOKENS * NAME_BYTES
PIECES_KNOWN = 16384
"""Pieces whose names are remembered, 400 bytes each."""
BEGINNING = bytes(NAME_BYTES)
"""The name before the first token."""
STOP = 0
"""The name of every token that ends a request. Nothing comes after it, so its place in the tree is of no interest."""

Piece: TypeAlias = int | bytes
"""Names, or the number of a whole piece that was written before."""


class Names(Protocol):
    """How tokens are named."""

    kind: Literal["hashed", "text"]

    def after(self, name: bytes, tokens: bytes) -> bytes:
        """Names of ``tokens`` (8 bytes each, as they lie in an ``array("q")``) that follow the token called ``name``."""

    def stop(self, token: TokenId) -> bytes:
        """The name of a token that ends a request."""

    def word(self, word: str) -> str:
        """The name of a tenant, of a user or of a salt."""

    def namespace(self, namespace: Namespace) -> Namespace:
        """Another one; the same for the same."""

    def spec(self, spec: RequestSpec) -> RequestSpec:
        """What is kept of a request besides its prompt."""


class HashedNames:
    """Names that tell only which beginnings are equal."""

    kind: Literal["hashed", "text"] = "hashed"

    def __init__(self, known_tenants: Iterable[str] = (), key: bytes | None = None) -> None:
        """
        Args:
            known_tenants: those that the configuration names, and so the scheduler must know by name.
            key: 16 bytes nobody else knows; drawn by default.
        """
        self._known_tenants = frozenset(known_tenants)
        self._key = secrets.token_bytes(16) if key is None else key

    def after(self, name: bytes, tokens: bytes) -> bytes:
        key, names = self._key, list[bytes]()
        for at in range(0, len(tokens), NAME_BYTES):
            name = blake2b(key + name + tokens[at : at + NAME_BYTES], digest_size=NAME_BYTES).digest()
            names.append(name)
        return b"".join(names)

    def stop(self, token: TokenId) -> bytes:
        return STOP.to_bytes(NAME_BYTES, sys.byteorder)

    def spec(self, spec: RequestSpec) -> RequestSpec:
        """Ids, lengths and numbers. No tokens, no stop strings, no seed; tenant, salt and user under other names."""
        kept = spec.sampling
        return RequestSpec(
            request_id=spec.request_id,
            prompt=(),
            sampling=SamplingParams(
                max_tokens=kept.max_tokens, min_tokens=kept.min_tokens, temperature=kept.temperature, top_k=kept.top_k,
                top_p=kept.top_p, min_p=kept.min_p, repetition_penalty=kept.repetition_penalty,
                presence_penalty=kept.presence_penalty, frequency_penalty=kept.frequency_penalty,
                ignore_eos=kept.ignore_eos, logprobs=kept.logprobs, prompt_logprobs=kept.prompt_logprobs,
            ),
            max_new_tokens=spec.max_new_tokens,
            seed=0,
            eos_token_ids=(STOP,) if spec.stop_ids else (),
            namespace=self.namespace(spec.namespace),
            priority=spec.priority,
            group=spec.group,
            user=self.word(spec.user),
            timeout_s=spec.timeout_s,
        )  # fmt: skip

    def namespace(self, namespace: Namespace) -> Namespace:
        return msgspec.structs.replace(
            namespace, tenant=self.word(namespace.tenant), salt=self.word(namespace.salt)
        )  # fmt: skip

    def word(self, word: str) -> str:
        if not word or word in self._known_tenants:
            return word
        return blake2b(word.encode(), key=self._key, digest_size=NAME_BYTES).hexdigest()


class OwnNames:
    """Every token is called by its own id: a journal that holds the text."""

    kind: Literal["hashed", "text"] = "text"

    def after(self, name: bytes, tokens: bytes) -> bytes:
        return tokens

    def stop(self, token: TokenId) -> bytes:
        return pack_one(token)

    def word(self, word: str) -> str:
        return word

    def namespace(self, namespace: Namespace) -> Namespace:
        return namespace

    def spec(self, spec: RequestSpec) -> RequestSpec:
        return msgspec.structs.replace(spec, prompt=())


def pack(tokens: Sequence[TokenId]) -> bytes:
    """8 bytes a token, in the order of this machine's words."""
    return array("q", tokens).tobytes()


def pack_one(token: TokenId) -> bytes:
    return token.to_bytes(NAME_BYTES, sys.byteorder, signed=True)


def unpack(names: bytes) -> tuple[TokenId, ...]:
    """Names as numbers, which is what the scheduler compares."""
    numbers = array("Q")
    numbers.frombytes(names)
    return tuple(numbers)


class _Known:
    __slots__ = ("names", "number")

    def __init__(self, names: bytes) -> None:
        self.names = names
        self.number: int | None = None


class PieceWriter:
    """Prompts to pieces. Remembers the names of what came before, so that a shared beginning is hashed once."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._known: dict[bytes, _Known] = {}
        self._next_number = 0

    def write(self, tokens: Sequence[TokenId]) -> list[Piece]:
        return [self._refer(piece) for piece in self._pieces(tokens)]

    def last_name(self, tokens: Sequence[TokenId]) -> bytes:
        """The name of the last of ``tokens``."""
        name = BEGINNING
        for piece in self._pieces(tokens):
            name = piece.names[-NAME_BYTES:]
        return name

    def start_part(self) -> None:
        """From now on refer to nothing that was written before."""
        self._next_number = 0
        for piece in self._known.values():
            piece.number = None

    def _pieces(self, tokens: Sequence[TokenId]) -> list[_Known]:
        data, name, pieces = pack(tokens), BEGINNING, list[_Known]()
        for at in range(0, len(data), PIECE_BYTES):
            pieces.append(self._look_up(name, data[at : at + PIECE_BYTES]))
            name = pieces[-1].names[-NAME_BYTES:]
        return pieces

    def _look_up(self, name: bytes, tokens: bytes) -> _Known:
        """Least recently used pieces are forgotten; pieces that are not whole are not remembered."""
        key = name + tokens
        piece = self._known.pop(key, None) or _Known(self._names.after(name, tokens))
        if len(tokens) == PIECE_BYTES:
            self._known[key] = piece
            if len(self._known) > PIECES_KNOWN:
                del self._known[next(iter(self._known))]
        return piece

    def _refer(self, piece: _Known) -> Piece:
        if piece.number is not None:
            return piece.number
        if len(piece.names) == PIECE_BYTES:
            piece.number = self._next_number
            self._next_number += 1
        return piece.names


class PieceReader:
    """Pieces to prompts."""

    def __init__(self) -> None:
        self._known: list[bytes] = []

    def read(self, pieces: Sequence[Piece]) -> tuple[TokenId, ...]:
        """Raises InvariantBroken: a number nobody has written."""
        names = []
        for piece in pieces:
            if isinstance(piece, bytes):
                names.append(piece)
                if len(piece) == PIECE_BYTES:
                    self._known.append(piece)
            else:
                require(0 <= piece < len(self._known), "the journal refers to a piece that it does not hold")
                names.append(self._known[piece])
        return unpack(b"".join(names))

    def start_part(self) -> None:
        self._known.clear()
