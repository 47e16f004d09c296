"""The router's approximate tree, against a dumb list of what was inserted."""

import random

import pytest

from branchline.router.tree import PrefixTree

ENDLESS = 1 << 40


def common(one, other):
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def test_the_longest_prefix_and_who_saw_it():
    tree = PrefixTree(ENDLESS)
    tree.insert("hello world", 0)
    tree.insert("hello there", 1)
    assert tree.match("hello world!", {0, 1}) == (11, 0)
    assert tree.match("hello their", {0, 1}) == (9, 1)
    assert tree.match("hello", {0, 1}) == (5, 1)  # both saw it, 1 last
    assert tree.match("goodbye", {0, 1}) == (0, None)
    assert tree.match("", {0, 1}) == (0, None)


def test_only_candidates_count():
    tree = PrefixTree(ENDLESS)
    tree.insert((1, 2, 3, 4), 0)
    tree.insert((1, 2, 9), 1)
    assert tree.match((1, 2, 3, 4), {1}) == (2, 1)
    assert tree.match((1, 2, 3, 4), {5}) == (0, None)


def test_what_a_replica_saw_can_be_forgotten():
    tree = PrefixTree(ENDLESS)
    tree.insert("abc", 0)
    tree.insert("abd", 1)
    tree.forget(0)
    assert tree.match("abc", {0, 1}) == (2, 1)
    tree.check()


@pytest.mark.parametrize("kind", [tuple, "".join], ids=["tokens", "characters"])
@pytest.mark.parametrize("seed", range(15))
def test_the_tree_knows_what_a_list_knows(seed, kind):
    rng = random.Random(seed)
    tree, seen = PrefixTree(ENDLESS), []
    for _ in range(200):
        key = kind(rng.choice("ab") for _ in range(rng.randint(0, 14)))
        candidates = {replica for replica in range(4) if rng.random() < 0.7}
        length, replica = tree.match(key, candidates)
        best = max((common(key, other) for other, who in seen if who in candidates), default=0)
        assert length == best
        assert (replica is None) == (best == 0)
        if replica is not None:
            latest = [who for other, who in seen if who in candidates and common(key, other) == best]
            assert replica == latest[-1]
        replica = rng.randrange(4)
        tree.insert(key, replica)
        seen.append((key, replica))
        tree.check()
    assert tree.size == len({other[:end] for other, _ in seen for end in range(1, len(other) + 1)})


@pytest.mark.parametrize("seed", range(10))
def test_a_full_tree_forgets_what_was_used_least_recently(seed):
    rng = random.Random(seed)
    tree = PrefixTree(60)
    for _ in range(300):
        key = tuple(rng.randrange(3) for _ in range(rng.randint(1, 12)))
        tree.insert(key, 0)
        tree.check()
        assert tree.size <= 60
        assert tree.match(key, {0}) == (len(key), 0)


def test_the_oldest_key_goes_first():
    tree = PrefixTree(9)
    for key in ("aaa", "bbb", "ccc"):
        tree.insert(key, 0)
    tree.insert("aaa", 0)
    tree.insert("ddd", 0)
    assert [tree.match(key, {0})[0] for key in ("aaa", "bbb", "ccc", "ddd")] == [3, 0, 3, 3]


def test_a_key_larger_than_the_tree_leaves_it_empty():
    tree = PrefixTree(4)
    tree.insert("abcdef", 0)
    assert tree.size == 0
    tree.check()
