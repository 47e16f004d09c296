"""The engine without a server: `LLM` runs the same loop in a thread of this process.

Knows: threads and queues. Refuses to know: sockets; how text becomes tokens (`text.side`), how plans are made (`sched`).
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec

from branchline.base.clock import MonotonicClock
from branchline.base.config import EngineConfig, Environment
from branchline.base.errors import EngineDead, InvalidRequest, RequestError
from branchline.base.finish import FinishReason
from branchline.base.ids import RequestId, TokenId
from branchline.core.request import SamplingParams
from branchline.core.stats import EngineStats
from branchline.engine.build import Engine, announce, build_engine
from branchline.models.source import open_checkpoint
from branchline.text.build import build_text_side
from branchline.text.side import Effects
from branchline.wire.inproc import InprocInbox, InprocOutbox
from branchline.wire.messages import (
    CancelText,
    ChatPrompt,
    Delta,
    Ended,
    FromEngine,
    Generate,
    ModelFacts,
    Prompt,
    Refused,
    TextLogprob,
    TextPrompt,
    ToClient,
    Tokenize,
    Tokenized,
    TokenPrompt,
)

ANSWER_TIMEOUT_S = 1.0
"""How often a waiting caller looks whether the engine thread still lives."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one prompt."""

    text: str
    finish_reason: str
    """``stop`` or ``length``."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values were in the prefix cache."""
    logprobs: tuple[TextLogprob, ...] = ()
    prompt_logprobs: tuple[TextLogprob, ...] = ()


@dataclass(slots=True)
class _Draft:
    """A completion in the making."""

    text: list[str]
    logprobs: list[TextLogprob]
    prompt_logprobs: list[TextLogprob]


class LLM:
    """An engine in this process. Use it as a context manager, or call :meth:`close`.

        with LLM() as llm:
            print(llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8)).text)

    Args:
        model: GGUF file, Hugging Face folder, ``hf:org/name`` or nothing for the embedded default.
        settings: fields of :class:`branchline.base.config.EngineConfig`.

    Raises:
        ModelError: the model cannot be found, read or run.
        ConfigError: settings out of range.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        config = EngineConfig(model=model, **settings)
        cache_dir = Environment.read().cache_dir
        checkpoint = open_checkpoint(model, cache_dir, announce)
        self._events: queue.SimpleQueue[FromEngine] = queue.SimpleQueue()
        self._inbox = InprocInbox()
        outbox = InprocOutbox(self._events.put)
        self._engine: Engine = build_engine(
            config, cache_dir=cache_dir, inbox=self._inbox, outbox=outbox, clock=MonotonicClock(), checkpoint=checkpoint
        )
        self._text = build_text_side(checkpoint, self._engine.facts)
        self._next_id = 1
        self._pending: tuple[ToClient, ...] = ()
        """What the text side has said and nobody has read yet."""
        self._thread = threading.Thread(target=self._run, name="branchline-loop", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ calls

    def generate(
        self,
        prompts: str | Sequence[TokenId] | Sequence[str] | Sequence[Sequence[TokenId]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> Any:
        """Complete one prompt (a string or a list of token ids: returns a :class:`Completion`) or many at once (a list
        of either: returns a list). Many are submitted together and share what prefixes they have in common.

        Args:
            sampling: one for all, or one for each prompt.
            progress: called with (finished, total) as prompts finish; ``engine.offline.progress_bar`` draws one.

        Raises:
            RequestError: a prompt or a parameter is not valid; nothing is generated then.
            EngineDead: the engine failed.
        """
        many, singular = _as_prompts(prompts)
        completions = self._complete(many, _as_list(sampling, len(many)), progress)
        return completions[0] if singular else completions

    def chat(self, messages: Sequence[dict[str, Any]], sampling: SamplingParams | None = None) -> Completion:
        """Answer a conversation: dictionaries with ``role`` and ``content``."""
        return self._complete([ChatPrompt(messages=tuple(messages))], [sampling or SamplingParams()], None)[0]

    def stream(
        self, prompt: str | Sequence[TokenId] | Sequence[dict[str, Any]], sampling: SamplingParams | None = None
    ) -> Iterator[str]:
        """Text as it is generated. A list of dictionaries is a conversation. Leaving the iterator early cancels."""
        request = self._request(_as_any_prompt(prompt), sampling or SamplingParams(), group="")
        ended = False
        try:
            self._act(self._text.handle(request))
            while not ended:
                for event in self._news():
                    ended = ended or isinstance(event, Ended)
                    if isinstance(event, Delta | Ended) and event.text:
                        yield event.text
                    _raise_failure(event)
        finally:
            if not ended:
                self._cancel([request.request_id])

    def tokenize(self, text: str) -> list[TokenId]:
        """Token ids of a text, with the special tokens that begin a prompt."""
        answer = self._text.prepare(Tokenize(call_id="tokenize", prompt=TextPrompt(text)))
        _raise_failure(answer)
        return list(answer.tokens) if isinstance(answer, Tokenized) else []

    @property
    def facts(self) -> ModelFacts:
        return self._engine.facts

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def close(self) -> None:
        """Stop the engine and give its memory back. Idempotent."""
        self._engine.stop()
        self._inbox.wake()
        self._thread.join()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------ inner

    def _run(self) -> None:
        self._engine.run()

    def _complete(
        self, prompts: Sequence[Prompt], samplings: Sequence[SamplingParams], progress: Callable[[int, int], None] | None
    ) -> list[Completion]:
        group = f"offline-{self._next_id}"
        requests = [self._request(p, s, group) for p, s in zip(prompts, samplings, strict=True)]
        drafts = {request.request_id: _Draft([], [], []) for request in requests}
        done: dict[RequestId, Completion] = {}
        try:
            for effects in [self._text.handle(request) for request in requests]:
                self._act(effects)
            while len(done) < len(requests):
                for event in self._news():
                    _raise_failure(event)
                    _note(event, drafts, done)
                    if progress is not None and isinstance(event, Ended):
                        progress(len(done), len(requests))
        finally:
            self._cancel([request_id for request_id in drafts if request_id not in done])
        return [done[request.request_id] for request in requests]

    def _request(self, prompt: Prompt, sampling: SamplingParams, group: str) -> Generate:
        request_id = f"offline-{self._next_id}"
        self._next_id += 1
        return Generate(request_id=request_id, prompt=prompt, sampling=sampling, group=group)

    def _act(self, effects: Effects) -> None:
        self._inbox.put(*effects.to_engine)
        self._pending = (*self._pending, *effects.to_client)

    def _news(self) -> Sequence[ToClient]:
        """What the text side has to say, waiting for the engine if there is nothing yet."""
        while not self._pending:
            self._hear()
            if not self._thread.is_alive() and self._events.empty():
                raise EngineDead("The engine failed; see the log.")
        news, self._pending = self._pending, ()
        return news

    def _hear(self) -> None:
        """One message of the engine, if one comes in time."""
        with contextlib.suppress(queue.Empty):
            self._act(self._text.hear(self._events.get(timeout=ANSWER_TIMEOUT_S)))

    def _cancel(self, request_ids: Sequence[RequestId]) -> None:
        """Take requests back and forget what comes of them."""
        for request_id in request_ids:
            self._act(self._text.handle(CancelText(request_id)))
        while self._text.live_count and self._thread.is_alive():
            self._hear()
        self._pending = ()


def _note(event: ToClient, drafts: dict[RequestId, _Draft], done: dict[RequestId, Completion]) -> None:
    if not isinstance(event, Delta | Ended):
        return
    draft = drafts.get(event.request_id)
    if draft is None:
        return
    draft.text.append(event.text)
    draft.logprobs.extend(event.logprobs)
    draft.prompt_logprobs.extend(event.prompt_logprobs)
    if isinstance(event, Ended):
        done[event.request_id] = Completion(
            text="".join(draft.text),
            finish_reason=event.reason.value,
            prompt_tokens=event.usage.prompt_tokens,
            completion_tokens=event.usage.completion_tokens,
            cached_tokens=event.usage.cached_tokens,
            logprobs=tuple(draft.logprobs),
            prompt_logprobs=tuple(draft.prompt_logprobs),
        )


def _raise_failure(event: object) -> None:
    if isinstance(event, Refused):
        raise InvalidRequest(event.message, param=event.param) if event.status == 400 else RequestError(event.message)
    if isinstance(event, Ended) and not event.reason.is_success and event.reason is not FinishReason.CANCELLED:
        raise EngineDead(event.message)


def _as_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
    """A list of prompts, and whether only one was meant."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [_as_any_prompt(prompts)], True
    return [_as_any_prompt(prompt) for prompt in prompts], False


def _as_any_prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if prompt and isinstance(prompt[0], dict):
        return ChatPrompt(messages=tuple(prompt))
    return TokenPrompt(tuple(prompt))


def _as_list(sampling: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if len(sampling) != count:
        raise InvalidRequest(f"{count} prompts, but {len(sampling)} sampling parameters")
    return list(sampling)
