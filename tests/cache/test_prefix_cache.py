"""What every prefix cache promises, whether it shares or not."""

import itertools

import pytest

from branchline.base.errors import InvariantBroken
from branchline.cache.null import NullCache
from branchline.cache.pages import PageLedger
from branchline.cache.radix import RadixCache
from branchline.core.request import Namespace

NS = Namespace(model="m")
PAGE = 4
TOKENS = tuple(range(100, 118))
WHOLE = len(TOKENS) // PAGE


@pytest.fixture(params=[RadixCache, NullCache], ids=["radix", "null"])
def world(request):
    ledger = PageLedger(16)
    return ledger, request.param(ledger, PAGE)


def put(ledger, cache, tokens=TOKENS, owner=1, now_ns=0):
    """Insert as a finished request does: what the cache did not take goes back."""
    insertion = cache.insert(NS, tokens, ledger.reserve(owner, -(-len(tokens) // PAGE)), owner, now_ns)
    ledger.release(owner, sorted(ledger.pages_of(owner)), 0)
    return insertion


def test_a_new_cache_knows_nothing(world):
    _, cache = world
    match = cache.match(NS, TOKENS, len(TOKENS))
    assert (match.pages, match.tail, match.token_count, match.page_size) == ((), None, 0, PAGE)
    assert (cache.page_count, cache.evictable_pages, cache.locked_nodes) == (0, 0, 0)
    cache.check()


def test_no_page_is_lost_between_owner_and_cache(world):
    ledger, cache = world
    insertion = put(ledger, cache)
    assert ledger.free_pages + cache.page_count == ledger.page_count
    assert len(insertion.pages) == cache.page_count == ledger.tree_pages
    assert insertion.duplicates == ()
    cache.check()


def test_the_pages_of_an_insertion_replace_the_owners_pages_one_by_one(world):
    ledger, cache = world
    put(ledger, cache)
    pages = ledger.reserve(2, WHOLE)
    insertion = cache.insert(NS, TOKENS, pages, 2, 1)
    table = insertion.pages + pages[len(insertion.pages) :]
    assert len(table) == WHOLE
    assert ledger.pages_of(2) == set(insertion.duplicates) | set(table[len(insertion.pages) :])


@pytest.mark.parametrize("limit", [-1, 0, 1, 3, 4, 5, 15, 16, 17, 100])
def test_a_match_never_passes_its_limit(world, limit):
    ledger, cache = world
    put(ledger, cache)
    match = cache.match(NS, TOKENS, limit)
    assert match.token_count <= max(limit, 0)
    assert match.tail is None or 1 <= match.tail.token_count < PAGE


def test_lists_and_tuples_are_the_same_question(world):
    ledger, cache = world
    put(ledger, cache)
    assert cache.match(NS, list(TOKENS), 17) == cache.match(NS, TOKENS, 17)


def test_locked_pages_are_not_evicted(world):
    ledger, cache = world
    path = put(ledger, cache).path
    held = cache.page_count
    cache.lock(path, 1)
    assert cache.evictable_pages == cache.evict(99) == 0
    assert cache.page_count == held
    cache.unlock(path, 0)
    assert cache.evict(99) == held
    assert (cache.page_count, cache.locked_nodes, ledger.free_pages) == (0, 0, ledger.page_count)
    cache.check()


@pytest.mark.parametrize("wanted", [-1, 0, 1, 3, 99])
def test_eviction_drops_what_is_asked_and_there(world, wanted):
    ledger, cache = world
    put(ledger, cache)
    before = cache.evictable_pages
    assert cache.evict(wanted) == min(max(wanted, 0), before)
    assert ledger.free_pages + cache.page_count == ledger.page_count
    cache.check()


def test_reset_gives_every_page_back(world):
    ledger, cache = world
    put(ledger, cache)
    held = cache.page_count
    assert cache.reset() == held
    assert (cache.page_count, ledger.free_pages) == (0, ledger.page_count)
    assert cache.match(NS, TOKENS, 99).token_count == 0
    cache.check()


def test_the_version_tells_when_a_match_may_have_changed(world):
    ledger, cache = world
    verbs = [lambda: put(ledger, cache), lambda: cache.evict(1), lambda: put(ledger, cache, now_ns=5), cache.reset]
    for verb in verbs:
        before, known = cache.version, cache.match(NS, TOKENS, 99).pages
        verb()
        assert cache.version > before or cache.match(NS, TOKENS, 99).pages == known
        assert cache.version >= before


def test_a_path_from_an_empty_cache_stays_harmless(world):
    ledger, cache = world
    path = cache.match(NS, TOKENS, 99).path
    cache.lock(path, 0)
    put(ledger, cache)
    cache.unlock(path, 3)
    cache.evict(99)
    cache.lock(path, 0)
    assert cache.locked_nodes == 0
    cache.reset()
    cache.unlock(path, 3)
    cache.check()


def test_nothing_whole_is_nothing_to_remember(world):
    ledger, cache = world
    for tokens in ((), TOKENS[: PAGE - 1]):
        insertion = put(ledger, cache, tokens)
        assert insertion.pages == insertion.duplicates == ()
        cache.lock(insertion.path, 0)
        cache.unlock(insertion.path, 0)
    assert ledger.free_pages == ledger.page_count
    cache.check()


def test_pages_of_the_tree_are_audited(world):
    ledger, cache = world
    ledger.give_to_tree(7, ledger.reserve(7, 1))
    with pytest.raises(InvariantBroken):
        cache.check()


@pytest.mark.parametrize("make", [RadixCache, NullCache])
def test_a_page_holds_at_least_one_token(make):
    with pytest.raises(InvariantBroken):
        make(PageLedger(1), 0)


def test_many_requests_one_after_the_other_lose_no_page(world):
    ledger, cache = world
    for owner, (first, second) in enumerate(itertools.product((1, 2, 3), repeat=2)):
        tokens = (first,) * PAGE + (second,) * 6
        match = cache.match(NS, tokens, len(tokens) - 1)
        cache.lock(match.path, owner)
        cache.evict(max(0, 3 - ledger.free_pages))
        private = ledger.reserve(owner, 3 - len(match.pages))
        insertion = cache.insert(NS, tokens, match.pages + private, owner, owner)
        cache.lock(insertion.path, owner)
        cache.unlock(match.path, owner)
        cache.unlock(insertion.path, owner)
        ledger.release(owner, sorted(ledger.pages_of(owner)), owner)
        ledger.settle(owner)
        cache.check()
        ledger.check()
    assert ledger.free_pages + cache.evictable_pages == ledger.page_count
