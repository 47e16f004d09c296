"""The choices of one call as one stream of news: all of them live, or none.

Knows: several generations at once, and what each choice has come to. Refuses to know: JSON, HTTP.
"""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from branchline.api.dialect import Offsets
from branchline.api.errors import from_ended, from_refused
from branchline.base.clock import NS_PER_S, Clock
from branchline.base.finish import FinishReason
from branchline.core.result import Usage
from branchline.observe.metrics import Metrics
from branchline.wire.client import GenerateEvent, Generation, TextClient
from branchline.wire.messages import Delta, Ended, Generate, Refused, Started, TextLogprob


class Fanout:
    """``with Fanout(client, requests) as fanout``: leaving early cancels whatever still runs."""

    def __init__(self, client: TextClient, requests: Sequence[Generate]) -> None:
        self._generations: list[Generation] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._ready: list[tuple[int, GenerateEvent]] = []
        self._changed = asyncio.Event()
        try:
            for request in requests:
                self._generations.append(client.generate(request))
        except BaseException:
            self.close()
            raise
        if len(requests) > 1:  # a lone generation is read without a task in between
            self._pumps = [asyncio.create_task(self._pump(i, source)) for i, source in enumerate(self._generations)]

    async def burst(self) -> list[tuple[int, GenerateEvent]]:
        """Wait for news and take all there is, each with the index of its choice. Not to be called after the last end."""
        if not self._pumps:
            return [(0, event) for event in await self._generations[0].burst()]
        await self._changed.wait()
        self._changed.clear()
        events, self._ready = self._ready, []
        return events

    def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        for generation in self._generations:
            generation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def _pump(self, index: int, source: Generation) -> None:
        while events := await source.burst():
            self._ready.extend((index, event) for event in events)
            self._changed.set()


class Choice:
    """What one choice has come to. ``take`` is its only writer."""

    def __init__(self, index: int, clock: Clock, metrics: Metrics) -> None:
        self.index = index
        self.prompt_tokens = 0
        self.completion_tokens = 0
        """Generated so far; their text may still be held back."""
        self.prompt_text = ""
        self.is_accepted = False
        self.has_news = False
        """Something came that a client could see."""
        self.ended: Ended | None = None
        self.offsets = Offsets()
        self._clock = clock
        self._metrics = metrics
        self._born_ns = self._first_ns = self._last_ns = clock.now_ns()
        self._first_tokens = 0
        """Tokens that came with the first news of any."""
        self._is_counted = False

    def take(self, event: GenerateEvent) -> None:
        """Raises ApiError if the choice was refused or ended without success."""
        match event:
            case Delta():
                self._note_tokens(event.token_count)
                self.has_news = True
            case Started():
                self.is_accepted = True
                self.prompt_tokens = event.prompt_tokens
                self.prompt_text = event.prompt_text
            case Ended():
                self._note_tokens(event.token_count)
                self._count(event.reason)
                if not event.reason.is_success:
                    raise from_ended(event)
                self.is_accepted = self.has_news = True
                self.ended = event
                self.prompt_tokens = event.usage.prompt_tokens
                self.completion_tokens = event.usage.completion_tokens
            case Refused():
                self._count(FinishReason.REJECTED)
                raise from_refused(event)

    def abandon(self) -> None:
        """The call is over; if the choice is not, it was cancelled."""
        self._count(FinishReason.CANCELLED)

    @property
    def usage(self) -> Usage:
        """So far; complete once it has ended."""
        return self.ended.usage if self.ended else Usage(self.prompt_tokens, self.completion_tokens)

    def _note_tokens(self, token_count: int) -> None:
        if not token_count:
            return
        self._last_ns = self._clock.now_ns()
        if not self._first_tokens:
            self._first_ns, self._first_tokens = self._last_ns, token_count
            self._metrics.first_token((self._first_ns - self._born_ns) / NS_PER_S)
        self.completion_tokens += token_count

    def _count(self, reason: FinishReason) -> None:
        if self._is_counted:
            return
        self._is_counted = True
        later_tokens = self.completion_tokens - self._first_tokens
        if reason.is_success and later_tokens > 0:
            self._metrics.output_pace((self._last_ns - self._first_ns) / NS_PER_S / later_tokens)
        duration_s = (self._clock.now_ns() - self._born_ns) / NS_PER_S
        self._metrics.choice_ended(reason, duration_s, self.prompt_tokens, self.completion_tokens)


class Gathered:
    """Text and log probabilities of one choice of a whole answer."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.prompt_logprobs: list[TextLogprob] = []
        self.logprobs: list[TextLogprob] = []

    def take(self, event: Delta | Ended) -> None:
        self.text.append(event.text)
        self.logprobs.extend(event.logprobs)
        self.prompt_logprobs.extend(event.prompt_logprobs)


def total_usage(choices: Sequence[Choice], choices_per_prompt: int) -> Usage:
    """A prompt counts once, however many choices share it. Its cached tokens are those of the choice that found fewest:
    what the others found, the first of them had computed for this very call."""
    prompts = [choices[start : start + choices_per_prompt] for start in range(0, len(choices), choices_per_prompt)]
    return Usage(
        prompt_tokens=sum(group[0].usage.prompt_tokens for group in prompts),
        completion_tokens=sum(choice.usage.completion_tokens for choice in choices),
        cached_tokens=sum(min(choice.usage.cached_tokens for choice in group) for group in prompts),
    )
