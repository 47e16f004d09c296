"""Who goes first when pages are needed, and that no more goes than is needed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.cache.eviction import EvictionQueue, Lru
from branchline.cache.node import Node, Root
from branchline.cache.pages import PageKind, PageLedger
from branchline.cache.radix import RadixCache
from branchline.core.request import Namespace

NS = Namespace()


class Longest:
    """An order of our own: many pages are worth little."""

    def worth(self, node):
        return (-node.page_count,)


def make(order=None, page_count=32):
    ledger = PageLedger(page_count)
    return ledger, RadixCache(ledger, 1, order)


def put(ledger, cache, tokens, now_ns=0):
    return cache.insert(NS, tokens, ledger.reserve(1, len(tokens)), 1, now_ns)


def gone(ledger, pages):
    return [page for page in pages if ledger.state_of(page).kind is not PageKind.TREE]


def test_the_least_recently_used_leaf_goes_first():
    ledger, cache = make()
    old, new = put(ledger, cache, [1, 2], 10), put(ledger, cache, [3, 4], 20)
    cache.lock(old.path, 30)
    cache.unlock(old.path, 0)
    cache.evict(2)
    assert gone(ledger, new.pages) == list(new.pages)
    assert gone(ledger, old.pages) == []


def test_inserting_again_is_using():
    ledger, cache = make()
    old, new = put(ledger, cache, [1, 2], 10), put(ledger, cache, [3, 4], 20)
    cache.insert(NS, [1, 2], old.pages, 1, 30)
    cache.evict(1)
    assert gone(ledger, new.pages) == [new.pages[1]]


def test_a_clock_that_is_late_does_not_make_a_path_older():
    ledger, cache = make()
    old, new = put(ledger, cache, [1], 10), put(ledger, cache, [2], 20)
    cache.lock(new.path, 5)
    cache.unlock(new.path, 0)
    cache.check()
    cache.evict(1)
    assert gone(ledger, old.pages) == list(old.pages)


def test_a_split_with_a_late_clock_does_not_make_the_trunk_older():
    ledger, cache = make()
    put(ledger, cache, [1, 2], 10)
    put(ledger, cache, [1, 3], 5)
    cache.check()


def test_a_leaf_is_trimmed_from_its_tail():
    ledger, cache = make()
    pages = put(ledger, cache, [1, 2, 3, 4]).pages
    for left in (3, 2, 1, 0):
        assert cache.evict(1) == 1
        assert cache.match(NS, [1, 2, 3, 4], 4).pages == pages[:left]
        cache.check()


def test_leaves_go_before_their_parents_and_parents_then_join():
    ledger, cache = make()
    put(ledger, cache, [1, 2, 3], 10)
    put(ledger, cache, [1, 2, 4], 10)
    put(ledger, cache, [5], 20)
    assert cache.evict(2) == 2
    assert cache.match(NS, [1, 2, 3], 3).page_tokens == 2
    assert cache.match(NS, [5], 1).page_tokens == 1
    assert cache.evict(2) == 2
    assert cache.match(NS, [5], 1).page_tokens == 1
    cache.check()


def test_a_parent_under_a_locked_child_stays():
    ledger, cache = make()
    parent = put(ledger, cache, [1, 2])
    child = put(ledger, cache, [1, 2, 3])
    cache.insert(NS, [1, 2, 3], child.pages, 1, 0)
    cache.lock(child.path, 0)
    put(ledger, cache, [1, 2, 4])
    assert cache.evict(99) == 1
    assert gone(ledger, parent.pages) == []


@pytest.mark.parametrize("order", [Lru(), Longest()])
def test_any_order_drops_exactly_what_was_asked(order):
    ledger, cache = make(order)
    for first in range(4):
        put(ledger, cache, [first] * (first + 1), first)
    for asked in (1, 2, 3, 4):
        assert cache.evict(asked) == asked
        cache.check()
    assert cache.page_count == 0


def test_an_order_is_one_method():
    ledger, cache = make(Longest())
    short, long = put(ledger, cache, [1], 0), put(ledger, cache, [2, 2], 9)
    cache.evict(1)
    assert gone(ledger, long.pages) == [long.pages[1]]
    assert gone(ledger, short.pages) == []


def leaf(now_ns):
    node = Node(Root(NS), [(now_ns,)], [now_ns])
    node.touched_ns = now_ns
    return node


def drain(queue):
    found = []
    while (node := queue.pop()) is not None:
        found.append(node)
    return found


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.booleans()), max_size=30))
def test_the_queue_sorts_whatever_grew_or_was_locked_meanwhile(facts):
    queue, nodes = EvictionQueue(Lru()), []
    for now_ns, _, _ in facts:
        nodes.append(leaf(now_ns))
        queue.offer(nodes[-1])
        queue.offer(nodes[-1])
    for node, (_, later, locked) in zip(nodes, facts, strict=True):
        node.touched_ns += later
        node.lock_count += locked
    queue.check(nodes)
    free = [node for node in nodes if not node.lock_count]
    found = drain(queue)
    assert [node.touched_ns for node in found] == sorted(node.touched_ns for node in free)
    assert {id(node) for node in found} == {id(node) for node in free}


def test_the_queue_never_grows_beyond_the_tree():
    ledger, cache = make()
    path = put(ledger, cache, [1, 2]).path
    put(ledger, cache, [3])
    for now_ns in range(100):
        cache.lock(path, now_ns)
        cache.unlock(path, 0)
    assert len(cache._queue._heap) == 2


def test_equal_worth_goes_in_the_order_of_becoming_evictable():
    nodes = [leaf(7) for _ in range(5)]
    queue = EvictionQueue(Lru())
    for node in nodes:
        queue.offer(node)
    assert drain(queue) == nodes
