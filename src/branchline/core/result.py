"""What one step did, and what the outside hears of it."""

import msgspec

from branchline.base.finish import FinishReason
from branchline.base.ids import Epoch, RequestId, SeqId, StepId, TokenId


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one token and of the most likely tokens at its position (natural log, before penalties,
    temperature and truncation, as OpenAI reports them)."""

    token: TokenId
    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()
    """Most likely first; as many as were asked for."""


class RowResult(msgspec.Struct, frozen=True, array_like=True):
    """Outcome of one plan row, in the order of the plan."""

    seq: SeqId
    epoch: Epoch
    token: TokenId | None = None
    """``None`` unless the row sampled."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """For prompt positions ``prompt_logprobs_from .. end`` of the row (position 0 has none and is left out)."""
    error: str | None = None
    """This row alone failed (logits that are not finite, for example); the sentence is safe to show."""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    step: StepId
    rows: tuple[RowResult, ...]
    duration_ns: int = 0
    """Time the worker spent in this step."""


class Usage(msgspec.Struct, frozen=True, array_like=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV was taken from the prefix cache at first admission."""


class Finish(msgspec.Struct, frozen=True, array_like=True):
    reason: FinishReason
    usage: Usage
    message: str = ""
    """For everything but ``stop`` and ``length``: a sentence that is safe to show."""
    status: int = 200
    """HTTP status that fits, for ends without success."""
    stop_token: TokenId | None = None
    """The token that ended it. It is the last of the tokens reported and not part of the text."""
    retry_after_s: int = 0
    """For a full queue: when there may be room again, an estimate; 0: none."""


class Output(msgspec.Struct, frozen=True, array_like=True):
    """News about one request. After the one with a ``finish`` there is no other."""

    request_id: RequestId
    tokens: tuple[TokenId, ...] = ()
    """New output tokens since the last news."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token if asked for, else empty."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int | None = None
    """Reported once, with the first news after admission."""
    finish: Finish | None = None
