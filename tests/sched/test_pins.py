"""Prefixes that stay in the cache until a time, and give way when nothing else helps."""

import pytest

from branchline.base.finish import FinishReason
from branchline.core.request import Namespace
from branchline.wire.messages import Control, PinTokens
from tests.support.harness import Harness

S = 1_000_000_000
PREFIX = list(range(16))


def make(**settings):
    harness = Harness(**{"pages": 16, "page_size": 4, "max_running": 2, "pin_share": 0.5} | settings)
    harness.submit("first", [*PREFIX, 40], max_new=1)
    harness.run()
    return harness


def pin(harness, tokens=PREFIX, seconds=60, salt=""):
    now = harness.clock.now_ns()
    answer = harness.scheduler.pin(Namespace(salt=salt), tokens, now + seconds * S, now)
    harness.scheduler.check()
    return answer


def flood(harness, count=8):
    for number in range(count):
        harness.submit(f"flood{len(harness.specs)}", [50 + number] * 24, max_new=2)
        harness.run()


def hit(harness):
    name = f"again{len(harness.specs)}"
    harness.submit(name, [*PREFIX, 41], max_new=1)
    harness.run()
    return harness.finishes()[name][0].usage.cached_tokens


def test_a_pinned_prefix_survives_what_evicts_others():
    pinned, free = make(), make()
    assert pin(pinned) == (16, "")
    for harness, cached in ((pinned, 16), (free, 0)):
        flood(harness)
        assert hit(harness) == cached
    assert (pinned.scheduler.stats().pins, pinned.scheduler.stats().pages_pinned) == (1, 4)


def test_a_pin_ends_with_its_time():
    harness = make()
    pin(harness, seconds=5)
    harness.clock.advance(5 * S)
    harness.turn()
    assert harness.scheduler.stats().pins == 0
    assert harness.scheduler.stats().locked_nodes == 0
    flood(harness)
    assert hit(harness) == 0


def test_whole_pages_are_pinned_and_not_a_page_more():
    harness = make()
    harness.submit("longer", [*PREFIX, *range(60, 76)], max_new=1)
    harness.run()
    assert pin(harness, PREFIX[:10]) == (8, "")
    assert harness.scheduler.stats().pages_pinned == 2


def test_pinning_again_moves_the_time_and_zero_removes_the_pin():
    harness = make()
    pin(harness, seconds=5)
    pin(harness, seconds=50)
    harness.clock.advance(20 * S)
    harness.turn()
    assert harness.scheduler.stats().pins == 1
    assert pin(harness, seconds=0) == (0, "The pin is removed.")
    assert harness.scheduler.stats().locked_nodes == 0


def test_pins_share_pages_and_only_so_many():
    harness = make(pages=32)  # pins may hold 16
    for length, total in ((16, 4), (8, 4), (12, 4)):
        assert pin(harness, PREFIX[:length]) == (length, "")
        assert harness.scheduler.stats().pages_pinned == total
    harness.submit("long", range(200, 260), max_new=1)
    harness.run()
    count, words = pin(harness, list(range(200, 260)))
    assert count == 0
    assert words == "Pins may hold 16 KV pages; 4 are pinned and this prefix has 15."
    assert pin(harness, list(range(200, 248))) == (48, "")
    assert harness.scheduler.stats().pages_pinned == 16


@pytest.mark.parametrize("tokens", [[], [99] * 40, PREFIX[:3]])
def test_what_is_not_cached_cannot_be_pinned(tokens):
    count, words = pin(make(), tokens)
    assert count == 0
    assert "generate from it first" in words


def test_a_pin_counts_in_its_namespace_only():
    assert pin(make(), salt="other")[0] == 0


def test_pins_give_way_if_the_head_of_the_line_could_not_run():
    harness = make()
    pin(harness)
    harness.submit("large", range(100, 156), max_new=8)  # all 16 pages
    harness.run()
    assert harness.finishes()["large"][0].reason is FinishReason.LENGTH
    assert harness.scheduler.stats().pins == 0


def test_pins_do_not_give_way_while_somebody_runs_who_will_end():
    harness = make(pin_share=0.25)
    pin(harness)
    harness.submit("runs", range(200, 224), max_new=20)
    for _ in range(3):
        harness.turn()
    harness.submit("waits", range(300, 324), max_new=4)
    harness.turn()
    assert harness.scheduler.stats().waiting == 1
    harness.run()
    assert harness.scheduler.stats().pins == 1
    assert len(harness.finishes()) == 3


def test_a_flush_forgets_pins():
    harness = make()
    pin(harness)
    assert harness.scheduler.flush()
    assert harness.ledger.free_pages == harness.ledger.page_count


def test_a_running_sequence_may_grow_from_a_pinned_prefix_while_it_expires():
    harness = make()
    pin(harness, seconds=1)
    harness.submit("grows", [*PREFIX, *range(70, 78)], max_new=20)
    for _ in range(3):
        harness.turn()
    harness.clock.advance(S)
    harness.run()
    assert harness.finishes()["grows"][0].usage.cached_tokens == 16
    assert harness.scheduler.stats().locked_nodes == 0


def test_the_loop_answers_in_words():
    harness = make()
    for call, seconds in (("a", 60.0), ("b", 0.0)):
        harness.inbox.put(PinTokens(call_id=call, namespace=Namespace(), tokens=tuple(PREFIX), seconds=seconds))
    harness.inbox.put(PinTokens(call_id="c", namespace=Namespace(), tokens=(1, 2, 3), seconds=9.0))
    harness.inbox.put(Control(call_id="d", verb="check"))
    harness.turn()
    assert [(answer.call_id, answer.done, answer.message[:30]) for answer in harness.outbox.replies] == [
        ("a", True, "16 of 16 tokens are pinned for"),
        ("b", True, "The pin is removed."),
        ("c", False, "Nothing of this prompt is cach"),
        ("d", True, ""),
    ]


def test_pins_give_way_to_one_who_runs_alone_and_grows():
    """It was admitted beside the pin, and then needs more pages than are left."""
    harness = make(pages=8, pin_share=0.5)
    assert pin(harness) == (16, "")
    harness.submit("grows", [60] * 8, max_new=24)
    harness.run()
    assert [end.reason for end in harness.finishes()["grows"]] == [FinishReason.LENGTH]
    assert harness.scheduler.stats().pins == 0
