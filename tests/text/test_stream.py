import itertools

from hypothesis import given
from hypothesis import strategies as st

from branchline.base.finish import FinishReason
from branchline.core.result import Finish, Usage
from branchline.text.stream import TextStream
from branchline.text.tokenizer import Tokenizer
from branchline.wire.messages import Delta, Ended
from tests.support.texts import byte_level_source, generate, news

TOKENIZER = Tokenizer.from_source(byte_level_source())
EOS = TOKENIZER.eos_ids[0]
BOS = TOKENIZER.bos_id


def encode(text):
    return TOKENIZER.encode(text, add_special=False)


def letters(text):
    """One token per byte, whatever merges there are."""
    return [token for char in text for byte in [char.encode()] for token in byte_tokens(byte)]


def byte_tokens(data):
    return [next(token for token in range(256) if TOKENIZER.token_bytes(token) == bytes([byte])) for byte in data]


def run(batches, finish=FinishReason.LENGTH, logprobs=False, **fields):
    """Everything a stream says about ``batches`` of tokens, the last of which comes with ``finish``."""
    if logprobs:
        fields["sampling"] = fields.get("sampling", {}) | {"logprobs": 1}
    stream = TextStream(TOKENIZER, generate(**fields), (72,))
    said = []
    for number, tokens in enumerate(batches):
        last = finish if number == len(batches) - 1 else None
        [output] = news("r", tokens, finish=last, logprobs=logprobs).outputs
        item = stream.hear(output)
        if item is not None:
            said.append(item)
    return said


def text_of(said):
    return "".join(item.text for item in said)


def split(tokens, places):
    edges = [0, *sorted(place % (len(tokens) + 1) for place in places), len(tokens)]
    return [tokens[start:end] for start, end in itertools.pairwise(edges)]


# R100, R101, R103 of the fault catalogue ------------------------------------------------------------


def test_a_stop_spread_over_tokens_leaks_nothing():
    said = run([letters("abc DEF"), letters("G"), letters("HI"), letters("Jx")], sampling={"stop": ("DEFGHIJ",)})
    assert text_of(said) == "abc "
    assert said[-1].reason is FinishReason.STOP
    assert said[-1].stop == "DEFGHIJ"


def test_a_stop_inside_a_token_cuts_the_token():
    [ended] = run([encode("hello")], sampling={"stop": ("ll",)})
    assert (ended.text, ended.usage.completion_tokens) == ("he", 1)


def test_only_a_true_beginning_is_held_back():
    said = run([[token] for token in letters("abcd")], sampling={"stop": ("x" * 40, "cx")})
    assert [item.text for item in said] == ["a", "b", "cd"]
    said = run([[token] for token in letters("abcde")], sampling={"stop": ("x" * 40, "cx")})
    assert [item.text for item in said] == ["a", "b", "cd", "e"]


# counting -------------------------------------------------------------------------------------------


def test_a_token_is_reported_with_its_first_character():
    said = run([[token] for token in letters("a🙂b")], logprobs=True)
    assert [(item.text, item.token_count, len(item.logprobs)) for item in said] == [("a", 1, 1), ("🙂", 4, 4), ("b", 1, 1)]
    assert [row.data for item in said for row in item.logprobs] == [b"a", b"\xf0", b"\x9f", b"\x99", b"\x82", b"b"]


def test_tokens_without_text_are_reported_at_once():
    said = run([[BOS], letters("a")])
    assert [(item.text, item.token_count) for item in said] == [("", 1), ("a", 1)]


def test_usage_of_a_stop_ends_with_the_token_that_completes_it():
    said = run([letters("ab"), letters("STOPcd")], sampling={"stop": ("STOP",)}, logprobs=True)
    ended = said[-1]
    assert text_of(said) == "ab"
    assert ended.usage.completion_tokens == 6
    assert sum(item.token_count for item in said) == 6
    assert [row.text for item in said for row in item.logprobs] == ["a", "b"]


def test_an_included_stop_keeps_its_text_and_rows():
    said = run([letters("abSTOPcd")], sampling={"stop": ("STOP",)}, include_stop=True, logprobs=True)
    assert text_of(said) == "abSTOP"
    assert [row.text for item in said for row in item.logprobs] == list("abSTOP")


def test_a_longer_stop_that_did_not_come_does_not_count():
    said = run([letters("a\nb")], sampling={"stop": ("\n", "\n\n")})
    assert (text_of(said), said[-1].usage.completion_tokens, said[-1].stop) == ("a", 2, "\n")


def test_a_stop_in_waiting_ends_a_request_that_ran_out_of_length():
    said = run([letters("a\n")], sampling={"stop": ("\n", "\n\n")})
    assert (text_of(said), said[-1].reason, said[-1].stop) == ("a", FinishReason.STOP, "\n")
    said = run([letters("a\n")], finish=FinishReason.ERROR, sampling={"stop": ("\n", "\n\n")})
    assert (text_of(said), said[-1].reason, said[-1].stop) == ("a", FinishReason.ERROR, None)


def test_stops_are_not_searched_in_the_first_min_tokens():
    said = run([letters("x.y.z.w")], sampling={"stop": (".",), "min_tokens": 4})
    assert text_of(said) == "x.y.z"


# the token that ends it -----------------------------------------------------------------------------


def stop_at(token):
    return Finish(FinishReason.STOP, Usage(cached_tokens=3), stop_token=token)


def test_the_stop_token_counts_and_has_a_row_but_no_text():
    dot = encode(".")[0]
    for token in (EOS, dot):
        [ended] = run([[*encode("hello"), token]], finish=stop_at(token), logprobs=True, skip_special_tokens=False)
        assert (ended.text, ended.token_count, len(ended.logprobs), ended.stop) == ("hello", 2, 2, token)
        assert ended.usage == Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=3)


def test_the_stop_token_is_kept_on_request():
    dot = encode(".")[0]
    [ended] = run([[*encode("hello"), dot]], finish=stop_at(dot), include_stop=True)
    assert ended.text == "hello."


def test_an_unfinished_character_ends_as_one_replacement():
    said = run([letters("a"), letters("🙂")[:3]])
    assert text_of(said) == "a\ufffd"
    assert said[-1].usage.completion_tokens == 4


def test_an_end_without_success_passes_its_words_on():
    finish = Finish(FinishReason.REJECTED, Usage(), "The queue is full.", 429)
    [ended] = run([[]], finish=finish)
    assert (ended.reason, ended.message, ended.status, ended.text) == (FinishReason.REJECTED, "The queue is full.", 429, "")


# prompt log probabilities ---------------------------------------------------------------------------


def test_the_first_prompt_token_has_a_row_without_a_number():
    stream = TextStream(TOKENIZER, generate(sampling={"prompt_logprobs": 1}), (72, 105))
    [output] = news("r", (105,), logprobs=True).outputs
    prompt = news("r", prompt_logprobs=output.logprobs, cached_tokens=1).outputs[0]
    delta = stream.hear(prompt)
    assert [(row.text, row.logprob) for row in delta.prompt_logprobs] == [
        (TOKENIZER.token_text(72), None),
        (TOKENIZER.token_text(105), -0.5),
    ]
    assert delta.prompt_logprobs[1].top[1] == (0, TOKENIZER.token_text(0), TOKENIZER.token_bytes(0), -2.0)
    [ended] = [stream.hear(news("r", letters("a"), finish=FinishReason.LENGTH).outputs[0])]
    assert ended.prompt_logprobs == ()
    assert ended.usage.cached_tokens == 1


def test_no_news_is_not_sent():
    stream = TextStream(TOKENIZER, generate(), (72,))
    assert stream.hear(news("r", cached_tokens=0).outputs[0]) is None


# every split ----------------------------------------------------------------------------------------


@given(
    text=st.text("aé🙂.", max_size=8),
    stops=st.lists(st.text("aé🙂.", min_size=1, max_size=3), max_size=3),
    places=st.lists(st.integers(0, 50), max_size=6),
    include=st.booleans(),
    finish=st.sampled_from([FinishReason.LENGTH, FinishReason.ERROR, FinishReason.CANCELLED]),
)
def test_what_is_said_does_not_depend_on_how_tokens_arrive(text, stops, places, include, finish):
    tokens = letters(text)
    options = {"sampling": {"stop": tuple(stops)}, "include_stop": include, "finish": finish, "logprobs": True}
    said = run([*split(tokens, places), []], **options)
    assert [type(item) for item in said] == [Delta] * (len(said) - 1) + [Ended]
    assert all(item.text or item.token_count for item in said[:-1])
    assert all(len(item.logprobs) == item.token_count for item in said[:-1])
    assert sum(item.token_count for item in said) == said[-1].usage.completion_tokens <= len(tokens)

    [once] = run([tokens], **options)
    assert text_of(said) == once.text
    found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        assert text_of(said) == text
        assert said[-1].usage.completion_tokens == len(tokens)
        assert said[-1].reason is finish
    elif finish is FinishReason.LENGTH:
        start, _, stop = min(found)
        end = start + len(stop)
        assert text_of(said) == text[: end if include else start]
        assert (said[-1].stop, said[-1].reason) == (stop, FinishReason.STOP)
        assert said[-1].usage.completion_tokens == len(letters(text[:end]))
        assert sum(len(item.logprobs) for item in said) == len(letters(text_of(said)))
