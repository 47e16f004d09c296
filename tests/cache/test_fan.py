"""First pages of children by nearness: against a plain search, and the promise that only equality of tokens counts."""

import random

import pytest

from branchline.base.errors import InvariantBroken
from branchline.cache.fan import Fan


def common(one, other):
    return next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other)))


def random_pages(rng, size, count):
    return list({tuple(rng.randrange(3) for _ in range(size)) for _ in range(count)})


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_the_nearest_page_is_as_near_as_any(size):
    rng = random.Random(size)
    fan, pages = Fan(), []
    for page in random_pages(rng, size, 60):
        fan.add(page)
        pages.append(page)
        if rng.random() < 0.4:
            fan.remove(pages.pop(rng.randrange(len(pages))))
        fan.check()
        assert sorted(fan) == sorted(pages)
        for _ in range(10):
            rest = tuple(rng.randrange(3) for _ in range(rng.randint(0, size)))
            best = max((common(other, rest) for other in pages), default=0)
            found = fan.nearest(rest)
            assert (0 if found is None else common(found, rest)) == best
    for page in pages:
        fan.remove(page)
        fan.check()
    assert list(fan) == []


def test_of_several_the_oldest():
    fan = Fan()
    for page in [(1, 2, 9), (1, 2, 3), (1, 5, 5)]:
        fan.add(page)
    assert fan.nearest((1, 2, 4)) == (1, 2, 9)
    assert fan.nearest((1, 7, 7)) == (1, 2, 9)
    fan.remove((1, 2, 9))
    assert fan.nearest((1, 2, 4)) == (1, 2, 3)


def test_names_of_tokens_do_not_matter():
    """Any renaming that keeps unequal tokens unequal, in whatever order, leads to the same choices."""
    rng = random.Random(5)
    for _ in range(50):
        names = {(prefix, t): rng.random() for prefix in range(6) for t in range(3)}
        rename = lambda page: tuple(names[i, t] for i, t in enumerate(page))  # noqa: B023, E731
        plain, renamed = Fan(), Fan()
        pages = random_pages(rng, 5, 30)
        for page in pages:
            plain.add(page)
            renamed.add(rename(page))
        for page in pages[::3]:
            plain.remove(page)
            renamed.remove(rename(page))
        for _ in range(50):
            rest = tuple(rng.randrange(3) for _ in range(5))
            found = plain.nearest(rest)
            assert renamed.nearest(rename(rest)) == (None if found is None else rename(found))


def test_mistakes_are_noticed():
    fan = Fan()
    fan.add((1, 2))
    with pytest.raises(InvariantBroken):
        fan.add((1, 2))
    with pytest.raises(InvariantBroken):
        fan.remove((1, 3))
    fan._top[7] = (8, 8)
    with pytest.raises(InvariantBroken):
        fan.check()
