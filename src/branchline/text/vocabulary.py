"""Raw tokenizer material in, a working ``tokenizers`` object and a table of bytes out.

Two ways in: the text of a ``tokenizer.json`` (what ``tokenizers`` reads, unchanged), or GGUF metadata, from which
byte-level BPE (``gpt2``) or the SentencePiece kind (``llama``) is built as transformers' GGUF converters do.
Refuses to know: prompts, templates and who asks (``tokenizer`` does).

Special tokens in text that must not be parsed are broken up with a guard character (see ``GUARD``), which the
objects built here take out again after special tokens were looked for and before the text is cut into words.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers

from branchline.base.errors import ModelError
from branchline.models.checkpoint import TokenizerSource
from branchline.text.pretokenize import word_rule

GUARD = "\ufdd0"
"""A Unicode noncharacter: kept for a program's own use, never a character of a text."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # GGUF's tokenizer.ggml.token_type
_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MARKUP = re.compile(r"<[|｜].*[|｜]>|<(?:start|end)_of_turn>")
"""User-defined tokens that steer a chat as control tokens do, whatever their type in the file says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Everything about a tokenizer that is fixed when it is loaded."""

    encoder: tokenizers.Tokenizer
    """Parses special tokens, except where ``GUARD`` breaks them; ignores ``GUARD``."""
    data: tuple[bytes, ...]
    """Bytes of each id; empty for ids that stand for nothing."""
    special_ids: frozenset[int]
    """Control tokens: left out of the text on request, never parsed from the text of a chat message."""
    add_bos: bool | None
    """Put BOS in front; ``None``: the encoder's own post-processor knows."""
    strips_space: bool
    """The decoder takes one space off the beginning of a text, because the encoder put one there."""


def load_vocabulary(source: TokenizerSource) -> Vocabulary:
    """Raises ModelError in one sentence if there is no material or it makes no sense."""
    if source.tokenizer_json is not None:
        return _from_json(source.tokenizer_json, source)
    if source.metadata is not None:
        return _from_gguf(source.metadata, source)
    raise ModelError("the model brings no tokenizer")


# ------------------------------------------------------------------------------------------------ GGUF


def _from_gguf(metadata: Mapping[str, Any], source: TokenizerSource) -> Vocabulary:
    kind = metadata.get("tokenizer.ggml.model")
    texts = [str(text) for text in metadata.get("tokenizer.ggml.tokens", ())]
    types = list(metadata.get("tokenizer.ggml.token_type", ())) or [_NORMAL] * len(texts)
    if not texts or len(types) != len(texts):
        raise ModelError(f"the model's vocabulary has {len(texts)} tokens but {len(types)} token types")
    if kind == "gpt2":
        return _byte_level(metadata, source, texts, types)
    if kind == "llama":
        return _sentence_piece(metadata, source, texts, types)
    raise ModelError(f"the model's tokenizer is of kind {kind!r}; this engine knows 'gpt2' and 'llama'")


def _byte_level(metadata: Mapping[str, Any], source: TokenizerSource, texts: list[str], types: list[int]) -> Vocabulary:
    rule = word_rule(str(metadata.get("tokenizer.ggml.pre", "default")))
    merges = [_merge(line) for line in metadata.get("tokenizer.ggml.merges", ())]
    encoder = _encoder({text: token for token, text in enumerate(texts)}, merges, ignore_merges=rule.ignore_merges)
    encoder.normalizer = normalizers.Sequence([normalizers.Replace(GUARD, ""), *rule.normalizers])
    encoder.pre_tokenizer = rule.pre_tokenizer
    special_ids = _add_tokens(encoder, source, texts, types)
    return Vocabulary(
        encoder=encoder,
        data=tuple(
            text.encode() if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN) else byte_level_data(text)
            for text, kind in _usable(texts, types)
        ),
        special_ids=special_ids,
        add_bos=rule.add_bos if source.add_bos is None else source.add_bos,
        strips_space=False,
    )


def _sentence_piece(metadata: Mapping[str, Any], source: TokenizerSource, texts: list[str], types: list[int]) -> Vocabulary:
    scores = list(metadata.get("tokenizer.ggml.scores", ()))
    if len(scores) != len(texts):
        raise ModelError(f"the model's vocabulary has {len(texts)} tokens but {len(scores)} scores")
    unknown = int(metadata.get("tokenizer.ggml.unknown_token_id", 0))
    vocab = {text: token for token, text in enumerate(texts)}
    encoder = _encoder(
        vocab,
        merges_from_scores(texts, types, scores),
        unk_token=texts[unknown] if unknown < len(texts) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    encoder.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(GUARD, ""),
            *([normalizers.Prepend(_SPACE)] if prefix else []),
            normalizers.Replace(" ", _SPACE),
        ]
    )
    special_ids = _add_tokens(encoder, source, texts, types)
    return Vocabulary(
        encoder=encoder,
        data=tuple(
            text.encode() if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN) else sentence_piece_data(text, kind == _BYTE)
            for text, kind in _usable(texts, types)
        ),
        special_ids=special_ids,
        add_bos=True if source.add_bos is None else source.add_bos,
        strips_space=prefix,
    )


def _encoder(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"the model's vocabulary and merges do not fit together: {error}") from error


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right


def merges_from_scores(texts: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose union has the best score. BPE wants that as a ranked list of pairs:
    every way to cut a piece into two pieces, by falling score of the piece."""
    pieces = {text for text, kind in zip(texts, types, strict=True) if kind in (_NORMAL, _UNUSED)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for text, kind, score in zip(texts, types, scores, strict=True):
        if kind not in (_NORMAL, _UNUSED):
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in pieces and right in pieces:
                ranked.append((score, len(left), len(right), left, right))
    ranked.sort(key=lambda item: item[:3], reverse=True)
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(
    encoder: tokenizers.Tokenizer, source: TokenizerSource, texts: Sequence[str], types: Sequence[int]
) -> frozenset[int]:
    """Teach ``encoder`` the tokens that are looked for before anything else; the ids of the special ones."""
    steering = _steering(source)
    added: list[AddedToken] = []
    special_ids: set[int] = set()
    for token, (text, kind) in enumerate(zip(texts, types, strict=True)):
        is_special = kind in (_CONTROL, _UNKNOWN) or token in steering or (kind == _USER_DEFINED and _is_markup(text))
        if is_special:
            special_ids.add(token)
        if text and (is_special or kind == _USER_DEFINED):
            added.append(AddedToken(text, special=is_special, normalized=False))
    encoder.add_tokens(added)
    return frozenset(special_ids)


def _steering(source: TokenizerSource) -> frozenset[int]:
    ids = {source.bos_token_id, source.pad_token_id, *source.eos_token_ids}
    return frozenset(token for token in ids if token is not None)


def _is_markup(text: str) -> bool:
    return _MARKUP.fullmatch(text) is not None


def _usable(texts: list[str], types: list[int]) -> Iterator[tuple[str, int]]:
    """Tokens without the padding at the end of the table."""
    end = len(texts)
    while end and types[end - 1] == _UNUSED:
        end -= 1
    return zip(texts[:end], types[:end], strict=True)


# ------------------------------------------------------------------------------------------------ tokenizer.json


def _from_json(text: str, source: TokenizerSource) -> Vocabulary:
    try:
        spec = json.loads(text)
        decoder = list(_parts(spec.get("decoder"), "decoders"))
        encoder = tokenizers.Tokenizer.from_str(json.dumps(_guarded(spec)))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"the model's tokenizer.json cannot be used: {error}") from error
    encoder.no_truncation()
    encoder.no_padding()
    added = {int(token["id"]): token for token in spec.get("added_tokens") or ()}
    is_byte_level = any(part["type"] == "ByteLevel" for part in decoder)
    if not is_byte_level and not any(part["type"] in ("Metaspace", "ByteFallback") for part in decoder):
        raise ModelError("the model's tokenizer.json is neither byte-level nor of the SentencePiece kind")
    return Vocabulary(
        encoder=encoder,
        data=_json_data(encoder.get_vocab(with_added_tokens=True), added, is_byte_level),
        special_ids=_steering(source)
        | {token for token, entry in added.items() if entry["special"] or _is_markup(entry["content"])},
        add_bos=source.add_bos,
        strips_space=not is_byte_level and any(_strips_space(part) for part in decoder),
    )


def _json_data(vocab: Mapping[str, int], added: Mapping[int, Any], is_byte_level: bool) -> tuple[bytes, ...]:
    data = [b""] * (1 + max(vocab.values(), default=-1))
    for text, token in vocab.items():
        if is_byte_level:
            data[token] = text.encode() if token in added else byte_level_data(text)
        else:
            data[token] = sentence_piece_data(text, token not in added)
    return tuple(data)


def _parts(spec: Any, children: str) -> Iterator[Mapping[str, Any]]:
    """A decoder or normalizer, or those in its sequence."""
    if spec is None:
        return
    if spec["type"] == "Sequence":
        for child in spec[children]:
            yield from _parts(child, children)
    else:
        yield spec


def _strips_space(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Metaspace":
        return part.get("prepend_scheme", "always") != "never" and part.get("add_prefix_space", True) is not False
    return part["type"] == "Strip" and part.get("content") == " " and part.get("start", 0) > 0


def _guarded(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The same tokenizer, but ``GUARD`` goes before words are cut.

    Special tokens that are looked for in normalized text would be whole again if the normalizer took the guard out:
    there the pre-tokenizer does it, at the price of cutting a word where the guard was.
    """
    late = any(token["special"] and token.get("normalized", False) for token in spec.get("added_tokens") or ())
    if late:
        step = {"type": "Split", "pattern": {"String": GUARD}, "behavior": "Removed", "invert": False}
        return {**spec, "pre_tokenizer": _before(step, spec.get("pre_tokenizer"), "pretokenizers")}
    step = {"type": "Replace", "pattern": {"String": GUARD}, "content": ""}
    return {**spec, "normalizer": _before(step, spec.get("normalizer"), "normalizers")}


def _before(step: dict[str, Any], rest: Any, children: str) -> dict[str, Any]:
    return {"type": "Sequence", children: [step] if rest is None else [step, rest]}


# ------------------------------------------------------------------------------------------------ bytes of a token


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's letters for the 256 bytes (Radford et al. 2019), as a translation table from letter to Latin-1."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: byte for byte in printable} | {byte: 256 + index for index, byte in enumerate(others)}
    return {letter: chr(byte) for byte, letter in letters.items()}


_FROM_ALPHABET = _byte_alphabet()


def byte_level_data(text: str) -> bytes:
    """Bytes of a token spelled in GPT-2's byte alphabet."""
    try:
        return text.translate(_FROM_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()  # not spelled in the alphabet: a token added later


def sentence_piece_data(text: str, may_be_byte: bool) -> bytes:
    """Bytes of a SentencePiece token: ``<0x0A>`` is one byte, ``▁`` is a space."""
    match = _BYTE_TOKEN.fullmatch(text) if may_be_byte else None
    return bytes.fromhex(match[1]) if match else text.replace(_SPACE, " ").encode()
