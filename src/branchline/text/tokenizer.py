"""Text to token ids and back to bytes, for every kind of vocabulary alike.

Three promises. ``token_bytes`` is exact: the bytes of a text's tokens, joined, are the bytes of the text. Text of a
completion may spell special tokens (they are parsed). Text of a chat message may not: :meth:`Tokenizer.guard` breaks
every such spelling, and :meth:`Tokenizer.encode` then takes it for plain text.

Safe to use from several threads. Refuses to know: templates and requests.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Mapping

from branchline.base.errors import InvalidRequest
from branchline.base.ids import TokenId
from branchline.models.checkpoint import TokenizerSource
from branchline.text.vocabulary import GUARD, Vocabulary, load_vocabulary

_REPLACEMENT = "\ufffd"


class Tokenizer:
    def __init__(self, vocabulary: Vocabulary, source: TokenizerSource) -> None:
        self._vocabulary = vocabulary
        self._encoder = vocabulary.encoder
        self._data = vocabulary.data
        self.vocab_size = len(self._data)
        """Ids that stand for a token are below this number; the embedding table may have more rows."""
        self.special_ids = frozenset(token for token in vocabulary.special_ids if token < self.vocab_size)
        self.bos_id = self._known(source.bos_token_id)
        self.eos_ids = tuple(token for token in dict.fromkeys(source.eos_token_ids) if token < self.vocab_size)
        self._pad_id = self._known(source.pad_token_id)
        self._spellings = _Spellings(self.token_text(token) for token in self.special_ids)

    @classmethod
    def from_source(cls, source: TokenizerSource) -> "Tokenizer":
        """Raises ModelError if the material cannot be used."""
        return cls(load_vocabulary(source), source)

    def encode(self, text: str, *, add_special: bool) -> list[TokenId]:
        """Token ids of ``text``; special tokens spelled in it are parsed unless guarded.

        ``add_special`` adds what the model wants around every text, BOS as a rule.

        Raises:
            InvalidRequest: the text holds half of a surrogate pair.
        """
        check_characters(text)
        add_bos = self._vocabulary.add_bos
        # The batch call, unlike the one for a single text, runs without the interpreter's lock and computes no offsets.
        encoding = self._encoder.encode_batch_fast([text], add_special_tokens=add_special and add_bos is None)[0]
        tokens: list[TokenId] = encoding.ids
        if add_special and add_bos and self.bos_id is not None:
            tokens.insert(0, self.bos_id)
        return tokens

    def guard(self, text: str) -> str:
        """``text`` with every spelling of a special token broken by a character that ``encode`` ignores.

        A spelling that may be completed by what follows the text is broken too.
        """
        return self._spellings.guard(clean(text))

    def token_bytes(self, token: TokenId) -> bytes:
        """Bytes of a token; empty for an id that is none."""
        return self._data[token] if 0 <= token < self.vocab_size else b""

    def token_text(self, token: TokenId) -> str:
        """The token by itself, for people: bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def decode(self, tokens: Iterable[TokenId], *, skip_special: bool) -> str:
        """Text of a whole sequence, from its beginning."""
        skipped = self.special_ids if skip_special else frozenset()
        text = b"".join(self.token_bytes(token) for token in tokens if token not in skipped).decode("utf-8", "replace")
        return text[1:] if self.strips_space and text.startswith(" ") else text

    @property
    def strips_space(self) -> bool:
        """The first space of a text is the encoder's addition; ``decode`` takes it off."""
        return self._vocabulary.strips_space

    @property
    def variables(self) -> Mapping[str, str]:
        """Names that chat templates know special tokens by."""
        ids = {"bos_token": self.bos_id, "eos_token": next(iter(self.eos_ids), None), "pad_token": self._pad_id}
        return {name: self.token_text(token) for name, token in ids.items() if token is not None}

    def _known(self, token: TokenId | None) -> TokenId | None:
        return token if token is not None and 0 <= token < self.vocab_size else None


class _Spellings:
    """The texts of special tokens, found in time linear in the text searched, however many there are."""

    def __init__(self, texts: Iterable[str]) -> None:
        whole = {text for text in texts if len(text) > 1}
        self._beginnings = frozenset(text[:end] for text in whole for end in range(1, len(text)))
        self._longest = max((len(text) for text in whole), default=0)
        rests: dict[str, set[str]] = {}
        for text in whole:
            rests.setdefault(text[0], set()).add(text[1:])
        # Only the first character is consumed, so that a spelling that begins inside another is found as well.
        heads = [f"{re.escape(first)}(?={_any_of(rest)})" for first, rest in rests.items()]
        self._pattern = re.compile("|".join(heads) or r"(?!)")

    def guard(self, text: str) -> str:
        guarded = self._pattern.sub(rf"\g<0>{GUARD}", text)
        return guarded + GUARD if self._ends_open(text) else guarded

    def _ends_open(self, text: str) -> bool:
        return any(text[-length:] in self._beginnings for length in range(1, min(self._longest, len(text) + 1)))


def _any_of(texts: Collection[str]) -> str:
    """A pattern for the beginning of any of ``texts`` that decides once per branching character, not once per text."""
    if "" in texts:
        return ""
    common = _common_beginning(min(texts), max(texts))
    if common:
        return re.escape(common) + _any_of({text[len(common) :] for text in texts})
    branches = [_any_of([text for text in texts if text[0] == first]) for first in sorted({text[0] for text in texts})]
    return f"(?:{'|'.join(branches)})"


def _common_beginning(one: str, other: str) -> str:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(char for char, _ in same)


def clean(text: str) -> str:
    """Client text without the guard character, which is a noncharacter and means nothing to anybody else."""
    return text.replace(GUARD, _REPLACEMENT)


def check_characters(text: str) -> None:
    """Raise InvalidRequest if ``text`` cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("The text holds half of a surrogate pair, which is not a character.") from error
