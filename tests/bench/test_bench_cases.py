"""Which steps are timed, and the least work of a step, checked by counting."""

import pytest

from branchline.base.errors import ConfigError
from branchline.bench.cases import DECODE_CONTEXT, DECODE_TAIL, Case, ModelSize, design, work_of

SIZE = ModelSize(
    matrix_weights=1000, head_weights=100, weight_bytes=4400, byte_share=0.25, kv_position_bytes=8, query_width=16,
    windows=(None, 20),
)  # fmt: skip


def designed(**changes):
    numbers = {
        "context_length": 512, "rows": [1, 4], "prompts": [40], "prefixes": [70], "repeats": 3, "page_size": 16,
        "step_tokens": 32,
    }  # fmt: skip
    return design(**numbers | changes)


def test_everything_is_timed_with_and_without_a_prefix_of_whole_pages():
    assert designed().cases == (
        Case("decode", 1, 1, DECODE_CONTEXT, 0),
        Case("decode", 4, 1, DECODE_CONTEXT, 0),
        Case("decode", 1, 1, DECODE_TAIL, 64),
        Case("decode", 4, 1, DECODE_TAIL, 64),
        Case("prefill", 1, 40, 0, 0),
        Case("prefill", 1, 40, 0, 64),
    )


def test_a_prompt_is_cut_into_steps():
    plan = designed()
    assert plan.chunks(Case("prefill", 1, 40, 0, 64)) == [(64, 32), (96, 8)]
    assert plan.chunks(Case("decode", 4, 1, 16, 64)) == [(80, 1)]


def test_the_pages_of_the_largest_case():
    # 4 rows of 128 positions and 4 runs: 9 pages each; and the pattern.
    assert designed().page_count == 1 + 4 * 9
    assert designed(rows=[1], prompts=[320], prefixes=[]).page_count == 1 + 20


def test_what_the_context_has_no_room_for_is_left_out_and_named():
    plan = designed(context_length=100)
    assert plan.cases == (Case("decode", 1, 1, 16, 64), Case("decode", 4, 1, 16, 64), Case("prefill", 1, 40, 0, 0))
    assert plan.skipped[-1] == (
        "a prompt of 40 behind a shared prefix of 64 takes 104 positions, more than the model's context of 100"
    )
    assert len(plan.skipped) == 3


@pytest.mark.parametrize(
    "changes",
    [{"rows": [0]}, {"prompts": [-1]}, {"prefixes": [8]}, {"repeats": 0}, {"page_size": 0}, {"rows": [33]},
     {"context_length": 10}, {"rows": [], "prompts": []}],
)  # fmt: skip
def test_numbers_are_checked(changes):
    with pytest.raises(ConfigError):
        designed(**changes)


@pytest.mark.parametrize(
    "case",
    [
        Case("decode", 1, 1, 10, 0), Case("decode", 4, 1, 40, 0), Case("decode", 4, 1, 5, 64), Case("decode", 3, 1, 40, 64),
        Case("prefill", 1, 70, 0, 0), Case("prefill", 1, 70, 0, 64), Case("prefill", 2, 9, 0, 16),
    ],
)  # fmt: skip
def test_the_work_is_what_counting_gives(case):
    chunks = designed().chunks(case)
    read = flop = linear = 0
    for start, count in chunks:
        read += SIZE.weight_bytes
        queries = [(row, position) for row in range(case.rows) for position in range(start, start + count)]
        linear += 2 * len(queries) * SIZE.matrix_weights
        linear += 2 * sum(position == case.base + case.tokens - 1 for _, position in queries) * SIZE.head_weights
        for window in SIZE.windows:
            pairs = [
                (row, query, key)
                for row, query in queries
                for key in range(query + 1)
                if window is None or key > query - window
            ]
            flop += 4 * len(pairs) * SIZE.query_width
            keys = {(key < case.prefix or row, key) for row, _, key in pairs if key < start}
            shared = {key for _, key in keys if key < case.prefix}
            own = {(row, key) for row, _, key in pairs if case.prefix <= key < start}
            read += SIZE.kv_position_bytes * (len(shared) + len(own))
    work = work_of(SIZE, case, chunks)
    assert (work.read_bytes, work.flop, work.byte_op, work.page_op) == (read, flop + linear, linear / 4, flop)
