"""The text side of an engine: every client message and every engine message goes through here, and nothing else does.

Knows which requests are live and what text each has. Messages in, messages out, as values: no sockets, no threads, no
clock. The slow part, :meth:`TextSide.prepare`, is pure and may run in any thread; everything else belongs to one loop
and is quick. A request passes through

    prepare(Generate) ─▶ Prepared ─▶ admit ─▶ Started + Submit ─▶ hear(Outputs) ... ─▶ Ended
                     └─▶ Refused                                  └ cancel, stop string ─▶ Ended + Cancel

and stays in the map until the engine's own finish has come, so that what the engine still sends finds it there and is
swallowed. Messages about unknown requests are counted and dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from branchline.base.errors import InvalidRequest, RequestError
from branchline.base.finish import FinishReason
from branchline.base.ids import RequestId, TokenId
from branchline.core.limits import check_sampling, settle_sampling
from branchline.core.request import Namespace, RequestSpec, SamplingParams
from branchline.text.prompts import PromptReader
from branchline.text.stream import TextStream
from branchline.text.template import Template
from branchline.text.tokenizer import Tokenizer
from branchline.wire.messages import (
    Ask,
    Cancel,
    CancelText,
    Control,
    Controlled,
    Detokenize,
    Detokenized,
    Ended,
    FromEngine,
    Generate,
    Heartbeat,
    ModelFacts,
    Outputs,
    Pin,
    PinTokens,
    Refused,
    Started,
    Submit,
    ToClient,
    ToEngine,
    Tokenize,
    Tokenized,
    TokenPrompt,
    Told,
    ToText,
)


@dataclass(frozen=True, slots=True)
class Effects:
    """What shall be sent, in order."""

    to_client: tuple[ToClient, ...] = ()
    to_engine: tuple[ToEngine, ...] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is in order: tokenized, its parameters checked and settled."""

    request: Generate
    sampling: SamplingParams
    prompt: tuple[TokenId, ...]
    prompt_text: str


Slow: TypeAlias = Generate | Tokenize | Detokenize | Pin
"""Messages whose work takes time that grows with their text."""
Answer: TypeAlias = Prepared | Refused | Tokenized | Detokenized | PinTokens


class TextSide:
    def __init__(self, tokenizer: Tokenizer, template: Template, facts: ModelFacts, *, draw_seed: Callable[[], int]) -> None:
        self._tokenizer = tokenizer
        self._reader = PromptReader(tokenizer, template, facts)
        self._facts = facts
        self._draw_seed = draw_seed
        self._streams: dict[RequestId, TextStream] = {}
        self._dropped_count = 0

    @property
    def live_count(self) -> int:
        """Requests whose engine side is not known to be over."""
        return len(self._streams)

    @property
    def dropped_count(self) -> int:
        """Messages about requests that nobody knows."""
        return self._dropped_count

    def is_live(self, request_id: RequestId) -> bool:
        """Whether its ``Ended`` is still to come."""
        stream = self._streams.get(request_id)
        return stream is not None and not stream.has_ended

    # -------------------------------------------------------------------------------------------- client side

    def handle(self, message: ToText) -> Effects:
        """Everything at once, for callers without threads."""
        return self.admit(self.prepare(message)) if isinstance(message, Slow) else self.act(message)

    def prepare(self, message: Slow) -> Answer:
        """The slow part of a message. Touches no state: safe in any thread, several at a time."""
        try:
            if isinstance(message, Generate):
                return self._prepare(message)
            if isinstance(message, Tokenize):
                tokens = self._reader.tokens(message.prompt, add_special=message.add_special_tokens, param="prompt")
                pieces = tuple(self._tokenizer.token_text(token) for token in tokens)
                return Tokenized(call_id=message.call_id, tokens=tuple(tokens), pieces=pieces)
            if isinstance(message, Pin):
                return self._pin(message)
            return self._detokenize(message)
        except RequestError as error:
            return refusal(key_of(message), error)

    def admit(self, answer: Answer) -> Effects:
        """Send an answer, or let a prepared request in."""
        if isinstance(answer, PinTokens):
            return Effects(to_engine=(answer,))
        if not isinstance(answer, Prepared):
            return Effects(to_client=(answer,))
        request = answer.request
        if request.request_id in self._streams:
            error = InvalidRequest("A request with this id is still running.", param="request_id")
            return Effects(to_client=(refusal(request.request_id, error),))
        self._streams[request.request_id] = TextStream(self._tokenizer, request, answer.prompt)
        started = Started(request.request_id, len(answer.prompt), answer.prompt_text)
        return Effects(to_client=(started,), to_engine=(Submit(self._spec(answer)),))

    def act(self, message: CancelText | Control | Ask) -> Effects:
        """The messages that need no preparation."""
        if isinstance(message, Control | Ask):
            return Effects(to_engine=(message,))
        stream = self._streams.get(message.request_id)
        if stream is None or stream.has_ended:
            self._dropped_count += stream is None
            return Effects()
        ended = stream.end(FinishReason.CANCELLED, message="The request was cancelled.", status=499)
        return Effects(to_client=(ended,), to_engine=(Cancel(message.request_id),))

    # -------------------------------------------------------------------------------------------- engine side

    def hear(self, message: FromEngine) -> Effects:
        if isinstance(message, Outputs):
            return self._hear_outputs(message)
        if isinstance(message, Heartbeat):
            return Effects(to_client=(msgspec.structs.replace(message, live_texts=self.live_count),))
        if isinstance(message, Controlled | Told):
            return Effects(to_client=(message,))
        return Effects()  # ModelFacts: they were known before this object could be built

    def abandon(self, message: str) -> Effects:
        """The engine is gone: every request ends now, and nothing more is heard of any."""
        streams, self._streams = self._streams, {}
        return Effects(
            to_client=tuple(
                stream.end(FinishReason.ERROR, message=message, status=503)
                for stream in streams.values()
                if not stream.has_ended
            )
        )

    # -------------------------------------------------------------------------------------------- parts

    def _prepare(self, message: Generate) -> Prepared:
        check_sampling(message.sampling, vocab_size=self._reader.vocab_size, context_length=self._facts.context_length)
        prompt = self._reader.for_generation(message.prompt, add_special=message.add_special_tokens, param=message.param)
        text = self._tokenizer.decode(prompt, skip_special=message.skip_special_tokens) if message.echo else ""
        return Prepared(message, settle_sampling(message.sampling), tuple(prompt), text)

    def _detokenize(self, message: Detokenize) -> Detokenized:
        tokens = self._reader.tokens(TokenPrompt(message.tokens), add_special=False, param="tokens")
        return Detokenized(call_id=message.call_id, text=self._tokenizer.decode(tokens, skip_special=False))

    def _pin(self, message: Pin) -> PinTokens:
        tokens = self._reader.tokens(message.prompt, add_special=message.add_special_tokens, param="prompt")
        namespace = Namespace(model=self._facts.digest, tenant=message.tenant, salt=message.salt)
        return PinTokens(call_id=message.call_id, namespace=namespace, tokens=tuple(tokens), seconds=message.seconds)

    def _spec(self, prepared: Prepared) -> RequestSpec:
        request, sampling = prepared.request, prepared.sampling
        room = self._reader.context - len(prepared.prompt)
        return RequestSpec(
            request_id=request.request_id,
            prompt=prepared.prompt,
            sampling=sampling,
            max_new_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
            seed=self._draw_seed() if sampling.seed is None else sampling.seed,
            eos_token_ids=() if sampling.ignore_eos else self._tokenizer.eos_ids,
            namespace=Namespace(model=self._facts.digest, tenant=request.tenant, salt=request.salt),
            priority=request.priority,
            user=request.user,
            timeout_s=request.timeout_s,
            group=request.group,
        )

    def _hear_outputs(self, message: Outputs) -> Effects:
        to_client: list[ToClient] = []
        to_engine: list[ToEngine] = []
        for output in message.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                self._dropped_count += 1
                continue
            news = stream.hear(output)
            if news is not None:
                to_client.append(news)
            if output.finish is not None:
                del self._streams[output.request_id]
            elif isinstance(news, Ended):
                to_engine.append(Cancel(output.request_id, FinishReason.STOP))
        return Effects(tuple(to_client), tuple(to_engine))


def key_of(message: Slow | CancelText | Control | Ask) -> str:
    """The id an answer to ``message`` carries."""
    return message.request_id if isinstance(message, Generate | CancelText) else message.call_id


def refusal(key: str, error: RequestError) -> Refused:
    return Refused(key, error.message, error.status, error.kind, error.code, error.param)
