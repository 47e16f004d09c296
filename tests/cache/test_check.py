"""A proof that cannot fail proves nothing: each kind of damage is found."""

import pytest

from branchline.base.errors import InvariantBroken
from branchline.cache.node import Root
from branchline.cache.pages import PageLedger
from branchline.cache.radix import RadixCache
from branchline.core.request import Namespace

NS = Namespace()


@pytest.fixture
def cache():
    """A trunk of two pages with two leaves, one of them locked."""
    ledger = PageLedger(8)
    cache = RadixCache(ledger, 2)
    for owner, end in enumerate((5, 6)):
        path = cache.insert(NS, (1, 2, 3, 4, end, end), ledger.reserve(owner, 3), owner, 0).path
        ledger.release(owner, sorted(ledger.pages_of(owner)), 0)
    cache.lock(path, 0)
    cache.check()
    return cache


def trunk(cache):
    return cache._roots[NS].children[1, 2]


def free_leaf(cache):
    return trunk(cache).children[5, 5]


def locked_leaf(cache):
    return trunk(cache).children[6, 6]


def wrong_page_counter(cache):
    cache._page_count += 1


def wrong_evictable_counter(cache):
    cache._evictable_pages -= 1


def wrong_lock_counter(cache):
    cache._locked_nodes += 1


def lock_missing_above(cache):
    locked_leaf(cache).lock_count += 1


def page_in_two_nodes(cache):
    free_leaf(cache).pages[0] = trunk(cache).pages[0]


def page_given_away(cache):
    ledger = cache._ledger
    page = free_leaf(cache).pages[0]
    ledger.release_tree([page], 0)
    other = next(p for p in range(8) if p != page and p in ledger._free)
    ledger._free.remove(other)
    ledger._free.append(other)
    assert ledger.reserve(9, 1) == (other,)
    ledger.give_to_tree(9, [other])


def page_forgotten(cache):
    cache._ledger.give_to_tree(9, cache._ledger.reserve(9, 1))


def key_too_short(cache):
    free_leaf(cache).chunks[0] = (5,)


def more_keys_than_pages(cache):
    trunk(cache).chunks.append((7, 7))


def no_pages(cache):
    free_leaf(cache).pages.clear()


def wrong_parent(cache):
    free_leaf(cache).parent = cache._roots[NS]


def wrong_index(cache):
    children = trunk(cache).children
    children[9, 9] = children.pop((5, 5))
    trunk(cache).firsts.remove((5, 5))
    trunk(cache).firsts.add((9, 9))


def child_missing_in_one_index(cache):
    trunk(cache).firsts.remove((5, 5))


def last_reader_forgotten(cache):
    free_leaf(cache).last_step = 3


def path_older_than_its_end(cache):
    locked_leaf(cache).touched_ns = 3


def empty_root(cache):
    other = Namespace(salt="x")
    cache._roots[other] = Root(other)


def root_of_another_namespace(cache):
    cache._roots[Namespace(salt="x")] = cache._roots.pop(NS)


def locked_root(cache):
    cache._roots[NS].lock_count = 1


def dropped_node(cache):
    free_leaf(cache).dropped = True


def leaf_not_queued(cache):
    cache._queue.pop()


def leaf_queued_twice(cache):
    cache._queue._push(free_leaf(cache))


def queued_without_entry(cache):
    locked_leaf(cache).queued = not locked_leaf(cache).queued


def worth_fell(cache):
    free_leaf(cache).touched_ns = -1


DAMAGES = [
    wrong_page_counter, wrong_evictable_counter, wrong_lock_counter, lock_missing_above, page_in_two_nodes,
    page_given_away, page_forgotten, key_too_short, more_keys_than_pages, no_pages, wrong_parent, wrong_index,
    child_missing_in_one_index, last_reader_forgotten, path_older_than_its_end, empty_root,
    root_of_another_namespace, locked_root, dropped_node, leaf_not_queued, leaf_queued_twice, queued_without_entry,
    worth_fell,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_found(cache, damage):
    damage(cache)
    with pytest.raises(InvariantBroken):
        cache.check()
