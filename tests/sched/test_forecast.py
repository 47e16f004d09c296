"""When will a waiting request start? Small cases worked out by hand."""

from branchline.sched.forecast import Room, Tenure, Wish, forecast


def room(rows=0, pages=100, prefill=0, per_step=10):
    return Room(rows=rows, pages=pages, prefill_tokens=prefill, prefill_per_step=per_step)


def test_the_next_row_is_that_of_the_first_to_end():
    running = [Tenure(30, 5), Tenure(10, 5), Tenure(20, 5)]
    line = [Wish(10, 100, 1)] * 3
    assert forecast(room(), running, line) == [10, 20, 30]


def test_enough_memory_may_take_several_ends():
    running = [Tenure(10, 3), Tenure(20, 3), Tenure(30, 3)]
    assert forecast(room(rows=5, pages=1), running, [Wish(10, 5, 6)]) == [20]


def test_prompts_in_front_take_the_budget_of_their_steps():
    assert forecast(room(rows=9, prefill=50), [], [Wish(100, 5, 1), Wish(10, 5, 1), Wish(10, 5, 1)]) == [5, 15, 16]


def test_whoever_starts_stands_in_the_way_of_the_next():
    assert forecast(room(rows=1), [], [Wish(20, 30, 1), Wish(20, 30, 1)]) == [0, 32]


def test_alone_everybody_fits():
    """As in admission: whoever runs alone gets everything."""
    assert forecast(room(rows=1, pages=3), [], [Wish(10, 4, 50)]) == [0]


def test_an_empty_line():
    assert forecast(room(), [], []) == []
