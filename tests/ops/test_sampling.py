"""Native sampling against its oracle, ``ops.sample``: the same tokens, the same log probabilities; and what executors add.

The two compute the same weights but for their last bits, so they may choose differently where the random number or a
cut-off falls between two neighbours among the float64 numbers. No such case came up where seeds are fixed, and there the
tokens must be equal. Where hypothesis looks for trouble a token is right if the oracle chooses it after a nudge of a
billionth to the random number, to ``top_p`` or to ``min_p``.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from branchline.base.rng import uniform
from branchline.models.random import RandomCheckpoint, tiny_config
from branchline.models.registry import build_graph
from branchline.ops.batch import NO_LOGPROB, NOT_FINITE, NOTHING_LEFT
from branchline.ops.native import kernels
from branchline.ops.sample import GREEDY_BELOW, change, choose, draw, gather, score_row, weigh
from tests.support.columns import columns, columns_of, scored
from tests.support.executors import EXECUTORS, NATIVE, executor_with_pool, make_batch, make_executor, make_pool

needs_kernels = pytest.mark.skipif(not NATIVE, reason="the native kernels were not built")
NUDGE = 1e-9


def native(logits, how):
    """As ``choose``: plain arrays of both."""
    return kernels().sample(np.ascontiguousarray(logits), how)


def assert_alike(found, expected, is_right=lambda row, token: False, tolerance=1e-6):
    """Arrays of ``Choices``: equal tokens unless ``is_right``, log probabilities of equal tokens within the tolerance."""
    tokens, logprobs, top_tokens, top_logprobs = found
    for row in range(len(expected.tokens)):
        if tokens[row] != expected.tokens[row]:
            assert is_right(row, tokens[row]), (row, tokens[row], expected.tokens[row])
            continue
        np.testing.assert_allclose(logprobs[row], expected.logprobs[row], rtol=1e-9, atol=tolerance)
    assert (top_tokens == expected.top_tokens).all()
    np.testing.assert_allclose(top_logprobs, expected.top_logprobs, rtol=1e-9, atol=tolerance)


def arrays_of(choices):
    return choices.tokens, choices.logprobs, choices.top_tokens, choices.top_logprobs


def right_after_a_nudge(logits, how):
    def is_right(row, token):
        if how.temperature[row] < GREEDY_BELOW:
            return False
        changed = change(logits[row], how, row)
        number = uniform(int(how.seed[row]), int(how.position[row]))
        for p, m, n in itertools.product((-NUDGE, 0, NUDGE), repeat=3):
            nudged = dataclasses.replace(how, top_p=how.top_p * (1 + p), min_p=np.minimum(how.min_p * (1 + m), 1))
            if draw(weigh(changed, nudged, row), min(max(number + n, 0), 1)) == token:
                return True
        return False

    return is_right


# ---------------------------------------------------------------- whatever is asked for

LOGITS = st.one_of(
    arrays(np.float32, st.integers(1, 40), elements=st.floats(-30, 30, width=32)),
    arrays(np.float32, st.integers(1, 40), elements=st.sampled_from([0.0, 1.0, 1.0, -1.0, 1e-20, 3e5, -1e30, 1e30])),
    st.builds(
        lambda seed, size, spread: np.random.default_rng(seed).normal(0, spread, size).astype(np.float32),
        st.integers(0, 2**32), st.integers(250, 1100), st.sampled_from([0.01, 1, 3, 20]),
    ),
    st.builds(
        lambda seed, size: np.random.default_rng(seed).integers(-3, 4, size).astype(np.float32),
        st.integers(0, 2**32), st.integers(250, 1100),
    ),
)  # fmt: skip


def wishes(size):
    """Any parameter alone and all of them together."""
    ids = st.integers(0, size - 1)
    tokens = st.lists(st.integers(0, size + 3), max_size=30)
    bias = st.lists(st.tuples(ids, st.floats(-100, 100, width=32)), min_size=1, max_size=8)
    penalty = st.floats(-2, 2)
    parts = [
        st.fixed_dictionaries({"top_k": st.sampled_from([1, 2, 7, size, size + 1]) | st.integers(1, size)}),
        st.fixed_dictionaries({"top_p": st.sampled_from([1e-9, 0.5, 0.95]) | st.floats(1e-6, 1)}),
        st.fixed_dictionaries({"min_p": st.sampled_from([1e-9, 0.05, 1.0]) | st.floats(0, 1)}),
        st.fixed_dictionaries({"temperature": st.sampled_from([0.0, 1e-5, 1e-4, 0.3, 1.0, 100.0])}),
        st.fixed_dictionaries({"logprobs": st.sampled_from([0, 1, 20, size])}),
        st.fixed_dictionaries(
            {"mask": st.lists(st.integers(0, 2**32 - 1), min_size=-(-size // 32), max_size=-(-size // 32))}
        ),
        st.fixed_dictionaries({"forbidden": st.lists(ids, max_size=size) | st.just(list(range(size)))}),
        bias.map(lambda pairs: {"bias_ids": [of for of, _ in pairs], "bias_values": [value for _, value in pairs]}),
        st.fixed_dictionaries(
            {"known": tokens, "prompt_count": st.integers(0, 20), "repetition_penalty": st.floats(1e-3, 10)}
        ),
        st.fixed_dictionaries(
            {"known": tokens, "prompt_count": st.integers(0, 20), "presence_penalty": penalty, "frequency_penalty": penalty}
        ),
    ]
    some = st.one_of(st.sampled_from(parts).map(lambda part: [part]), st.lists(st.sampled_from(parts), max_size=len(parts)))
    merged = some.flatmap(lambda chosen: st.tuples(*chosen)).map(
        lambda dicts: dict(itertools.chain(*(of.items() for of in dicts)))
    )
    key = st.fixed_dictionaries({"seed": st.integers(0, 2**64 - 1), "position": st.integers(0, 2**31)})
    return st.builds(lambda key, wish: {"temperature": 1.0} | key | wish, key, merged)


@needs_kernels
@settings(max_examples=600, deadline=None)
@given(st.data())
def test_any_parameters_choose_the_same_token(data):
    logits = data.draw(LOGITS)
    how = columns_of([data.draw(wishes(len(logits)))], len(logits))
    assert_alike(native(logits[None], how), choose(logits[None], how), right_after_a_nudge(logits[None], how))


WISHES = [
    {},
    {"temperature": 1e-4},
    {"temperature": 100.0},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 600, "top_p": 0.9},
    {"top_p": 0.95, "temperature": 0.8},
    {"top_p": 1e-9},
    {"top_p": 1 - 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.1, "temperature": 1.5},
    {"repetition_penalty": 1.3, "known": [5, 5, 7, 49_200], "prompt_count": 1},
    {"presence_penalty": 1.5, "frequency_penalty": -0.3, "known": [5, 5, 7, 7, 7, 9], "prompt_count": 2},
    {"bias_ids": [3, 3, 8], "bias_values": [4.0, 4.0, -100.0], "logprobs": 5},
    {"forbidden": list(range(0, 40_000, 3)), "logprobs": 20, "top_p": 0.9},
    {"mask": [0x0F0F0F0F] * 1536, "top_k": 30, "logprobs": 0},
]


@needs_kernels
@pytest.mark.parametrize("wish", WISHES, ids=str)
@pytest.mark.parametrize("spread", [0.3, 2.5, 6.0])
def test_a_full_vocabulary_gives_equal_tokens(wish, spread):
    rng = np.random.default_rng(7)
    for size in (49_152, 49_151, 40_001):
        logits = rng.normal(0, spread, (4, size)).astype(np.float32)
        logits[1] = np.round(logits[1])  # ties
        how = columns_of([{"temperature": 1.0, "seed": seed, "position": 9} | wish for seed in range(4)], size)
        assert_alike(native(logits, how), choose(logits, how))


@needs_kernels
@pytest.mark.parametrize("wish", [{}, {"top_p": 0.35}, {"top_k": 5}, {"min_p": 0.9}, {"top_k": 7, "top_p": 0.5}], ids=str)
def test_draws_visit_equal_tokens_equally(wish):
    """Twelve equal logits in two stretches: the inverse of the cumulative sum, in the order of ids, up to both ends."""
    logits = np.full((1, 300), -40, np.float32)
    logits[0, [*range(3, 9), *range(290, 296)]] = 2
    drawn = []
    for seed in range(400):
        how = columns(1, 300, temperature=1.0, seed=seed, **wish)
        assert_alike(native(logits, how), choose(logits, how))
        drawn.append(int(native(logits, how)[0][0]))
    kept = 12 if wish in ({}, {"min_p": 0.9}) else {0.35: 5, 0.5: 4}.get(wish.get("top_p"), 5)
    assert len(set(drawn)) == kept


# ---------------------------------------------------------------- rows that fail


@needs_kernels
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wish", [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0, "logprobs": 2}], ids=str)
def test_a_logit_that_is_not_finite_fails_its_row_only(bad, wish):
    logits = np.random.default_rng(1).normal(0, 2, (3, 1000)).astype(np.float32)
    logits[1, 777] = bad
    how = columns(3, 1000, **wish)
    assert_alike(native(logits, how), choose(logits, how))
    assert (native(logits, how)[0] == NOT_FINITE).tolist() == [False, True, False]
    beyond = dataclasses.replace(how, token_limit=777)
    assert (native(logits, beyond)[0] >= 0).all()


@needs_kernels
@pytest.mark.parametrize("barred", [{"forbidden": range(50)}, {"mask": [0, 0]}, {"mask": [1, 0], "forbidden": [0]}], ids=str)
@pytest.mark.parametrize("wish", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "logprobs": 2}], ids=str)
def test_nothing_left_fails_its_row_only(barred, wish):
    logits = np.zeros((2, 50), np.float32)
    how = columns_of([barred | wish, wish], 50)
    assert_alike(native(logits, how), choose(logits, how))
    assert native(logits, how)[0][0] == NOTHING_LEFT
    assert native(logits, how)[0][1] >= 0


@needs_kernels
@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"bias_ids": [50], "bias_values": [1.0]}, "no such id"),
        ({"bias_ids": [3, 4], "bias_values": [1.0]}, "do not fit"),
        ({"forbidden": [-1]}, "no such id"),
        ({"mask": [1]}, "too short"),
    ],
    ids=str,
)
def test_columns_that_would_leave_memory_are_refused(wish, words):
    with pytest.raises(ValueError, match=words):
        native(np.zeros((1, 50), np.float32), columns(1, 50, **wish))


@needs_kernels
@pytest.mark.parametrize("offsets", [[0], [0, 1], [1, 0], [0, 2, 0]], ids=str)
def test_ragged_columns_that_do_not_fit_are_refused(offsets):
    how = columns(1, 50)
    ragged = dataclasses.replace(how.known, offsets=np.array(offsets))
    with pytest.raises(ValueError, match="does not fit"):
        native(np.zeros((1, 50), np.float32), dataclasses.replace(how, known=ragged))


# ---------------------------------------------------------------- through executors


@pytest.fixture(scope="module")
def checkpoint():
    return RandomCheckpoint(tiny_config("llama"), seed=5)


@pytest.fixture(scope="module", params=EXECUTORS)
def executor(request, checkpoint):
    """What nobody has written yet is poison."""
    graph = build_graph(checkpoint.config, checkpoint.names)
    pool = make_pool(request.param, **graph.kv_shape, page_size=4, page_count=80)
    pool.data.view(np.float32).fill(math.nan)
    return make_executor(request.param, graph, checkpoint, pool)


def batch_of(rows):
    """Rows of one token, each behind nothing; the sixth behind poison."""
    return make_batch([([row * 3 % 264], row == 5, [row]) for row in range(rows)])


MIXED = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_k": 7, "logprobs": 3},
    {"logprobs": 1},
    {"top_p": 0.5, "temperature": 2.0},
    {"temperature": 1.0, "mask": [0xFFFF] * 9},
    {"forbidden": range(200)},
]


@pytest.mark.parametrize("rows", [1, 17, 70])
@pytest.mark.parametrize("limit", [1, 200, 259, 264])
def test_executors_choose_from_their_own_logits(executor, rows, limit):
    """More rows than a slab, rows that are spared their logits between others, rows that do not sample, one that is
    poisoned."""
    batch, sampling = batch_of(rows), [row for row in range(rows) if row % 5 != 3]
    mixed = [{"seed": row} | MIXED[row % len(MIXED)] for row in sampling]
    fitting = [wish | {"forbidden": [token for token in wish.get("forbidden", ()) if token < limit]} for wish in mixed]
    how = dataclasses.replace(columns_of(fitting, limit), row=np.array(sampling))
    logits = executor.logits(executor.forward(batch))
    outcome, expected = executor.prepare(batch, how, scored())(), choose(logits[sampling, :limit], how)
    found = outcome.choices
    # A BLAS library computes some rows and all of them with other last bits.
    assert_alike(arrays_of(found), expected, tolerance=1e-5)
    assert [choice.logprobs is not None for choice in found] == [
        "logprobs" in wish and token >= 0 for wish, token in zip(mixed, found.tokens, strict=True)
    ]
    assert outcome.finite.tolist() == [row != 5 for row in range(rows)]


@pytest.mark.parametrize("count", [0, 1, 33, 70])
def test_executors_score_given_tokens(executor, count):
    """Positions of several rows, more than a slab, some twice, each beside as many others as it wants; one poisoned."""
    batch, places = batch_of(40), np.arange(count) * 7 % 40
    tokens, tops = np.arange(count) * 17 % 200 + 10, np.arange(count) % 5
    outcome = executor.prepare(batch, columns(0, 200), scored(places, tokens, tops))()
    with np.errstate(invalid="ignore"):
        logits = executor.logits(executor.forward(batch))[:, :200]
    asked = zip(logits[places], tokens.tolist(), tops.tolist(), strict=True)
    expected = gather(score_row(*of) for of in asked)
    assert_alike(arrays_of(outcome.scores), expected, tolerance=1e-5)
    assert set(outcome.scores.tokens[tokens >= 200]) <= {NO_LOGPROB, NOT_FINITE}
    assert ((outcome.scores.tokens == NOT_FINITE) == (places == 5)).all()
    assert len(outcome.choices.tokens) == 0


def test_tokens_may_be_written_after_a_step_was_prepared(executor):
    """In the batch, and among the known ones, which are all that this row chooses from."""
    how = columns(1, 264, known=[0, 0], prompt_count=2, repetition_penalty=1e30)
    late = executor.prepare(batch := make_batch([([0, 0], 0, [3])]), how, scored())
    batch.tokens[:] = how.known.values[:] = 8, 9
    found = late().choices.tokens
    logits = executor.logits(executor.forward(make_batch([([8, 9], 0, [3])])))[1:]
    assert found.tolist() == choose(logits, how).tokens.tolist()


def test_poison_is_found_in_rows_that_do_not_sample(executor):
    batch = make_batch([([1, 2], 0, [70]), ([3, 4], 4, [71, 72]), ([5], 0, [73])])
    how = dataclasses.replace(columns(2, 264), row=np.array([2, 0]))
    outcome = executor.prepare(batch, how, scored())()
    assert outcome.finite.tolist() == [True, False, True]
    best = executor.logits(executor.forward(batch))[[4, 1]].argmax(axis=1)
    assert outcome.choices.tokens.tolist() == best.tolist()


@needs_kernels
def test_choices_do_not_depend_on_threads(checkpoint):
    how = columns_of([{"seed": row} | MIXED[row % 6] for row in range(70)], 259)
    several = [
        executor_with_pool(NATIVE[0], checkpoint, page_size=4, page_count=80, threads=threads)
          .prepare(batch_of(70), how, scored())().choices
        for threads in (1, 2, 5)
    ]  # fmt: skip
    for other in several[1:]:
        assert (other.tokens == several[0].tokens).all()
        np.testing.assert_array_equal(other.top_logprobs, several[0].top_logprobs)
