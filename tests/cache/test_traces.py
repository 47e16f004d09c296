"""What the cache tells for explanation: marks of prefixes, what was dropped, why a match ended."""

from branchline.cache.null import NullCache
from branchline.cache.pages import PageLedger
from branchline.cache.radix import RadixCache
from branchline.core.explain import EMPTY_MARK, extend_mark
from branchline.core.request import Namespace

ONE, OTHER = Namespace(salt="one"), Namespace(salt="other")
SIZE = 4


def filled(*contents):
    """A cache that holds token sequences, each given as (namespace, tokens)."""
    ledger = PageLedger(64)
    cache = RadixCache(ledger, SIZE)
    for owner, (namespace, tokens) in enumerate(contents):
        pages = ledger.reserve(owner, len(tokens) // SIZE)
        insertion = cache.insert(namespace, tokens, pages, owner, owner)
        ledger.release(owner, insertion.duplicates, 0)
    return cache


def trace(cache, namespace, tokens):
    match = cache.match(namespace, tokens, len(tokens))
    path = cache.cut(match)
    cut = type(match)(path, match.pages, match.tail, match.page_size)
    return cache.trace(namespace, tokens, cut)


def mark_of(tokens):
    mark = EMPTY_MARK
    for start in range(0, len(tokens), SIZE):
        mark = extend_mark(mark, tuple(tokens[start : start + SIZE]))
    return mark


def test_a_trace_carries_the_mark_of_what_matched_wherever_nodes_begin():
    tokens = list(range(24))
    cache = filled((ONE, tokens), (ONE, [*tokens[:12], *range(50, 58)]))
    for count in (0, 4, 8, 12, 16):
        assert trace(cache, ONE, [*tokens[:count], 90, 91, 92, 93]).mark == mark_of(tokens[:count])
    cache.check()


def test_whether_something_else_goes_on():
    cache = filled((ONE, range(16)))
    assert trace(cache, ONE, [*range(8), 90, 91, 92, 93]).continues
    assert not trace(cache, ONE, [*range(16), 90, 91, 92, 93]).continues
    assert not trace(cache, ONE, [90, 91, 92, 93]).continues, "at the root everything goes on differently"


def test_whether_another_namespace_has_one_page_more():
    cache = filled((ONE, range(8)), (OTHER, range(16)))
    assert trace(cache, ONE, range(16)).is_elsewhere
    assert not trace(cache, ONE, [*range(8), 90, 91, 92, 93]).is_elsewhere
    assert not trace(cache, OTHER, range(20)).is_elsewhere
    assert trace(cache, Namespace(salt="third"), range(16)).is_elsewhere


def test_what_was_dropped():
    cache = filled((ONE, range(16)), (OTHER, range(30, 38)))
    assert cache.dropped == []
    assert cache.evict(3) == 3
    (first,) = cache.dropped
    assert (first.namespace, first.length_pages, first.touched_ns) == (ONE, 4, 0)
    assert first.marks == tuple(mark_of(range(stop)) for stop in (8, 12, 16))
    cache.reset()
    assert [(drop.namespace, len(drop.marks)) for drop in cache.dropped] == [(ONE, 1), (OTHER, 2)]
    cache.evict(5)
    assert cache.dropped == []


def test_nothing_is_told_of_nothing():
    cache = NullCache(PageLedger(4), SIZE)
    match = cache.match(ONE, range(8), 8)
    found = cache.trace(ONE, range(8), match)
    assert (found.mark, found.continues, found.is_elsewhere) == (EMPTY_MARK, False, False)
    assert cache.outline(9) == ()
    assert cache.dropped == ()
