"""The page ledger against a dictionary that says where each page is."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from branchline.base.errors import InvariantBroken
from branchline.cache.pages import PageKind, PageLedger, PageState

OWNERS = st.integers(0, 3)
FREE, TREE = PageState(PageKind.FREE), PageState(PageKind.TREE)


def private(owner):
    return PageState(PageKind.PRIVATE, owner=owner)


def states(ledger):
    return {page: ledger.state_of(page) for page in range(ledger.page_count)}


class LedgerMachine(RuleBasedStateMachine):
    @initialize(page_count=st.integers(1, 12))
    def start(self, page_count):
        self.ledger = PageLedger(page_count)
        self.model = dict.fromkeys(range(page_count), FREE)
        self.settled = 0

    def some(self, data, state):
        pages = [page for page, now in self.model.items() if now == state]
        return data.draw(st.lists(st.sampled_from(pages), unique=True)) if pages else []

    def gone(self, pages, last_step):
        state = FREE if last_step <= self.settled else PageState(PageKind.RETIRED, until=last_step)
        self.model.update(dict.fromkeys(pages, state))

    @rule(owner=OWNERS, count=st.integers(0, 13))
    def reserve(self, owner, count):
        free = {page for page, state in self.model.items() if state == FREE}
        pages = self.ledger.reserve(owner, count)
        if count > len(free):
            assert pages is None
            return
        assert len(set(pages)) == len(pages) == count
        assert free.issuperset(pages)
        self.model.update(dict.fromkeys(pages, private(owner)))

    @rule(owner=OWNERS, data=st.data())
    def give_to_tree(self, owner, data):
        pages = self.some(data, private(owner))
        self.ledger.give_to_tree(owner, pages)
        self.model.update(dict.fromkeys(pages, TREE))

    @rule(owner=OWNERS, ahead=st.integers(-2, 3), data=st.data())
    def release(self, owner, ahead, data):
        pages = self.some(data, private(owner))
        self.ledger.release(owner, pages, self.settled + ahead)
        self.gone(pages, self.settled + ahead)

    @rule(ahead=st.integers(-2, 3), data=st.data())
    def release_tree(self, ahead, data):
        pages = self.some(data, TREE)
        self.ledger.release_tree(pages, self.settled + ahead)
        self.gone(pages, self.settled + ahead)

    @rule(ahead=st.integers(-2, 3))
    def settle(self, ahead):
        self.ledger.settle(self.settled + ahead)
        self.settled = max(self.settled, self.settled + ahead)
        for page, state in self.model.items():
            if state.kind is PageKind.RETIRED and state.until <= self.settled:
                self.model[page] = FREE

    @rule(owner=OWNERS, data=st.data())
    def strangers_are_refused(self, owner, data):
        own = self.some(data, private(owner))
        strangers = [page for page, state in self.model.items() if state != private(owner)] + [-1, self.ledger.page_count]
        pages = data.draw(st.permutations([*own, data.draw(st.sampled_from(strangers))]))
        with pytest.raises(InvariantBroken):
            self.ledger.release(owner, pages, 0)
        with pytest.raises(InvariantBroken):
            self.ledger.give_to_tree(owner, pages)

    @rule(data=st.data())
    def the_tree_cannot_lose_what_it_has_not(self, data):
        own = self.some(data, TREE)
        strangers = [page for page, state in self.model.items() if state != TREE] + [-1, self.ledger.page_count]
        with pytest.raises(InvariantBroken):
            self.ledger.release_tree([*own, data.draw(st.sampled_from(strangers))], 0)

    @precondition(lambda self: any(state.kind is PageKind.PRIVATE for state in self.model.values()))
    @rule(data=st.data())
    def a_page_cannot_be_named_twice(self, data):
        page = data.draw(st.sampled_from([p for p, state in self.model.items() if state.kind is PageKind.PRIVATE]))
        with pytest.raises(InvariantBroken):
            self.ledger.release(self.model[page].owner, [page, page], 0)

    @precondition(lambda self: TREE in self.model.values())
    @rule(data=st.data())
    def a_page_of_the_tree_cannot_be_named_twice(self, data):
        page = data.draw(st.sampled_from([page for page, state in self.model.items() if state == TREE]))
        with pytest.raises(InvariantBroken):
            self.ledger.release_tree([page, page], 0)

    @invariant()
    def the_model_agrees(self):
        assert states(self.ledger) == self.model
        for owner in range(4):
            assert self.ledger.pages_of(owner) == {page for page, state in self.model.items() if state == private(owner)}
        counted = (
            self.ledger.free_pages, self.ledger.private_pages, self.ledger.tree_pages, self.ledger.retired_pages,
        )  # fmt: skip
        assert counted == tuple(sum(state.kind is kind for state in self.model.values()) for kind in PageKind)
        assert self.ledger.settled_step == self.settled
        self.ledger.check()


def test_ledger_against_its_model():
    run_state_machine_as_test(LedgerMachine, settings=settings(max_examples=80, stateful_step_count=30, deadline=None))


def test_reservation_is_all_or_nothing():
    ledger = PageLedger(3)
    assert ledger.reserve(1, 2) == (0, 1)
    assert ledger.reserve(2, 2) is None
    assert ledger.free_pages == 1
    assert ledger.reserve(2, 1) == (2,)
    assert ledger.reserve(2, 0) == ()


def test_reuse_is_deterministic_and_the_last_page_given_back_comes_first():
    ledger = PageLedger(8)
    pages = ledger.reserve(1, 6)
    ledger.release(1, (pages[3], pages[1]), 0)
    ledger.release(1, (pages[4],), 0)
    assert ledger.reserve(2, 4) == (pages[4], pages[3], pages[1], 6)


def test_a_retired_page_is_not_reused_before_its_step_is_settled():
    ledger = PageLedger(1)
    (page,) = ledger.reserve(1, 1)
    ledger.release(1, [page], 5)
    ledger.settle(4)
    assert ledger.state_of(page) == PageState(PageKind.RETIRED, until=5)
    assert ledger.reserve(2, 1) is None
    ledger.settle(5)
    assert ledger.reserve(2, 1) == (page,)


def test_settling_an_older_step_changes_nothing():
    ledger = PageLedger(1)
    ledger.settle(7)
    ledger.settle(3)
    ledger.release(1, ledger.reserve(1, 1), 7)
    assert ledger.free_pages == 1


def test_pages_retired_out_of_order_come_back_in_order_of_steps():
    ledger = PageLedger(3)
    a, b, c = ledger.reserve(1, 3)
    ledger.release(1, [a], 9)
    ledger.release(1, [b], 3)
    ledger.release(1, [c], 6)
    ledger.settle(6)
    assert ledger.state_of(a).kind is PageKind.RETIRED
    assert ledger.reserve(2, 2) == (c, b)


def test_impossible_questions_are_refused():
    with pytest.raises(InvariantBroken):
        PageLedger(0)
    with pytest.raises(InvariantBroken):
        PageLedger(1).reserve(1, -1)
    with pytest.raises(InvariantBroken):
        PageLedger(1).state_of(-1)


def _forget_free(ledger):
    ledger._free.pop()


def _free_twice(ledger):
    ledger._free[0] = ledger._free[1]


def _steal(ledger):
    ledger._private[1].pop()


def _wrong_owner(ledger):
    ledger._private[2] = ledger._private.pop(1)


def _miscount(ledger):
    ledger._tree_count += 1


def _forget_step(ledger):
    ledger._retired_steps.clear()


def _overdue(ledger):
    ledger._settled = 99


@pytest.mark.parametrize("damage", [_forget_free, _free_twice, _steal, _wrong_owner, _miscount, _forget_step, _overdue])
def test_check_finds_damage(damage):
    ledger = PageLedger(10)
    pages = ledger.reserve(1, 6)
    ledger.give_to_tree(1, pages[:2])
    ledger.release(1, pages[2:4], 4)
    ledger.check()
    damage(ledger)
    with pytest.raises(InvariantBroken):
        ledger.check()
