import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from branchline.text.stops import StopMatcher

ALPHABET = "abc"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=6), max_size=5)


def naive(text, stops):
    """(start, stop) of the earliest match, of equal starts the longest; None if there is none."""
    found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    return (min(found)[0], min(found)[2]) if found else None


def run(pieces, stops, **options):
    matcher = StopMatcher(stops, **options)
    shown = []
    for piece in pieces:
        text, match = matcher.feed(piece)
        shown.append(text)
        if match:
            return shown, match
    text, match = matcher.finish()
    return [*shown, text], match


def cut(text, places):
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@given(st.text(ALPHABET, max_size=24), STOPS, st.lists(st.integers(0, 100), max_size=8), st.booleans())
def test_agrees_with_a_search_of_the_whole_text_however_it_is_cut(text, stops, places, include):
    shown, match = run(cut(text, places), stops, include_stop=include)
    expected = naive(text, stops)
    if expected is None:
        assert match is None
        assert "".join(shown) == text
    else:
        start, stop = expected
        assert (match.start, match.end, match.stop) == (start, start + len(stop), stop)
        assert "".join(shown) == text[: match.end if include else start]


@given(st.text(ALPHABET, max_size=24), STOPS)
def test_holds_back_no_more_than_the_beginning_of_a_stop(text, stops):
    matcher = StopMatcher(stops)
    fed = shown = ""
    for char in text:
        piece, match = matcher.feed(char)
        fed, shown = fed + char, shown + piece
        if match:
            break
        held = fed.removeprefix(shown)
        # what is held begins a stop, or is a stop that a longer or earlier one may still replace
        assert held == "" or any(stop.startswith(held) or held.startswith(stop) for stop in stops)
        if naive(fed, stops) is None:
            longest = max((n for n in range(len(fed) + 1) for stop in stops if stop[:n] == fed[len(fed) - n :]), default=0)
            assert len(held) == longest


def test_a_match_that_nothing_can_replace_is_certain_at_once():
    text, match = StopMatcher(["\n", "###"]).feed("one\n")
    assert (text, match.stop) == ("one", "\n")


def test_a_longer_stop_is_waited_for_and_the_end_decides():
    matcher = StopMatcher(["\n", "\n\n"])
    assert matcher.feed("one\n") == ("one", None)
    text, match = matcher.feed("two")
    assert (text, match.stop, match.start) == ("", "\n", 3)
    matcher = StopMatcher(["\n", "\n\n"])
    matcher.feed("one\n")
    assert matcher.finish()[1].stop == "\n"


def test_an_earlier_stop_wins_over_one_that_is_complete_first():
    shown, match = run(list("xabcd"), ["bc", "abcd"])
    assert ("".join(shown), match.stop) == ("x", "abcd")
    shown, match = run(list("xabcx"), ["bc", "abcd"])
    assert ("".join(shown), match.stop) == ("xa", "bc")


def test_skipped_text_counts_but_is_not_searched():
    matcher = StopMatcher(["b"])
    matcher.skip(3)
    text, match = matcher.feed("ab")
    assert (text, match.start, match.end) == ("a", 4, 5)


def test_cost_is_linear_in_the_text():
    stops = ["a" * 255 + "b", "a" * 200 + "c"]
    matcher = StopMatcher(stops)
    started = time.perf_counter()
    for _ in range(200):
        matcher.feed("a" * 1000)
    assert time.perf_counter() - started < 5
