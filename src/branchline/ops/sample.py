"""From logits to a token: a list of small steps over one row after another. The oracle of ``native/sample.cpp``.

A row is always handled by itself, so its outcome cannot depend on its neighbours, not even in the last bit. The only
random number is ``base.rng.uniform(seed, position of the new token)``.

    finite? -> LOGIT_STEPS change the logits -> greedy, or: weights = exp((logits - max) / temperature)
            -> WEIGHT_STEPS strike weights out -> inverse of the cumulative sum, tokens in the order of their ids

Knows: the formulas. Refuses to know: executors, sequences, where columns come from.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np

from branchline.base.ids import TokenId
from branchline.base.rng import uniform
from branchline.core.result import TokenLogprobs
from branchline.memory.kv import FloatArray, IntArray
from branchline.ops.batch import NO_LOGPROB, NOT_FINITE, NOTHING_LEFT, Choice, Choices, DoubleArray, SamplingColumns

GREEDY_BELOW = 1e-4
"""Temperatures under this are greedy: dividing by them says nothing that the maximum does not say."""
SMALLEST = np.finfo(np.float32).tiny
"""Of the repetition penalties: a smaller one would make NaN of a logit."""


# ---------------------------------------------------------------- steps on logits (float32 [usable ids], in place)


def apply_mask(logits: FloatArray, columns: SamplingColumns, row: int) -> None:
    allowed = np.unpackbits(columns.mask[row].view(np.uint8), bitorder="little")[: len(logits)]
    logits[allowed == 0] = -np.inf


def forbid(logits: FloatArray, columns: SamplingColumns, row: int) -> None:
    logits[columns.forbidden[row]] = -np.inf


def add_bias(logits: FloatArray, columns: SamplingColumns, row: int) -> None:
    np.add.at(logits, columns.bias_ids[row], columns.bias_values[row])


def penalise_repetition(logits: FloatArray, columns: SamplingColumns, row: int) -> None:
    """CTRL's penalty on every token of prompt and output (Keskar et al. 2019)."""
    penalty = max(np.float32(columns.repetition_penalty[row]), SMALLEST)
    seen = np.unique(columns.known[row])
    seen = seen[seen < len(logits)]
    values = logits[seen]
    logits[seen] = np.where(values > 0, values / penalty, values * penalty)


def penalise_output(logits: FloatArray, columns: SamplingColumns, row: int) -> None:
    """OpenAI's presence and frequency penalties, on the output alone."""
    output = columns.known[row][columns.prompt_count[row] :]
    seen, counts = np.unique(output[output < len(logits)], return_counts=True)
    penalties = columns.presence_penalty[row] + columns.frequency_penalty[row] * counts
    logits[seen] -= penalties.astype(np.float32)


def keep_top_k(logits: FloatArray, columns: SamplingColumns, row: int) -> None:
    """The k most likely tokens; of equal ones those with lower ids."""
    _keep(logits, heaviest(logits, int(columns.top_k[row])), -np.inf)


def _keep(numbers: FloatArray | DoubleArray, kept: IntArray, other: float) -> None:
    values = numbers[kept]
    numbers[:] = other
    numbers[kept] = values


# ---------------------------------------------------------------- steps on weights (float64 [usable ids], in place)


def keep_top_p(weights: DoubleArray, columns: SamplingColumns, row: int) -> None:
    """The fewest heaviest tokens that together reach the share ``top_p`` (Holtzman et al. 2020), at least one."""
    top_p, total = columns.top_p[row], weights.sum()
    # All tokens below this bound together weigh less than 1 - top_p: none of them can be needed.
    candidates = np.flatnonzero(weights >= total * (1 - top_p) / len(weights))
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    reached = np.cumsum(weights[order])
    _keep(weights, order[: int(np.searchsorted(reached, top_p * total)) + 1], 0)


def keep_min_p(weights: DoubleArray, columns: SamplingColumns, row: int) -> None:
    """Tokens at least ``min_p`` times as likely as the most likely one (Nguyen et al. 2024)."""
    weights[weights < columns.min_p[row] * weights.max()] = 0


Wanted: TypeAlias = Callable[[SamplingColumns, int], bool]
LogitStep: TypeAlias = tuple[Wanted, Callable[[FloatArray, SamplingColumns, int], None]]
WeightStep: TypeAlias = tuple[Wanted, Callable[[DoubleArray, SamplingColumns, int], None]]

LOGIT_STEPS: tuple[LogitStep, ...] = (
    (lambda of, row: len(of.mask[row]) > 0, apply_mask),
    (lambda of, row: len(of.forbidden[row]) > 0, forbid),
    (lambda of, row: len(of.bias_ids[row]) > 0, add_bias),
    (lambda of, row: of.repetition_penalty[row] != 1, penalise_repetition),
    (lambda of, row: of.presence_penalty[row] != 0 or of.frequency_penalty[row] != 0, penalise_output),
    (lambda of, row: of.top_k[row] > 0, keep_top_k),
)
"""When a step is wanted, and the step."""

WEIGHT_STEPS: tuple[WeightStep, ...] = (
    (lambda of, row: of.top_p[row] < 1, keep_top_p),
    (lambda of, row: of.min_p[row] > 0, keep_min_p),
)


# ---------------------------------------------------------------- rows


def choose(logits: FloatArray, columns: SamplingColumns) -> Choices:
    """The next token of each row from its raw ``logits [rows, usable ids]``, which are left as they are."""
    return gather(choose_row(numbers, columns, row) for row, numbers in enumerate(logits))


def choose_row(logits: FloatArray, columns: SamplingColumns, row: int) -> Choice:
    if not np.isfinite(logits).all():
        return Choice(NOT_FINITE)
    token = _pick(change(logits, columns, row), columns, row)
    top = int(columns.logprobs[row])
    return Choice(token, None if token < 0 or top < 0 else token_logprobs(logits, token, top))


def score_row(logits: FloatArray, token: TokenId, top: int) -> Choice:
    """Log probability of ``token`` and of the ``top`` most likely tokens under the raw ``logits [usable ids]``."""
    if not np.isfinite(logits).all():
        return Choice(NOT_FINITE)
    return Choice(token, token_logprobs(logits, token, top)) if token < len(logits) else Choice(NO_LOGPROB)


def gather(choices: Iterable[Choice]) -> Choices:
    rows = list(choices)
    tops = [row.logprobs.top if row.logprobs else () for row in rows]
    shape = len(rows), max(map(len, tops), default=0)
    tokens, logprobs = np.full(shape, -1, np.intp), np.full(shape, np.nan)
    for row, top in enumerate(tops):
        for place, (token, logprob) in enumerate(top):
            tokens[row, place], logprobs[row, place] = token, logprob
    chosen = np.array([row.token for row in rows], np.intp)
    return Choices(chosen, np.array([row.logprobs.logprob if row.logprobs else np.nan for row in rows]), tokens, logprobs)


def change(logits: FloatArray, columns: SamplingColumns, row: int) -> FloatArray:
    """The logits after all steps that are wanted: the array itself if none is, else another."""
    steps = [step for wanted, step in LOGIT_STEPS if wanted(columns, row)]
    if steps:
        logits = logits.copy()
    with np.errstate(over="ignore"):  # what becomes infinite is not chosen, or fails its own row
        for step in steps:
            step(logits, columns, row)
    return logits


def _pick(logits: FloatArray, columns: SamplingColumns, row: int) -> TokenId:
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        return NOTHING_LEFT
    if columns.temperature[row] < GREEDY_BELOW:
        return best
    return draw(weigh(logits, columns, row), uniform(int(columns.seed[row]), int(columns.position[row])))


def weigh(logits: FloatArray, columns: SamplingColumns, row: int) -> DoubleArray:
    """Weights ``[usable ids]`` by which a token is drawn, from logits that were changed."""
    weights: DoubleArray = np.exp((logits.astype(np.float64) - logits.max()) * (1 / columns.temperature[row]))
    for wanted, step in WEIGHT_STEPS:
        if wanted(columns, row):
            step(weights, columns, row)
    return weights


def draw(weights: DoubleArray, number: float) -> TokenId:
    """Inverse of the cumulative distribution at ``number`` in ``[0, 1)``. Weights of 0 are never drawn."""
    reached = np.cumsum(weights)
    token = int(np.searchsorted(reached, number * reached[-1], side="right"))
    # Rounding may bring number * total up to the total itself: then it is the last token of any weight.
    return token if token < len(weights) else int(np.flatnonzero(weights)[-1])


# ---------------------------------------------------------------- log probabilities


def token_logprobs(logits: FloatArray, token: TokenId, top: int) -> TokenLogprobs:
    """Log probability of ``token`` and of the ``top`` most likely tokens under the raw, finite ``logits [usable ids]``."""
    wide = logits.astype(np.float64)
    peak = wide.max()
    wide -= peak + np.log(np.exp(wide - peak).sum())
    best = heaviest(logits, top)
    return TokenLogprobs(token, float(wide[token]), tuple((int(one), float(wide[one])) for one in best))


def heaviest(values: FloatArray | DoubleArray, count: int) -> IntArray:
    """Indices of the ``count`` largest numbers, largest first, of equal ones the lower index first."""
    count = min(count, len(values))
    if count == 0:
        return np.zeros(0, np.intp)
    border = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > border)
    equal = np.flatnonzero(values == border)[: count - len(above)]
    return np.concatenate([above[np.argsort(-values[above], kind="stable")], equal])
