import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.text.detokenize import Detokenizer
from branchline.text.tokenizer import Tokenizer
from tests.support.texts import byte_level_source, byte_level_tokens, sentence_piece_source

TOKENIZERS = {
    "bytes": Tokenizer.from_source(byte_level_source()),
    "pieces": Tokenizer.from_source(sentence_piece_source()),
    "no prefix": Tokenizer.from_source(sentence_piece_source(prefix=False)),
}
KINDS = sorted(TOKENIZERS)


def deltas(tokenizer, ids, **options):
    detokenizer = Detokenizer(tokenizer, **{"skip_special": False, "at_start": True} | options)
    return [*(detokenizer.feed(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip_special", [True, False])
@given(ids=st.lists(st.integers(-1, 320), max_size=20))
def test_deltas_add_up_to_the_whole(kind, skip_special, ids):
    tokenizer = TOKENIZERS[kind]
    whole = tokenizer.decode(ids, skip_special=skip_special)
    assert "".join(deltas(tokenizer, ids, skip_special=skip_special)) == whole


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text("aé你🙂 \n", max_size=8))
def test_no_half_characters_however_they_are_spread(kind, text):
    tokenizer = TOKENIZERS[kind]
    text = text.replace("    ", "")  # a token of its own, which gets a space put behind it and not in front
    ids = tokenizer.encode(text, add_special=False)
    pieces = deltas(tokenizer, ids)
    assert all("\ufffd" not in piece for piece in pieces)
    assert pieces[-1] == ""
    assert "".join(pieces) == text


def test_an_emoji_byte_by_byte():
    ids = TOKENIZERS["bytes"].encode("a🙂b", add_special=False)
    assert len(ids) == 6
    assert deltas(TOKENIZERS["bytes"], ids) == ["a", "", "", "", "🙂", "b", ""]


def test_an_unfinished_character_is_replaced_at_the_end_only():
    detokenizer = Detokenizer(TOKENIZERS["bytes"], skip_special=True)
    ids = TOKENIZERS["bytes"].encode("🙂", add_special=False)
    assert [detokenizer.feed(token) for token in ids[:3]] == ["", "", ""]
    assert detokenizer.is_mid_character
    assert detokenizer.flush() == "\ufffd"
    assert not detokenizer.is_mid_character


def test_special_tokens_do_not_break_a_character():
    tokenizer = TOKENIZERS["bytes"]
    one, *rest = tokenizer.encode("é", add_special=False)
    assert deltas(tokenizer, [one, tokenizer.bos_id, *rest], skip_special=True) == ["", "", "é", ""]


def test_only_the_beginning_of_a_text_loses_its_space():
    tokenizer = TOKENIZERS["pieces"]
    [hello] = tokenizer.encode("hello", add_special=False)
    assert deltas(tokenizer, [hello, hello]) == ["hello", " hello", ""]
    assert deltas(tokenizer, [hello, hello], at_start=False) == [" hello", " hello", ""]


def test_unknown_ids_are_nothing():
    assert deltas(TOKENIZERS["bytes"], [len(byte_level_tokens()), 10**9, -5]) == ["", "", "", ""]
