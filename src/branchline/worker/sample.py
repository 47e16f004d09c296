"""From logits to a token: a list of small steps over one row after another.

A row is always handled by itself, so its outcome cannot depend on its neighbours, not even in the last bit. The only
random number is ``base.rng.uniform(seed, position of the new token)``.

    finite? -> LOGIT_STEPS change the logits -> greedy, or: weights = exp((logits - max) / temperature)
            -> WEIGHT_STEPS strike weights out -> inverse of the cumulative sum, tokens in the order of their ids

Knows: the formulas. Refuses to know: executors, plans, when a sequence ends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from branchline.base.ids import TokenId
from branchline.base.rng import uniform
from branchline.core.request import SamplingParams
from branchline.core.result import TokenLogprobs
from branchline.memory.kv import FloatArray, IntArray
from branchline.worker.slots import Sequence

GREEDY_BELOW = 1e-4
"""Temperatures under this are greedy: dividing by them says nothing that the maximum does not say."""

NOT_FINITE = "The model produced numbers that are not finite."

Weights: TypeAlias = npt.NDArray[np.float64]


class RowFailed(Exception):
    """No token can be chosen for this row; the sentence is safe to show. Caught by the runner."""


# ---------------------------------------------------------------- steps on logits (float32 [vocab], in place)


def mask_stops(logits: FloatArray, sequence: Sequence) -> None:
    """``min_tokens``: the output may not end yet."""
    logits[sequence.stop_ids] = -np.inf


def add_bias(logits: FloatArray, sequence: Sequence) -> None:
    np.add.at(logits, sequence.bias_ids, sequence.bias_values)


def penalise_repetition(logits: FloatArray, sequence: Sequence) -> None:
    """CTRL's penalty on every token of prompt and output (Keskar et al. 2019)."""
    penalty = np.float32(sequence.sampling.repetition_penalty)
    seen = np.unique(sequence.tokens)
    seen = seen[seen < len(logits)]
    values = logits[seen]
    logits[seen] = np.where(values > 0, values / penalty, values * penalty)


def penalise_output(logits: FloatArray, sequence: Sequence) -> None:
    """OpenAI's presence and frequency penalties, on the output alone."""
    params = sequence.sampling
    seen, counts = np.unique(sequence.tokens[sequence.prompt_count :], return_counts=True)
    logits[seen] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)


# ---------------------------------------------------------------- steps on weights (float64 [vocab], in place)


def keep_top_k(weights: Weights, params: SamplingParams) -> None:
    """The k heaviest tokens; of equal ones those with lower ids."""
    kept = heaviest(weights, params.top_k)
    values = weights[kept]
    weights[:] = 0
    weights[kept] = values


def keep_top_p(weights: Weights, params: SamplingParams) -> None:
    """The fewest heaviest tokens that together reach the share ``top_p`` (Holtzman et al. 2020), at least one."""
    total = weights.sum()
    # All tokens below this bound together weigh less than 1 - top_p: none of them can be needed.
    candidates = np.flatnonzero(weights >= total * (1 - params.top_p) / len(weights))
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    reached = np.cumsum(weights[order])
    kept = order[: int(np.searchsorted(reached, params.top_p * total)) + 1]
    values = weights[kept]
    weights[:] = 0
    weights[kept] = values


def keep_min_p(weights: Weights, params: SamplingParams) -> None:
    """Tokens at least ``min_p`` times as likely as the most likely one (Nguyen et al. 2024)."""
    weights[weights < params.min_p * weights.max()] = 0


LogitStep: TypeAlias = tuple[Callable[[Sequence], bool], Callable[[FloatArray, Sequence], None]]
WeightStep: TypeAlias = tuple[Callable[[SamplingParams], bool], Callable[[Weights, SamplingParams], None]]

LOGIT_STEPS: tuple[LogitStep, ...] = (
    (lambda of: of.generated_count < of.sampling.min_tokens and len(of.stop_ids) > 0, mask_stops),
    (lambda of: len(of.bias_ids) > 0, add_bias),
    (lambda of: of.sampling.repetition_penalty != 1, penalise_repetition),
    (lambda of: of.sampling.presence_penalty != 0 or of.sampling.frequency_penalty != 0, penalise_output),
)
"""When a step is wanted, and the step."""

WEIGHT_STEPS: tuple[WeightStep, ...] = (
    (lambda params: params.top_k > 0, keep_top_k),
    (lambda params: params.top_p < 1, keep_top_p),
    (lambda params: params.min_p > 0, keep_min_p),
)


# ---------------------------------------------------------------- a whole row


@dataclass(frozen=True, slots=True)
class Choice:
    token: TokenId | None
    logprobs: TokenLogprobs | None


NOTHING = Choice(None, None)
"""The choice of a row that does not sample."""


Head: TypeAlias = int | FloatArray
"""What the output head says about a row: its best token (-1: not finite), or its logits."""


def wants_only_the_best(sequence: Sequence) -> bool:
    """The next token is that of the largest raw logit and nothing else is asked for: nobody needs to see the logits."""
    params = sequence.sampling
    greedy = params.temperature < GREEDY_BELOW and params.logprobs is None
    return greedy and not any(wanted(sequence) for wanted, _ in LOGIT_STEPS)


def decide(head: Head, sequence: Sequence) -> Choice:
    """The next token of a sequence.

    Raises:
        RowFailed: the logits are not finite, or nothing is left to choose from.
    """
    if not isinstance(head, int):
        return choose(head, sequence)
    if head < 0:
        raise RowFailed(NOT_FINITE)
    return Choice(head, None)


def choose(logits: FloatArray, sequence: Sequence) -> Choice:
    """The next token of a sequence from its raw ``logits [usable ids]``, which are left as they are.

    Raises:
        RowFailed: the logits are not finite, or nothing is left to choose from.
    """
    require_finite(logits)
    token = _pick(_changed(logits, sequence), sequence)
    top = sequence.sampling.logprobs
    return Choice(token, None if top is None else token_logprobs(logits, token, top))


def require_finite(numbers: FloatArray) -> None:
    """Raises RowFailed if one is NaN or infinite."""
    if not np.isfinite(numbers).all():
        raise RowFailed(NOT_FINITE)


def _changed(logits: FloatArray, sequence: Sequence) -> FloatArray:
    steps = [step for wanted, step in LOGIT_STEPS if wanted(sequence)]
    if steps:
        logits = logits.copy()
    for step in steps:
        step(logits, sequence)
    return logits


def _pick(logits: FloatArray, sequence: Sequence) -> TokenId:
    params = sequence.sampling
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        raise RowFailed("Every token is forbidden by min_tokens, logit_bias or penalties.")
    if params.temperature < GREEDY_BELOW:
        return best
    weights = np.exp((logits - logits[best]).astype(np.float64) / params.temperature)
    for wanted, step in WEIGHT_STEPS:
        if wanted(params):
            step(weights, params)
    return draw(weights, uniform(sequence.seed, sequence.known_count))


def draw(weights: Weights, number: float) -> TokenId:
    """Inverse of the cumulative distribution at ``number`` in ``[0, 1)``. Weights of 0 are never drawn."""
    reached = np.cumsum(weights)
    token = int(np.searchsorted(reached, number * reached[-1], side="right"))
    # Rounding may bring number * total up to the total itself: then it is the last token of any weight.
    return token if token < len(weights) else int(np.flatnonzero(weights)[-1])


# ---------------------------------------------------------------- log probabilities


def token_logprobs(logits: FloatArray, token: TokenId, top: int) -> TokenLogprobs:
    """Log probability of ``token`` and of the ``top`` most likely tokens under the raw, finite ``logits [usable ids]``.

    Raises:
        RowFailed: the token is none of the usable ids.
    """
    if token >= len(logits):
        raise RowFailed(f"Token {token} has no log probability.")
    wide = logits.astype(np.float64)
    peak = wide.max()
    wide -= peak + np.log(np.exp(wide - peak).sum())
    best = heaviest(logits, top)
    return TokenLogprobs(token, float(wide[token]), tuple((int(one), float(wide[one])) for one in best))


def heaviest(values: FloatArray | Weights, count: int) -> IntArray:
    """Indices of the ``count`` largest numbers, largest first, of equal ones the lower index first."""
    count = min(count, len(values))
    if count == 0:
        return np.zeros(0, np.intp)
    border = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > border)
    equal = np.flatnonzero(values == border)[: count - len(above)]
    return np.concatenate([above[np.argsort(-values[above], kind="stable")], equal])
