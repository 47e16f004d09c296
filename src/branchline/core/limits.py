"""What a request may ask for: the type, range and size of every sampling field, checked before it gets a row.

A request that has passed cannot make the scheduler or a sampler raise. Knows: numbers. Refuses to know: HTTP (errors
carry the name of the field, ``api`` renders them) and the prompt (``text`` checks it).
"""

import math
from typing import Any

import msgspec

from branchline.base.errors import InvalidRequest
from branchline.core.request import SamplingParams

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
GREEDY_BELOW = 1e-4
"""A temperature below this is greedy: dividing by it would only overflow."""

_SEED_MASK = (1 << 64) - 1
_FLOATS: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 10.0),
)
_ABOVE_ZERO = frozenset({"top_p", "repetition_penalty"})


def check_sampling(params: SamplingParams, *, vocab_size: int, context_length: int) -> None:
    """Raise InvalidRequest, with ``param`` naming the field, unless every field is usable.

    ``vocab_size`` counts the ids that stand for a token (padding of the embedding table left out), ``context_length``
    is in tokens. ``max_tokens`` may exceed the context: it is clamped later, not refused.
    """
    for name, low, high in _FLOATS:
        _check_float(name, getattr(params, name), low, high)
    _check_counts(params, context_length)
    _check_seed(params.seed)
    _check_stops(params.stop)
    _check_stop_tokens(params.stop_token_ids, vocab_size)
    _check_logit_bias(params.logit_bias, vocab_size)
    if not isinstance(params.ignore_eos, bool):
        raise InvalidRequest(f"ignore_eos must be true or false, not {params.ignore_eos!r}.", param="ignore_eos")


def settle_sampling(params: SamplingParams) -> SamplingParams:
    """One spelling for equal wishes, of checked parameters: ``top_k`` -1 becomes 0, a temperature that is as good as
    greedy becomes 0, a seed becomes its 64-bit two's complement, read as unsigned."""
    return msgspec.structs.replace(
        params,
        top_k=max(params.top_k, 0),
        temperature=0.0 if params.temperature < GREEDY_BELOW else params.temperature,
        seed=None if params.seed is None else params.seed & _SEED_MASK,
    )


def _check_counts(params: SamplingParams, context_length: int) -> None:
    _check_int("top_k", params.top_k, -1, None)
    _check_int("min_tokens", params.min_tokens, 0, context_length)
    if params.max_tokens is not None:
        _check_int("max_tokens", params.max_tokens, 1, None)
        if params.min_tokens > params.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({params.min_tokens}) must not be larger than max_tokens ({params.max_tokens}).",
                param="min_tokens",
            )
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _check_int(name, getattr(params, name), 0, MAX_LOGPROBS)


def _check_seed(seed: Any) -> None:
    if seed is not None and not (_is_int(seed) and -(1 << 63) <= seed <= _SEED_MASK):
        raise InvalidRequest("seed must be an integer of 64 bits.", param="seed")


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop may hold at most {MAX_STOPS} strings, not {len(stops)}.", param="stop")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"Each stop must be a string of 1 to {MAX_STOP_CHARS} characters.", param="stop")
        if any("\ud800" <= char <= "\udfff" for char in stop):
            raise InvalidRequest("A stop string holds half of a surrogate pair, which is not a character.", param="stop")


def _check_stop_tokens(tokens: tuple[int, ...], vocab_size: int) -> None:
    name = "stop_token_ids"
    if len(tokens) > MAX_STOP_TOKENS:
        raise InvalidRequest(f"{name} may hold at most {MAX_STOP_TOKENS} ids, not {len(tokens)}.", param=name)
    for token in tokens:
        _check_token(name, token, vocab_size)


def _check_logit_bias(biases: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    name = "logit_bias"
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidRequest(f"{name} may hold at most {MAX_LOGIT_BIASES} entries, not {len(biases)}.", param=name)
    for token, bias in biases:
        _check_token(name, token, vocab_size)
        _check_float(name, bias, -100.0, 100.0)


def _check_token(name: str, token: Any, vocab_size: int) -> None:
    if not _is_int(token) or not 0 <= token < vocab_size:
        raise InvalidRequest(f"{name} names token {token!r}, but ids run from 0 to {vocab_size - 1}.", param=name)


def _check_float(name: str, value: Any, low: float, high: float) -> None:
    above_low = _is_number(value) and (value > low if name in _ABOVE_ZERO else value >= low)
    if not above_low or not value <= high:
        words = f"above {low:g} and at most {high:g}" if name in _ABOVE_ZERO else f"between {low:g} and {high:g}"
        raise InvalidRequest(f"{name} must be {words}, not {value!r}.", param=name)


def _check_int(name: str, value: Any, low: int, high: int | None) -> None:
    if not _is_int(value) or value < low or (high is not None and value > high):
        words = f"of at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{name} must be an integer {words}, not {value!r}.", param=name)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))
