"""Which prefix goes first under each order, at the cache and through the whole engine."""

import pytest

from branchline.base.config import EVICTION_NAMES
from branchline.cache.eviction import EVICTION_ORDERS
from branchline.cache.pages import PageKind, PageLedger
from branchline.cache.radix import RadixCache
from branchline.core.request import Namespace
from tests.support.harness import Harness

NS = Namespace()


class Shelf:
    """Prefixes of one page each, called by their only token."""

    def __init__(self, order):
        self.ledger = PageLedger(16)
        self.cache = RadixCache(self.ledger, 1, EVICTION_ORDERS[order]())
        self.pages = {}

    def put(self, token, now_ns, priority=0):
        (self.pages[token],) = self.cache.insert(NS, [token], self.ledger.reserve(1, 1), 1, now_ns, priority).pages

    def use(self, token, now_ns, priority=0):
        path = self.cache.match(NS, [token], 1).path
        self.cache.lock(path, now_ns)
        self.cache.use(path, priority)
        self.cache.unlock(path, 0)

    def evict_all(self):
        gone = []
        while self.cache.page_count:
            self.cache.evict(1)
            gone += [token for token, page in self.pages.items() if self.is_gone(page) and token not in gone]
            self.cache.check()
        return gone

    def is_gone(self, page):
        return self.ledger.state_of(page).kind is not PageKind.TREE


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("lru", [4, 3, 2, 1]),
        ("lfu", [4, 2, 1, 3]),
        ("slru", [4, 3, 2, 1]),
        ("fifo", [1, 2, 3, 4]),
        ("priority", [4, 3, 1, 2]),
    ],
)
def test_each_order_has_its_own_idea_of_worth(order, expected):
    shelf = Shelf(order)
    for token, priority in ((1, 3), (2, 5), (3, 1), (4, 1)):
        shelf.put(token, token, priority)
    for now_ns, token in enumerate((3, 3, 3, 2, 1), 10):
        shelf.use(token, now_ns)
    assert shelf.evict_all() == expected


def test_slru_keeps_what_is_shared_through_a_flood_and_lru_does_not():
    for order, survives in (("slru", True), ("lru", False)):
        shelf = Shelf(order)
        shelf.put(0, 0)
        shelf.use(0, 1)
        for token in range(1, 12):
            shelf.put(token, 1 + token)
        shelf.cache.evict(11)
        assert shelf.is_gone(shelf.pages[0]) is not survives


def test_a_later_user_of_higher_priority_makes_a_prefix_worth_more():
    shelf = Shelf("priority")
    shelf.put(1, 1, 0)
    shelf.put(2, 2, 1)
    shelf.use(1, 3, 9)
    assert shelf.evict_all() == [2, 1]


def test_a_split_keeps_age_hits_and_priority_on_both_sides():
    ledger = PageLedger(16)
    cache = RadixCache(ledger, 1, EVICTION_ORDERS["lfu"]())
    path = cache.insert(NS, [1, 2, 3, 4], ledger.reserve(1, 4), 1, 5, 7).path
    cache.use(path, 2)
    cache.insert(NS, [1, 2, 9], (*cache.match(NS, [1, 2], 2).pages, *ledger.reserve(1, 1)), 1, 9, 1)
    upper, lower = path.parent, path
    assert (upper.hits, upper.born_ns, upper.priority) == (lower.hits, lower.born_ns, lower.priority) == (2, 5, 7)
    cache.check()


def test_what_leaving_would_free_is_counted_by_locks():
    ledger = PageLedger(16)
    cache = RadixCache(ledger, 1)
    one = cache.insert(NS, [1, 2, 3], ledger.reserve(1, 3), 1, 0).path
    other = cache.insert(NS, [1, 2, 8, 9], (*cache.match(NS, [1, 2], 2).pages, *ledger.reserve(1, 2)), 1, 0).path
    for path in (one, other):
        cache.lock(path, 0)
    assert cache.pages_freed_by([one]) == 1
    assert cache.pages_freed_by([other]) == 2
    assert cache.pages_freed_by([one, other]) == 5
    assert cache.pages_freed_by([]) == 0


@pytest.mark.parametrize("order", EVICTION_NAMES)
def test_the_engine_serves_everyone_under_every_order(order):
    harness = Harness(eviction=order, pages=24, page_size=4, max_running=3)
    for number in range(40):
        shared = list(range(16)) if number % 3 else list(range(50, 58))
        harness.submit(f"r{number}", [*shared, *[number] * 9], max_new=3, priority=number % 3)
        if number % 4 == 0:
            harness.run()
    harness.run()
    assert len(harness.finishes()) == 40
    assert harness.scheduler.stats().evicted_pages > 0


@pytest.mark.parametrize(("order", "cached"), [("priority", 16), ("lru", 0)])
def test_the_priority_of_a_request_protects_its_prefix(order, cached):
    harness = Harness(eviction=order, pages=16, page_size=4, max_running=1)
    harness.submit("dear", range(17), max_new=1, priority=5)
    harness.run()
    for number in range(8):
        harness.submit(f"flood{number}", [60 + number] * 20, max_new=1)
        harness.run()
    harness.submit("again", range(17), max_new=1)
    harness.run()
    assert harness.finishes()["again"][0].usage.cached_tokens == cached


@pytest.mark.parametrize(("order", "hits"), [("lfu", 16), ("fifo", 0)])
def test_requests_are_counted_once_each_however_many_chunks_they_take(order, hits):
    harness = Harness(eviction=order, pages=16, page_size=4, max_running=1, max_chunk_tokens=4)
    harness.submit("twice", range(17), max_new=1)
    harness.run()
    harness.submit("twice again", range(17), max_new=1)
    harness.run()
    for number in range(6):
        harness.submit(f"once{number}", [60 + number] * 28, max_new=1)  # seven chunks
        harness.run()
    harness.submit("third", range(17), max_new=1)
    harness.run()
    assert harness.finishes()["third"][0].usage.cached_tokens == hits
