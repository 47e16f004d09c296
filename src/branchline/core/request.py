"""What a request asks for, frozen at the edge and never changed afterwards.

Knows: prompt tokens, sampling, namespace, priority. Refuses to know: how far its computation has come
(``sched.lifecycle`` alone does) and what its text looks like (``text`` does).
"""

import msgspec

from branchline.base.ids import RequestId, TokenId


class Namespace(msgspec.Struct, frozen=True, array_like=True):
    """What must be equal besides the tokens before two requests may share KV. A typed tuple, never a joined string."""

    model: str = ""
    """Digest of weights, tokenizer and everything else that changes K and V."""
    adapter: str = ""
    tenant: str = ""
    """From the API key, never from the body."""
    salt: str = ""
    """From the client; it can only narrow sharing."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. Ranges are checked by :func:`branchline.core.limits.check_sampling`."""

    max_tokens: int | None = None
    """New tokens at most; ``None``: as many as the context leaves. Always clamped to the context."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are masked until so many tokens were generated."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of every token in prompt or output (Keskar et al. 2019, CTRL)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output."""
    logit_bias: tuple[tuple[TokenId, float], ...] = ()
    seed: int | None = None
    """``None``: the edge draws one, so that a spec always has a number."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    """Do not end at the model's end-of-sequence tokens; the client's own ``stop_token_ids`` still end it."""
    logprobs: int | None = None
    """``None``: none; k: log probability of each output token and of the k most likely ones."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens. It makes the whole prompt be computed, whatever is cached."""


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the scheduler receives it: whole at birth, of valid ranges."""

    request_id: RequestId
    prompt: tuple[TokenId, ...]
    """At least one token."""
    sampling: SamplingParams
    max_new_tokens: int
    """``sampling.max_tokens`` clamped to the context; at least 1."""
    seed: int
    eos_token_ids: tuple[TokenId, ...] = ()
    """The model's end-of-sequence tokens; empty under ``ignore_eos``."""
    namespace: Namespace = Namespace()
    priority: int = 0
    group: RequestId = ""
    """Common to the choices of one API call (``n`` > 1, a list of prompts); empty for a lone request."""
    user: str = ""
    """For whom the client says it asks. Never part of the namespace."""
    timeout_s: float | None = None
    """From arrival to the last token; ``None``: as long as the server allows."""

    @property
    def payer(self) -> str:
        """Whose share of the engine it uses: the tenant of the API key, or without keys the client's ``user``."""
        return self.namespace.tenant or self.user

    @property
    def stop_ids(self) -> frozenset[TokenId]:
        """Tokens that end the output: the model's and the client's."""
        return frozenset(self.eos_token_ids) | frozenset(self.sampling.stop_token_ids)
