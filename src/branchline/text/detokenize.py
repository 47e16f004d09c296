"""Token ids in, text out, a token at a time and never half a character.

The text of a sequence is defined by bytes: those of its tokens, joined, decoded as UTF-8. Whatever way the tokens
arrive, the pieces returned add up to exactly that. Refuses to know: stop strings (``stops``).
"""

import codecs

from branchline.base.ids import TokenId
from branchline.text.tokenizer import Tokenizer

_DECODER = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of a continuation; with ``at_start`` of a whole text, as ``Tokenizer.decode`` gives it."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool, at_start: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = _DECODER("replace")
        self._drops_space = at_start and tokenizer.strips_space

    def feed(self, token: TokenId) -> str:
        """The characters that ``token`` completes. Bytes of an unfinished one are kept for later."""
        if token in self._skipped:
            return ""
        return self._without_first_space(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def flush(self) -> str:
        """The end: an unfinished character becomes U+FFFD."""
        return self._without_first_space(self._decoder.decode(b"", final=True))

    @property
    def is_mid_character(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def _without_first_space(self, text: str) -> str:
        if not self._drops_space or not text:
            return text
        self._drops_space = False
        return text.removeprefix(" ")
