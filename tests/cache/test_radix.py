"""The radix tree: random lives against a dictionary of prefixes, then the tricky cases one by one."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from branchline.base.errors import InvariantBroken
from branchline.cache.pages import PageKind, PageLedger
from branchline.cache.radix import RadixCache
from branchline.core.request import Namespace

NAMESPACES = (Namespace(model="m"), Namespace(model="m", tenant="t"))
NS = NAMESPACES[0]


def common(one, other):
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def dump(cache):
    """Everything there is to see in a cache, in an order that does not depend on it."""

    def node_facts(node):
        facts = (
            id(node),
            tuple(node.chunks),
            tuple(node.pages),
            node.lock_count,
            node.last_step,
            node.touched_ns,
            node.queued,
        )
        return (*facts, id(node.parent), tuple(node.firsts), tuple(node_facts(child) for child in node.children.values()))

    ledger = cache._ledger
    return (
        [(namespace, node_facts(root)) for namespace, root in cache._roots.items()],
        [(worth, number, id(node)) for worth, number, node in cache._queue._heap],
        (cache.page_count, cache.evictable_pages, cache.locked_nodes, cache.version),
        [ledger.state_of(page) for page in range(ledger.page_count)],
    )


@dataclass
class Held:
    """A lock that the model knows of."""

    path: object
    pages: tuple
    tail: object
    is_exact: bool
    """Its path was cut where its pages end."""


class TreeMachine(RuleBasedStateMachine):
    """The model: for each namespace and prefix of whole pages, the page that ends it."""

    def __init__(self, page_size, page_count):
        super().__init__()
        self.page_size = page_size
        self.ledger = PageLedger(page_count)
        self.cache = RadixCache(self.ledger, page_size)
        self.known = {}
        self.held = []
        self.read_until = {}
        self.sequences = [()]
        self.settled = self.now = self.owner = 0

    # ---------------------------------------------------------- what the model thinks

    def model_match(self, namespace, query):
        pages, end = [], 0
        while (page := self.known.get((namespace, query[: end + self.page_size]))) is not None:
            if end + self.page_size > len(query):
                break
            pages.append(page)
            end += self.page_size
        rest = query[end:]
        tails = {
            page: common(prefix[end:], rest)
            for (space, prefix), page in self.known.items()
            if space == namespace and len(prefix) == end + self.page_size and prefix[:end] == query[:end]
        }
        best = max(tails.values(), default=0)
        return tuple(pages), {page for page, count in tails.items() if count == best and best}, best

    def draw_tokens(self, data):
        """Mostly a known sequence that goes another way somewhere."""
        stem = data.draw(st.sampled_from(self.sequences))
        cut = data.draw(st.integers(0, len(stem)))
        fresh = data.draw(st.lists(st.integers(0, 2), max_size=2 * self.page_size + 2))
        tokens = (stem[:cut] + tuple(fresh))[: 5 * self.page_size]
        if len(self.sequences) < 30:
            self.sequences.append(tokens)
        return tokens

    def whole(self, tokens):
        return len(tokens) // self.page_size

    def drop_gone(self):
        """Forget what the tree dropped; what plans may still read must be retired for long enough."""
        gone = {key: page for key, page in self.known.items() if self.ledger.state_of(page).kind is not PageKind.TREE}
        for key, page in gone.items():
            del self.known[key]
            until = self.read_until.pop(page, 0)
            if until > self.settled:
                assert self.ledger.state_of(page).kind is PageKind.RETIRED
                assert self.ledger.state_of(page).until >= until
        return set(gone.values())

    # ---------------------------------------------------------- verbs

    def take(self, count):
        """Pages of a new owner, evicting if it must; none if there is no room."""
        self.owner += 1
        if count > self.ledger.free_pages:
            self.cache.evict(count - self.ledger.free_pages)
            self.drop_gone()
        return self.ledger.reserve(self.owner, count)

    def learn(self, namespace, tokens, pages):
        insertion = self.cache.insert(namespace, tokens, pages, self.owner, self.now)
        expected, duplicates = [], []
        for index in range(self.whole(tokens)):
            key = (namespace, tokens[: (index + 1) * self.page_size])
            page = self.known.setdefault(key, pages[index])
            expected.append(page)
            if page != pages[index]:
                duplicates.append(pages[index])
        assert insertion.pages == tuple(expected)
        assert insertion.duplicates == tuple(duplicates)
        assert set(duplicates) <= self.ledger.pages_of(self.owner)
        return insertion

    def leave(self, last_step):
        self.ledger.release(self.owner, sorted(self.ledger.pages_of(self.owner)), last_step)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), spare=st.integers(0, 1), keep=st.booleans())
    def insert_alone(self, data, namespace, spare, keep):
        """A request that computed everything itself: what is known already becomes a duplicate."""
        tokens = self.draw_tokens(data)
        pages = self.take(self.whole(tokens) + spare)
        if pages is None:
            return
        insertion = self.learn(namespace, tokens, pages)
        if keep:
            self.cache.lock(insertion.path, self.now)
            self.held.append(Held(insertion.path, insertion.pages, None, True))
        self.leave(self.settled)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), ahead=st.integers(0, 2))
    def insert_after_match(self, data, namespace, ahead):
        """A request as the scheduler runs it: match, lock, copy the tail, insert, change locks, leave."""
        tokens = self.draw_tokens(data)
        match = self.cache.match(namespace, tokens, len(tokens))
        self.cache.lock(match.path, self.now)
        private = self.take(self.whole(tokens) - len(match.pages))
        if private is not None:
            insertion = self.learn(namespace, tokens, match.pages + private)
            assert not insertion.duplicates
            self.cache.lock(insertion.path, self.now)
            self.cache.unlock(insertion.path, self.settled + ahead)
            self.mark_read(insertion.pages, self.settled + ahead)
        self.cache.unlock(match.path, self.settled + ahead)
        self.mark_read(match.pages, self.settled + ahead)

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), limit=st.integers(-1, 80))
    def match(self, data, namespace, limit):
        tokens = self.draw_tokens(data)
        before = dump(self.cache)
        match = self.cache.match(namespace, data.draw(st.sampled_from([tokens, list(tokens)])), limit)
        assert dump(self.cache) == before
        pages, tails, tail_count = self.model_match(namespace, tokens[: max(limit, 0)])
        assert match.pages == pages
        assert (match.tail is None) == (not tails)
        if match.tail:
            assert match.tail.page in tails
            assert match.tail.token_count == tail_count < self.page_size
        assert match.token_count == len(pages) * self.page_size + tail_count

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), is_exact=st.booleans())
    def lock(self, data, namespace, is_exact):
        tokens = self.draw_tokens(data)
        match = self.cache.match(namespace, tokens, len(tokens))
        path = self.cache.cut(match) if is_exact else match.path
        assert self.cache.match(namespace, tokens, len(tokens)).pages == match.pages
        self.cache.lock(path, self.now)
        self.held.append(Held(path, match.pages, match.tail, is_exact))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), ahead=st.integers(0, 3))
    def unlock(self, data, ahead):
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.cache.unlock(held.path, self.settled + ahead)
        self.mark_read(held.pages, self.settled + ahead)

    def mark_read(self, pages, step):
        for page in pages:
            self.read_until[page] = max(step, self.read_until.get(page, 0))

    @rule(wanted=st.integers(0, 6))
    def evict(self, wanted):
        possible = self.cache.evictable_pages
        dropped = self.cache.evict(wanted)
        assert dropped == min(wanted, possible)
        assert len(self.drop_gone()) == dropped

    @rule(ahead=st.integers(1, 2))
    def settle(self, ahead):
        self.settled += ahead
        self.ledger.settle(self.settled)

    @rule(ns=st.integers(0, 3))
    def wait(self, ns):
        self.now += ns

    @rule()
    def reset(self):
        if self.cache.locked_nodes:
            before = dump(self.cache)
            with pytest.raises(InvariantBroken):
                self.cache.reset()
            assert dump(self.cache) == before
            return
        assert self.cache.reset() == len(self.known)
        self.drop_gone()
        assert not self.known

    # ---------------------------------------------------------- after every step

    @invariant()
    def the_model_agrees(self):
        self.cache.check()
        self.ledger.check()
        assert self.cache.page_count == len(self.known) == len(set(self.known.values()))
        assert all(
            (space, prefix[: -self.page_size]) in self.known for space, prefix in self.known if len(prefix) > self.page_size
        )

    @invariant()
    def what_is_locked_is_there(self):
        alive = set(self.known.values())
        protected = {page for held in self.held for page in held.pages}
        assert protected <= alive
        assert self.cache.evictable_pages <= len(alive - protected)
        if all(held.is_exact for held in self.held):
            assert self.cache.evictable_pages == len(alive - protected)
        self.cache.check_locks([held.path for held in self.held])
        if not self.held:
            assert self.cache.evictable_pages == len(alive)
            assert self.cache.locked_nodes == 0


@pytest.mark.parametrize(("page_size", "page_count"), [(1, 24), (2, 16), (4, 12), (16, 9)])
def test_tree_against_its_model(page_size, page_count):
    run_state_machine_as_test(
        lambda: TreeMachine(page_size, page_count),
        settings=settings(max_examples=75, stateful_step_count=30, deadline=None),
    )


# ------------------------------------------------------------------ tricky cases


class World:
    """A cache of pages of four tokens, and letters for tokens."""

    def __init__(self, page_count=32):
        self.ledger = PageLedger(page_count)
        self.cache = RadixCache(self.ledger, 4)
        self.owner = 0

    def put(self, text, now_ns=0, namespace=NS):
        self.owner += 1
        pages = self.ledger.reserve(self.owner, len(text) // 4)
        insertion = self.cache.insert(namespace, letters(text), pages, self.owner, now_ns)
        self.ledger.release(self.owner, sorted(self.ledger.pages_of(self.owner)), 0)
        self.cache.check()
        return insertion

    def match(self, text, limit=1000, namespace=NS):
        return self.cache.match(namespace, letters(text), limit)

    def evict(self, count):
        dropped = self.cache.evict(count)
        self.cache.check()
        return dropped


def letters(text):
    return tuple(map(ord, text))


@pytest.fixture
def world():
    return World()


def test_a_branch_splits_and_both_ways_are_found(world):
    left = world.put("aaaabbbbcccc")
    right = world.put("aaaabbbbdddd")
    assert right.pages[:2] == left.pages[:2]
    assert right.pages[2] != left.pages[2]
    assert world.match("aaaabbbbcccc").pages == left.pages
    assert world.match("aaaabbbbdddd").pages == right.pages
    assert world.cache.page_count == 4


def test_a_match_may_end_inside_a_node_and_splits_nothing(world):
    whole = world.put("aaaabbbbcccc")
    before = dump(world.cache)
    match = world.match("aaaaXXXX")
    assert match.pages == whole.pages[:1]
    assert match.path is whole.path
    assert dump(world.cache) == before


def test_an_insertion_ends_its_path_exactly(world):
    world.put("aaaabbbbcccc")
    short = world.put("aaaabbbb")
    world.cache.lock(short.path, 0)
    assert world.cache.evictable_pages == 1
    assert world.evict(99) == 1
    assert world.match("aaaabbbbcccc").pages == short.pages


def test_a_cut_path_protects_what_matched_and_nothing_else(world):
    whole = world.put("aaaabbbbcccc")
    match = world.match("aaaaXXXX")
    version = world.cache.version
    path = world.cache.cut(match)
    world.cache.lock(path, 0)
    assert world.cache.version == version
    assert world.match("aaaabbbbcccc").pages == whole.pages
    assert world.evict(99) == 2
    world.cache.unlock(path, 0)
    assert world.evict(99) == 1


def test_a_match_that_was_split_since_is_cut_all_the_same(world):
    world.put("aaaabbbbccccdddd")
    match = world.match("aaaaXXXX")
    world.put("aaaabbbbeeee")
    path = world.cache.cut(match)
    assert path is world.cache.cut(match)
    world.cache.lock(path, 0)
    assert world.evict(99) == 4


def test_nothing_is_cut_where_nothing_matched(world):
    world.put("aaaabbbb")
    world.cache.lock(world.cache.cut(world.match("XXXX")), 0)
    assert world.evict(99) == 2


def test_locks_that_nobody_holds_are_found(world):
    paths = [world.put("aaaabbbb").path, world.put("aaaacccc").path]
    for path in paths:
        world.cache.lock(path, 0)
    world.cache.check_locks(paths)
    for wrong in ([], paths[:1], [*paths, paths[0]]):
        with pytest.raises(InvariantBroken):
            world.cache.check_locks(wrong)


def test_a_split_keeps_the_lock_of_the_lower_part_on_both_parts(world):
    whole = world.put("aaaabbbbcccc")
    world.cache.lock(whole.path, 0)
    world.put("aaaadddd")
    assert world.cache.locked_nodes == 2
    assert world.cache.evictable_pages == 1
    assert world.evict(99) == 1
    assert world.match("aaaabbbbcccc").pages == whole.pages
    world.cache.unlock(whole.path, 0)
    assert world.cache.locked_nodes == 0
    assert world.evict(99) == 3


def test_a_split_keeps_the_last_reader_of_the_lower_part_on_both_parts(world):
    whole = world.put("aaaabbbb")
    world.cache.lock(whole.path, 0)
    world.cache.unlock(whole.path, 7)
    world.put("aaaacccc")
    world.evict(99)
    assert {world.ledger.state_of(page).until for page in whole.pages} == {7}


def test_a_path_that_ended_inside_still_protects_its_pages_after_a_split(world):
    whole = world.put("aaaabbbbcccc")
    match = world.match("aaaaXXXX")
    world.put("aaaabbbbdddd")
    world.cache.lock(match.path, 0)
    world.evict(99)
    assert world.match("aaaabbbbcccc").pages == whole.pages
    world.cache.unlock(match.path, 0)
    world.cache.check()


def test_two_locks_need_two_unlocks(world):
    path = world.put("aaaa").path
    world.cache.lock(path, 0)
    world.cache.lock(path, 0)
    world.cache.unlock(path, 0)
    assert world.evict(1) == 0
    world.cache.unlock(path, 0)
    assert world.evict(1) == 1


def test_unlocking_what_is_not_locked_is_our_bug(world):
    path = world.put("aaaa").path
    before = dump(world.cache)
    with pytest.raises(InvariantBroken):
        world.cache.unlock(path, 9)
    assert dump(world.cache) == before


def test_a_path_that_was_evicted_is_refused(world):
    path = world.put("aaaabbbb").path
    world.evict(99)
    for late in (
        lambda: world.cache.lock(path, 0),
        lambda: world.cache.unlock(path, 0),
    ):
        with pytest.raises(InvariantBroken):
            late()
    with pytest.raises(InvariantBroken):
        world.cache.lock(object(), 0)
    assert world.cache.locked_nodes == 0


def test_a_duplicate_stays_with_its_owner(world):
    first = world.put("aaaabbbb")
    pages = world.ledger.reserve(77, 3)
    second = world.cache.insert(NS, letters("aaaabbbbcccc"), pages, 77, 0)
    assert second.pages == (*first.pages, pages[2])
    assert second.duplicates == pages[:2]
    assert world.ledger.pages_of(77) == set(pages[:2])


def test_a_page_that_is_in_the_tree_already_is_no_duplicate(world):
    first = world.put("aaaabbbb")
    private = world.ledger.reserve(77, 1)
    second = world.cache.insert(NS, letters("aaaabbbbcccc"), first.pages + private, 77, 0)
    assert second.pages == first.pages + private
    assert second.duplicates == ()


def test_pages_of_somebody_else_are_refused_and_nothing_has_changed(world):
    world.put("aaaabbbb")
    pages = world.ledger.reserve(77, 3)
    before = dump(world.cache)
    for attempt in (
        lambda: world.cache.insert(NS, letters("aaaacccc"), pages, 78, 1),
        lambda: world.cache.insert(NS, letters("aaaacccc"), pages[:1], 77, 1),
        lambda: world.cache.insert(NAMESPACES[1], letters("aaaacccc"), [pages[0], pages[0]], 77, 1),
    ):
        with pytest.raises(InvariantBroken):
            attempt()
        assert dump(world.cache) == before


def test_tokens_after_the_last_whole_page_are_not_remembered(world):
    world.put("aaaabb")
    assert world.cache.page_count == 1
    assert world.match("aaaabb").tail is None


@pytest.mark.parametrize(
    ("query", "limit", "pages", "tail"),
    [
        ("aaaabbbbcccc", 12, 3, 0),
        ("aaaabbbbcccc", 11, 2, 3),  # the last token must be computed: the page is copied
        ("aaaabbbbcccc", 9, 2, 1),
        ("aaaabbbbcccc", 8, 2, 0),
        ("aaaabbbbccXX", 12, 2, 2),
        ("aaaabbbbXccc", 12, 2, 0),
        ("aaaabXXX", 12, 1, 1),
        ("aa", 12, 0, 2),
        ("aaXaaaaa", 12, 0, 2),
        ("Xaaa", 12, 0, 0),
        ("aaaabbbbccccdddd", 16, 3, 0),
        ("aaaa", 0, 0, 0),
        ("", 5, 0, 0),
    ],
)
def test_sharing_is_exact_to_the_token(world, query, limit, pages, tail):
    held = world.put("aaaabbbbcccc")
    match = world.match(query, limit)
    assert match.pages == held.pages[:pages]
    assert (match.tail.token_count if match.tail else 0) == tail
    if match.tail:
        assert match.tail.page == held.pages[pages]
        assert match.tail.path is held.path


def test_the_tail_is_the_child_that_goes_along_for_longest(world):
    world.put("pppp")
    for end in ("aaXX", "abXX", "abcX", "abZZ", "adXX", "bbbb"):
        world.put("pppp" + end)
    match = world.match("ppppabcd")
    assert match.tail.token_count == 3
    assert match.tail.page == world.match("ppppabcX").pages[1]
    assert match.tail.path is not match.path
    assert world.match("ppppaaYY").tail.token_count == 2
    assert world.match("ppppbY").tail.token_count == 1
    assert world.match("ppppZ").tail is None


def test_a_copied_tail_that_was_evicted_is_not_reused_before_its_step_is_settled():
    world = World(page_count=2)
    world.put("aaaabbbb")
    tail = world.match("aaaabbXX").tail
    world.cache.lock(tail.path, 0)
    world.cache.unlock(tail.path, 5)
    assert world.evict(1) == 1
    assert world.ledger.state_of(tail.page).until == 5
    assert world.ledger.reserve(9, 1) is None
    world.ledger.settle(4)
    assert world.ledger.reserve(9, 1) is None
    world.ledger.settle(5)
    assert world.ledger.reserve(9, 1) == (tail.page,)


def test_a_tail_is_held_even_if_a_split_moved_its_page_upward(world):
    world.put("aaaabbbbcccc")
    tail = world.match("aabX").tail
    world.cache.lock(tail.path, 0)
    world.put("aaaadddd")
    world.cache.unlock(tail.path, 5)
    world.evict(99)
    assert world.ledger.state_of(tail.page).until == 5


def test_pages_are_free_at_once_when_nobody_reads_them_any_more(world):
    path = world.put("aaaa").path
    world.cache.lock(path, 0)
    world.cache.unlock(path, 3)
    world.ledger.settle(3)
    world.evict(1)
    assert world.ledger.free_pages == world.ledger.page_count


def test_namespaces_do_not_see_each_other(world):
    mine = world.put("aaaabbbb")
    other = NAMESPACES[1]
    assert world.match("aaaabbbb", namespace=other).token_count == 0
    theirs = world.put("aaaabbbb", namespace=other)
    assert not set(mine.pages) & set(theirs.pages)
    assert theirs.duplicates == ()
    world.cache.lock(mine.path, 0)
    assert world.evict(99) == 2
    assert world.match("aaaabbbb").pages == mine.pages
    assert world.match("aaaabbbb", namespace=other).token_count == 0


def test_fields_of_a_namespace_cannot_be_confused(world):
    world.put("aaaa", namespace=Namespace(tenant="ab", salt="c"))
    assert world.match("aaaa", namespace=Namespace(tenant="a", salt="bc")).token_count == 0
    assert world.match("aaaa", namespace=Namespace(adapter="ab", salt="c")).token_count == 0


def test_an_empty_namespace_is_forgotten_and_its_root_stays_harmless(world):
    root = world.match("aaaa").path
    assert dump(world.cache)[0] == []
    world.put("aaaa")
    old = world.match("bbbb").path
    world.evict(1)
    assert dump(world.cache)[0] == []
    world.put("aaaa")
    for path in (root, old):
        world.cache.lock(path, 9)
        world.cache.unlock(path, 9)
    assert world.evict(1) == 1
    assert world.ledger.retired_pages == 0


def test_reset_is_refused_while_a_path_is_locked(world):
    path = world.put("aaaa").path
    world.cache.lock(path, 0)
    with pytest.raises(InvariantBroken):
        world.cache.reset()
    world.cache.unlock(path, 0)
    assert world.cache.reset() == 1


def test_reset_waits_for_readers_as_eviction_does(world):
    path = world.put("aaaa").path
    world.cache.lock(path, 0)
    world.cache.unlock(path, 8)
    world.cache.reset()
    assert world.ledger.retired_pages == 1
    world.ledger.settle(8)
    assert world.ledger.free_pages == world.ledger.page_count


def test_every_change_raises_the_version_and_a_match_does_not(world):
    versions = [world.cache.version]
    for verb in (
        lambda: world.put("aaaabbbb"),
        lambda: world.put("aaaa"),
        lambda: world.evict(1),
        world.cache.reset,
    ):
        verb()
        versions.append(world.cache.version)
    assert versions == sorted(set(versions))
    world.match("aaaa")
    assert world.evict(5) == 0
    assert world.cache.version == versions[-1]


def test_a_very_deep_tree_needs_no_recursion():
    ledger = PageLedger(1500)
    cache = RadixCache(ledger, 1)
    pages = ledger.reserve(1, 1500)
    for end in range(1, 1501):
        path = cache.insert(NS, range(end), pages[:end], 1, end).path if end % 3 == 0 else None
    cache.lock(path, 0)
    assert cache.locked_nodes == 500
    cache.unlock(path, 0)
    cache.check()
    assert cache.match(NS, range(1500), 1500).pages == pages
    assert cache.reset() == 1500
