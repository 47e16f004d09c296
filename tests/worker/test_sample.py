"""Sampling, step by step: exact formulas, the law of the draws, independence of neighbours."""

import math

import numpy as np
import pytest

from branchline.base.rng import uniform
from branchline.core.plan import PlanRow, SlotOpen
from branchline.core.request import SamplingParams
from branchline.ops.batch import NO_LOGPROB, NOT_FINITE, NOTHING_LEFT
from branchline.ops.sample import change, choose_row, draw, heaviest, score_row, token_logprobs
from branchline.worker.inputs import make_inputs
from branchline.worker.slots import Sequence

VOCAB = 40


def sequence(tokens=(1, 2, 3), prompt_count=None, seed=1, stop_ids=(), **sampling) -> Sequence:
    prompt_count = len(tokens) if prompt_count is None else prompt_count
    opening = SlotOpen(0, 0, 0, tuple(tokens), prompt_count, SamplingParams(**sampling), seed, tuple(stop_ids))
    return Sequence(opening, vocab_size=VOCAB + 8, token_limit=VOCAB, page_count=1000)


def random_logits(seed=0, size=VOCAB):
    return np.random.default_rng(seed).normal(0, 2, size).astype(np.float32)


def columns(of, token_limit):
    """As a worker makes them for a row that ends with the last known token."""
    row = PlanRow(0, 0, 0, 0, of.expected, True, tuple(range(of.expected)))
    return make_inputs([(row, of)], page_size=1, token_limit=token_limit).columns


def choose(logits, of):
    return choose_row(logits, columns(of, len(logits)), 0)


def changed(logits, of):
    return change(logits, columns(of, len(logits)), 0)


def append(of, token):
    of.expect(None)
    of.learn(token)


def softmax(logits):
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def histogram(logits, draws=4000, **sampling):
    counts, of = np.zeros(len(logits)), sequence(**sampling)
    for seed in range(draws):
        of.seed = seed
        counts[choose(logits, of).token] += 1
    return counts


def chi_square_is_plausible(counts, probabilities):
    """Wilson and Hilferty's normal approximation; the bound is about p = 1e-6."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom)) < 4.75


# ---------------------------------------------------------------- the law


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature):
    logits = random_logits()
    counts = histogram(logits, temperature=temperature)
    assert chi_square_is_plausible(counts, softmax(logits / np.float32(temperature)))
    assert not chi_square_is_plausible(counts, softmax(logits / np.float32(temperature * 1.3)))


def kept_by_definition(logits, top_k=0, top_p=1.0, min_p=0.0):
    """The set of tokens that survive, straight from the definitions."""
    p = softmax(logits)
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    if top_k:
        order = order[:top_k]
    mass, kept = 0.0, []
    whole = sum(p[token] for token in order)
    for token in order:
        if mass >= top_p * whole:
            break
        kept.append(token)
        mass += p[token]
    return {token for token in kept if p[token] >= min_p * p.max()}


@pytest.mark.parametrize(
    "options",
    [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 12, "top_p": 0.8}, {"top_k": 9, "top_p": 0.9, "min_p": 0.15}],
    ids=str,
)
def test_truncation_keeps_the_right_tokens_and_their_proportions(options):
    logits = random_logits(3) / 2
    kept = sorted(kept_by_definition(logits, **options))
    assert len(kept) > 2
    counts = histogram(logits, **options)
    assert set(np.flatnonzero(counts)) <= set(kept)
    probabilities = np.zeros(VOCAB)
    probabilities[kept] = softmax(logits)[kept] / softmax(logits)[kept].sum()
    assert chi_square_is_plausible(counts, probabilities)


def test_top_p_on_a_flat_distribution_keeps_exactly_its_share():
    counts = histogram(np.zeros(10, np.float32), draws=500, top_p=0.35)
    assert set(np.flatnonzero(counts)) == {0, 1, 2, 3}


def test_tiny_top_p_keeps_the_best_token():
    logits = random_logits(4)
    assert histogram(logits, draws=20, top_p=1e-9)[logits.argmax()] == 20


def test_top_k_breaks_ties_by_lower_id():
    counts = histogram(np.zeros(8, np.float32), draws=300, top_k=3)
    assert set(np.flatnonzero(counts)) == {0, 1, 2}


def test_draw_is_the_inverse_of_the_cumulative_sum():
    weights = np.array([0, 1, 0, 2, 1, 0], np.float64)
    assert [draw(weights, number) for number in (0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53)] == [1, 1, 3, 3, 4, 4]


def test_draw_survives_a_total_that_rounds_up():
    weights = np.array([1e-300, 1.0, 0.0])
    assert draw(weights, np.nextafter(1.0, 0)) == 1
    assert draw(weights, 1.0) == 1


# ---------------------------------------------------------------- greedy


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 9.9e-5])
def test_small_temperatures_are_greedy(temperature):
    logits = random_logits(5)
    assert histogram(logits, draws=20, temperature=temperature)[logits.argmax()] == 20


def test_greedy_ties_go_to_the_lowest_id():
    logits = np.array([0, 3, 1, 3, 3], np.float32)
    assert choose(logits, sequence(temperature=0)).token == 1


def test_lowest_sampling_temperature_is_finite():
    logits = random_logits(6) * 100
    assert histogram(logits, draws=5, temperature=1e-4)[logits.argmax()] == 5


# ---------------------------------------------------------------- penalties, bias, masks


def test_repetition_penalty_is_exact():
    logits = random_logits(7)
    expected = logits.copy()
    for token in (3, 5, 9):
        expected[token] = logits[token] / np.float32(1.3) if logits[token] > 0 else logits[token] * np.float32(1.3)
    assert (changed(logits, sequence((3, 5, 5, 9), prompt_count=2, repetition_penalty=1.3)) == expected).all()


def test_penalties_reach_back_to_the_beginning():
    logits = np.array([0, 0, 0, 2.0, 1.9], np.float32)
    assert choose(logits, sequence((1,) * 300, temperature=0, repetition_penalty=1.3)).token == 3
    assert choose(logits, sequence((3, *(1,) * 300), temperature=0, repetition_penalty=1.3)).token == 4


def test_presence_and_frequency_count_the_output_only():
    logits = random_logits(8)
    of = sequence((3, 5, 7, 5, 7, 7), prompt_count=2, presence_penalty=0.5, frequency_penalty=0.25)
    expected = logits.copy()
    expected[5] -= np.float32(0.5 + 0.25)
    expected[7] -= np.float32(0.5 + 0.75)
    assert (changed(logits, of) == expected).all()


def test_penalties_see_appended_tokens():
    of = sequence((3,), presence_penalty=1.0)
    for token in [4] * 200:
        append(of, token)
    logits = random_logits(9)
    assert np.flatnonzero(changed(logits, of) != logits).tolist() == [4]


def test_tokens_without_a_logit_are_no_trouble_for_penalties():
    logits = random_logits(10)
    of = sequence((3, VOCAB + 2), repetition_penalty=2.0)
    assert np.flatnonzero(changed(logits, of) != logits).tolist() == [3]


def test_bias_adds_and_ignores_ids_that_cannot_be_drawn():
    logits = random_logits(11)
    of = sequence(logit_bias=((2, 100.0), (VOCAB + 1, 100.0)), temperature=0)
    assert choose(logits, of).token == 2
    assert changed(logits, of)[2] == logits[2] + np.float32(100)


def test_min_tokens_masks_the_stops_until_enough_were_generated():
    logits = np.array([9, 8, 7, 1], np.float32)
    params = {"stop_ids": (0, 1, VOCAB + 3), "min_tokens": 2, "temperature": 0}
    of = sequence((1, 2), **params)
    taken = []
    for _ in range(3):
        taken.append(choose(logits, of).token)
        append(of, taken[-1])
    assert taken == [2, 2, 0]


def test_masked_tokens_are_never_drawn():
    logits = np.zeros(VOCAB, np.float32)
    stops = tuple(range(0, VOCAB, 2))
    counts = histogram(logits, draws=500, stop_ids=stops, min_tokens=5, temperature=5.0)
    assert counts[::2].sum() == 0


def test_nothing_left_to_choose_is_an_error_of_the_row():
    assert choose(np.zeros(4, np.float32), sequence(stop_ids=range(4), min_tokens=1)).token == NOTHING_LEFT


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_an_error_of_the_row(bad):
    logits = random_logits()
    logits[17] = bad
    assert choose(logits, sequence()).token == NOT_FINITE
    assert score_row(logits, 3, 0).token == NOT_FINITE


def test_raw_logits_are_left_as_they_are():
    logits = random_logits(12)
    before = logits.copy()
    choose(logits, sequence(repetition_penalty=1.5, top_k=3, logit_bias=((1, 5.0),), presence_penalty=1.0))
    assert (logits == before).all()


# ---------------------------------------------------------------- seeds


def test_choice_is_a_function_of_seed_and_position_only():
    logits = np.zeros(VOCAB, np.float32)
    for seed, length in [(1, 3), (2, 3), (1, 4), (2**63 - 1, 500)]:
        expected = int(uniform(seed, length) * VOCAB)
        assert choose(logits, sequence((1,) * length, prompt_count=1, seed=seed)).token == expected


# ---------------------------------------------------------------- log probabilities


def test_logprobs_are_those_of_the_raw_logits():
    logits = random_logits(13)
    of = sequence((1, 2), temperature=0.3, top_k=2, logit_bias=((7, 50.0),), logprobs=4)
    choice = choose(logits, of)
    expected = np.log(softmax(logits))
    assert choice.token == choice.logprobs.token == 7
    assert choice.logprobs.logprob == pytest.approx(expected[7], abs=1e-9)
    order = sorted(range(VOCAB), key=lambda token: -logits[token])[:4]
    assert [token for token, _ in choice.logprobs.top] == order
    assert [value for _, value in choice.logprobs.top] == pytest.approx(expected[order], abs=1e-9)


def test_zero_logprobs_report_the_token_alone():
    assert choose(random_logits(), sequence(logprobs=0)).logprobs.top == ()
    assert choose(random_logits(), sequence()).logprobs is None


def test_logprobs_of_more_tokens_than_there_are():
    assert len(token_logprobs(random_logits(), 0, VOCAB + 5).top) == VOCAB


def test_token_without_a_logit_has_no_logprob():
    assert score_row(random_logits(), VOCAB, 1).token == NO_LOGPROB


def test_heaviest_sorts_and_breaks_ties_by_id():
    values = np.array([1, 5, 3, 5, 3, 3, 0], np.float32)
    for count in range(9):
        assert heaviest(values, count).tolist() == [1, 3, 2, 4, 5, 0, 6][:count]
