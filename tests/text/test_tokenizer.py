import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from branchline.base.errors import InvalidRequest, ModelError
from branchline.models.checkpoint import TokenizerSource
from branchline.text.pretokenize import RULES, word_rule
from branchline.text.tokenizer import Tokenizer
from branchline.text.vocabulary import GUARD
from tests.support.texts import (
    CALL,
    END,
    MERGES,
    START,
    byte_level_json,
    byte_level_source,
    byte_level_tokens,
    edited_json,
    sentence_piece_oracle,
    sentence_piece_source,
)

BYTE_LEVEL = Tokenizer.from_source(byte_level_source())
PIECES = {prefix: Tokenizer.from_source(sentence_piece_source(prefix)) for prefix in (True, False)}
COUNT = len(byte_level_tokens())
TEXTS = st.lists(
    st.sampled_from(["hello", " world", "ll", "'s", "  ", "\n", "12", "é", "🙂", "你", "<|", START, END, CALL, "<|im_"])
    | st.text(max_size=3),
    max_size=8,
).map("".join)


def without(text, *parts):
    for part in parts:
        text = text.replace(part, "")
    return text


# ------------------------------------------------------------------------------------------------ byte-level


def test_merges_and_special_tokens_are_found():
    tokens = byte_level_tokens()
    ids = BYTE_LEVEL.encode(f"hello world{END}", add_special=True)
    assert [tokens[token] for token in ids] == ["hello", "Ġworld", END]


@given(TEXTS)
def test_byte_level_agrees_with_a_tokenizer_json_of_the_same_vocabulary(text):
    oracle = tokenizers.Tokenizer.from_str(byte_level_json([START, END, CALL]))
    text = without(text, GUARD)
    assert BYTE_LEVEL.encode(text, add_special=True) == oracle.encode(text).ids


@given(TEXTS)
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(text):
    text = without(text, GUARD)
    ids = BYTE_LEVEL.encode(text, add_special=False)
    assert b"".join(BYTE_LEVEL.token_bytes(token) for token in ids) == text.encode()
    assert BYTE_LEVEL.decode(ids, skip_special=False) == text


def test_every_byte_has_its_token():
    assert sorted(BYTE_LEVEL.token_bytes(token) for token in range(256)) == [bytes([byte]) for byte in range(256)]


def test_bos_is_added_only_if_asked_and_wanted():
    wanting = Tokenizer.from_source(byte_level_source(add_bos=True))
    plain = BYTE_LEVEL.encode("hello", add_special=True)
    assert wanting.encode("hello", add_special=True) == [wanting.bos_id, *plain]
    assert wanting.encode("hello", add_special=False) == plain
    assert Tokenizer.from_source(byte_level_source(pre="llama-bpe", add_bos=None)).encode("", add_special=True)


def test_a_whole_word_goes_before_merges_where_the_rule_says_so():
    source = byte_level_source(pre="llama-bpe", add_bos=False)
    source.metadata["tokenizer.ggml.merges"] = [merge for merge in MERGES if merge != "hell o"]
    [token] = Tokenizer.from_source(source).encode("hello", add_special=True)
    assert byte_level_tokens()[token] == "hello"


def test_words_are_cut_as_the_named_rule_says():
    def words(name, text):
        return [word.replace("Ġ", " ") for word, _ in word_rule(name).pre_tokenizer.pre_tokenize_str(text)]

    text = "it'S x12345 abcDEF /a"
    assert words("gpt-2", text) == ["it", "'", "S", " x", "12345", " abcDEF", " /", "a"]
    assert words("smollm", text) == ["it", "'", "S", " x", "1", "2", "3", "4", "5", " abcDEF", " /", "a"]
    assert words("llama-bpe", text) == ["it", "'S", " x", "123", "45", " abcDEF", " /", "a"]
    assert words("qwen2", text) == ["it", "'S", " x", "1", "2", "3", "4", "5", " abcDEF", " /", "a"]
    assert words("tekken", text) == ["it", "'S", " x", "1", "2", "3", "4", "5", " abc", "DEF", " /", "a"]
    assert words("default", text) == ["it", "'", "S", " x", "123", "45", " abcDEF", " ", "/", "a"]


@pytest.mark.parametrize("name", sorted(RULES))
def test_no_rule_loses_or_doubles_a_byte(name):
    tokenizer = Tokenizer.from_source(byte_level_source(pre=name, add_bos=False))
    text = "Don't  stop\n\n\t 12345 ÀÉ 你好🙂 a/b\r\n (x|y).  "
    assert tokenizer.decode(tokenizer.encode(text, add_special=True), skip_special=False) == text


def test_long_runs_take_linear_time():
    started = time.perf_counter()
    for char in " \na1!":
        BYTE_LEVEL.encode(char * 100_000, add_special=False)
    assert time.perf_counter() - started < 10


def test_padding_at_the_end_of_the_vocabulary_is_no_token():
    source = byte_level_source()
    source.metadata["tokenizer.ggml.tokens"] += ["[PAD0]", "[PAD1]"]
    source.metadata["tokenizer.ggml.token_type"] += [5, 5]
    tokenizer = Tokenizer.from_source(source)
    assert tokenizer.vocab_size == COUNT
    assert tokenizer.token_bytes(COUNT) == tokenizer.token_bytes(-1) == b""


def test_template_variables_and_special_ids():
    assert BYTE_LEVEL.variables == {"bos_token": START, "eos_token": END}
    assert BYTE_LEVEL.special_ids == {COUNT - 3, COUNT - 2}
    assert BYTE_LEVEL.eos_ids == (COUNT - 2,)
    assert BYTE_LEVEL.decode([COUNT - 3, 72, COUNT - 2, COUNT - 1], skip_special=True) == "H" + CALL


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(InvalidRequest, match="surrogate"):
        BYTE_LEVEL.encode("\ud800", add_special=True)


def test_many_threads_may_encode():
    texts = [f"hello {n} world" * 50 for n in range(40)]
    expected = [BYTE_LEVEL.encode(text, add_special=True) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: BYTE_LEVEL.encode(text, add_special=True), texts)) == expected


# ------------------------------------------------------------------------------------------------ guarded text


@given(TEXTS)
def test_guarded_text_is_text_and_nothing_else(text):
    guarded = BYTE_LEVEL.guard(text)
    ids = BYTE_LEVEL.encode(guarded, add_special=False)
    assert BYTE_LEVEL.special_ids.isdisjoint(ids)
    assert BYTE_LEVEL.decode(ids, skip_special=False) == text.replace(GUARD, "\ufffd")
    if START not in text and END not in text:
        assert ids == BYTE_LEVEL.encode(text.replace(GUARD, "\ufffd"), add_special=False)


@given(TEXTS, TEXTS)
def test_two_guarded_texts_cannot_be_joined_to_a_special_token(one, other):
    ids = BYTE_LEVEL.encode(BYTE_LEVEL.guard(one) + BYTE_LEVEL.guard(other), add_special=False)
    assert BYTE_LEVEL.special_ids.isdisjoint(ids)


def test_guarded_spelling_is_cut_like_any_other_text():
    plain = tokenizers.Tokenizer.from_str(byte_level_json([]))
    text = f"say {END} <{START}>"
    assert BYTE_LEVEL.encode(BYTE_LEVEL.guard(text), add_special=False) == plain.encode(text).ids


def test_markup_is_special_whatever_its_type_and_tools_are_not():
    source = byte_level_source()
    source.metadata["tokenizer.ggml.token_type"][-3:] = [4, 4, 4]
    tokenizer = Tokenizer.from_source(source)
    assert tokenizer.special_ids == {COUNT - 3, COUNT - 2}
    assert tokenizer.encode(tokenizer.guard(CALL), add_special=False) == [COUNT - 1]


def test_guarding_is_quick_with_thousands_of_special_tokens():
    source = byte_level_source()
    source.metadata["tokenizer.ggml.tokens"] += [f"<unused{n}>" for n in range(6000)]
    source.metadata["tokenizer.ggml.token_type"] += [3] * 6000
    tokenizer = Tokenizer.from_source(source)
    started = time.perf_counter()
    guarded = tokenizer.guard("<unused59" * 100_000)
    assert time.perf_counter() - started < 5
    assert tokenizer.guard("<unused5999>") == f"<{GUARD}unused5999>"
    assert guarded.endswith(GUARD)


# ------------------------------------------------------------------------------------------------ tokenizer.json


def json_source(text, **fields):
    return TokenizerSource(tokenizer_json=text, bos_token_id=COUNT - 3, eos_token_ids=(COUNT - 2,), **fields)


@pytest.mark.parametrize("normalized", [False, True])
@given(text=TEXTS)
def test_tokenizer_json_is_used_as_it_is(normalized, text):
    spec = byte_level_json([START, END, CALL], normalized=normalized)
    text = without(text, GUARD)
    tokenizer, oracle = Tokenizer.from_source(json_source(spec)), tokenizers.Tokenizer.from_str(spec)
    ids = tokenizer.encode(text, add_special=True)
    assert ids == oracle.encode(text).ids
    assert tokenizer.decode(ids, skip_special=False) == oracle.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.special_ids == {COUNT - 3, COUNT - 2}


@pytest.mark.parametrize("normalized", [False, True])
@given(text=TEXTS)
def test_guard_holds_for_tokenizer_json(normalized, text):
    tokenizer = Tokenizer.from_source(json_source(byte_level_json([START, END, CALL], normalized=normalized)))
    ids = tokenizer.encode(tokenizer.guard(text), add_special=False)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert tokenizer.decode(ids, skip_special=False) == text.replace(GUARD, "\ufffd")


def test_post_processor_decides_about_bos_unless_the_source_does():
    oracle = tokenizers.Tokenizer.from_str(byte_level_json([START, END]))
    oracle.post_processor = tokenizers.processors.TemplateProcessing(f"{START} $A", special_tokens=[(START, COUNT - 3)])
    oracle.enable_truncation(2)
    text = oracle.to_str()
    ids = Tokenizer.from_source(json_source(text)).encode("hello world hello", add_special=True)
    assert ids[0] == COUNT - 3
    assert len(ids) > 2  # truncation belongs to training
    assert Tokenizer.from_source(json_source(text, add_bos=False)).encode("hello", add_special=True) == ids[1:2]
    assert Tokenizer.from_source(json_source(text, add_bos=True)).encode("hello", add_special=True) == ids[:2]


def llama_json(decoder, pre_tokenizer=None, normalizer=None):
    vocab = {text: token for token, text in enumerate(sentence_piece_source().metadata["tokenizer.ggml.tokens"])}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.decoder = decoder
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    made.add_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return made.to_str()


LLAMA_JSON = {
    "legacy": llama_json(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    ),
    "no prefix": llama_json(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        normalizer=normalizers.Replace(" ", "▁"),
    ),
    "first": llama_json(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
    ),
}


@pytest.mark.parametrize("kind", sorted(LLAMA_JSON))
@given(text=st.text("ab hello.é🙂", max_size=12))
def test_sentence_piece_json_round_trips_as_the_library_does(kind, text):
    tokenizer = Tokenizer.from_source(TokenizerSource(tokenizer_json=LLAMA_JSON[kind]))
    oracle = tokenizers.Tokenizer.from_str(LLAMA_JSON[kind])
    ids = tokenizer.encode(text, add_special=True)
    assert ids == oracle.encode(text).ids
    assert tokenizer.decode(ids, skip_special=True) == oracle.decode(ids)


# ------------------------------------------------------------------------------------------------ SentencePiece


@pytest.mark.parametrize("prefix", [True, False])
@given(
    text=st.lists(st.sampled_from(["the", "a", " ", "hell", "o w", "é", "🙂", "z", "ing", "orld"]), max_size=8).map("".join)
)
def test_sentence_piece_merges_by_score(prefix, text):
    text = without(text, "    ")  # a token of its own
    expected = sentence_piece_oracle(sentence_piece_source(prefix), text)
    ids = PIECES[prefix].encode(text, add_special=False)
    assert ids == expected
    assert PIECES[prefix].decode(ids, skip_special=True) == text


def test_sentence_piece_specials():
    tokenizer = PIECES[True]
    ids = tokenizer.encode("hello</s>", add_special=True)
    assert [tokenizer.token_text(token) for token in ids] == ["<s>", " hello", "</s>"]
    assert tokenizer.decode(ids, skip_special=True) == "hello"
    assert tokenizer.decode(ids, skip_special=False) == "<s> hello</s>"
    users = tokenizer.encode("<start_of_turn>    ", add_special=False)
    assert [tokenizer.token_bytes(token) for token in users] == [b"<start_of_turn>", b"    "]
    assert users[0] in tokenizer.special_ids
    assert users[1] not in tokenizer.special_ids


def test_sentence_piece_bytes():
    tokenizer = PIECES[True]
    assert tokenizer.token_bytes(3 + 0x0A) == b"\n"
    assert tokenizer.token_bytes(3 + 0xFF) == b"\xff"
    assert tokenizer.token_text(3 + 0xFF) == "\ufffd"


# ------------------------------------------------------------------------------------------------ bad material


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (TokenizerSource(), "no tokenizer"),
        (TokenizerSource(tokenizer_json="{"), "tokenizer.json"),
        (TokenizerSource(tokenizer_json="[]"), "tokenizer.json"),
        (TokenizerSource(tokenizer_json=edited_json(byte_level_json([]), decoder=None)), "neither"),
        (TokenizerSource(metadata={}), "0 tokens"),
        (TokenizerSource(metadata={"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]}), "'bert'"),
        (TokenizerSource(metadata={"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"]}), "0 scores"),
        (byte_level_source(pre="martian"), "'martian'"),
        (
            TokenizerSource(
                metadata={
                    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": ["a b"]
                }
            ),
            "do not fit",
        ),
    ],
)  # fmt: skip
def test_useless_material_is_one_sentence(source, words):
    with pytest.raises(ModelError, match=words) as caught:
        Tokenizer.from_source(source)
    assert "\n" not in str(caught.value)
