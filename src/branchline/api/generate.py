"""The life of one generation call: from its requests to the last byte.

An error before the first byte is a status; afterwards it is an event in the stream. The answer begins only when every
choice has been accepted and one of them has news, so that a full queue is a 429 and not a broken stream.

Knows: order and moments. Refuses to know: shapes (``api.dialect``), sockets (``api.exchange``).
"""

from collections.abc import Sequence

from branchline.api.dialect import DONE, Frames, usage_json, whole
from branchline.api.errors import ClientGone
from branchline.api.exchange import Exchange
from branchline.api.fanout import Choice, Fanout, Gathered, total_usage
from branchline.api.parse import Call
from branchline.base.clock import Clock
from branchline.base.errors import RequestError
from branchline.core.result import Usage
from branchline.observe.metrics import Metrics
from branchline.wire.client import GenerateEvent, TextClient
from branchline.wire.messages import Delta, Ended, Refused, Started

MAX_BACKLOG_EVENTS = 8192
"""A client so slow that more news than this piles up for it is treated as gone."""


async def answer(call: Call, client: TextClient, exchange: Exchange, clock: Clock, metrics: Metrics) -> None:
    """Generate, answer, and leave nothing running whatever happens.

    Raises:
        RequestError: the call failed before the answer began, or inside its stream.
        ClientGone: the client left.
    """
    choices = [Choice(index, clock, metrics) for index in range(len(call.requests))]
    try:
        async with exchange.departure():
            with Fanout(client, call.requests) as fanout:
                if call.is_stream:
                    await _stream(call, choices, fanout, exchange)
                else:
                    await exchange.reply(200, await _gather(call, choices, fanout))
    finally:
        for choice in choices:
            choice.abandon()


async def _gather(call: Call, choices: Sequence[Choice], fanout: Fanout) -> bytes:
    gathered = [Gathered() for _ in choices]
    while not _all_ended(choices):
        for index, event in await fanout.burst():
            choices[index].take(event)
            if isinstance(event, Delta | Ended):
                gathered[index].take(event)
    return whole(
        call.dialect,
        call.envelope,
        [_whole_choice(call, choice, parts) for choice, parts in zip(choices, gathered, strict=True)],
        usage_json(total_usage(choices, call.choices_per_prompt)),
    )


def _whole_choice(call: Call, choice: Choice, parts: Gathered) -> dict[str, object]:
    dialect = call.dialect
    entries = parts.prompt_logprobs + parts.logprobs
    logprobs = dialect.logprobs(entries, choice.offsets) if dialect.wants_logprobs else None
    fields = dialect.choice(choice.index, choice.prompt_text + "".join(parts.text), logprobs)
    if choice.ended is not None:
        fields |= {"finish_reason": choice.ended.reason.value, "stop_reason": choice.ended.stop}
    return fields


async def _stream(call: Call, choices: Sequence[Choice], fanout: Fanout, exchange: Exchange) -> None:
    painter = Painter(call)
    frames: list[bytes] = []
    has_begun = False
    while not _all_ended(choices):
        burst = await fanout.burst()
        if len(burst) > MAX_BACKLOG_EVENTS:
            raise ClientGone
        failure = _paint(painter, choices, burst, frames)
        if not has_begun:
            if failure is not None:
                raise failure
            has_begun = all(c.is_accepted for c in choices) and any(c.has_news for c in choices)
            if not has_begun:
                continue
            await exchange.begin_stream()
        if frames:
            await exchange.write(b"".join(frames))
            frames.clear()
        if failure is not None:
            raise failure
    last = painter.frames.usage(usage_json(total_usage(choices, call.choices_per_prompt))) if call.include_usage else b""
    await exchange.write(last + DONE, more=False)


def _paint(
    painter: "Painter", choices: Sequence[Choice], burst: Sequence[tuple[int, GenerateEvent]], frames: list[bytes]
) -> RequestError | None:
    """Add the frames of a burst. What came before a failure is still shown; the failure is returned."""
    for index, event in burst:
        try:
            choices[index].take(event)
        except RequestError as error:
            return error
        painter.paint(choices[index], event, frames)
    return None


class Painter:
    """News to frames. Remembers which choices have spoken."""

    def __init__(self, call: Call) -> None:
        self.frames = Frames(call.dialect, call.envelope, include_usage=call.include_usage)
        self._call = call
        self._spoke: set[int] = set()

    def paint(self, choice: Choice, event: GenerateEvent, frames: list[bytes]) -> None:
        match event:
            case Delta():
                self._text(choice, event, frames)
            case Started():
                if event.prompt_text:
                    frames.append(self._frame(choice, event.prompt_text, None))
            case Ended():
                self._text(choice, event, frames)
                if choice.index not in self._spoke:  # every choice has a first chunk, with a role in chat
                    frames.append(self._frame(choice, "", None))
                frames.append(
                    self.frames.finish(choice.index, event.reason.value, event.stop, usage=self._running_usage(choice))
                )
            case Refused():
                pass  # ``Choice.take`` has raised

    def _text(self, choice: Choice, event: Delta | Ended, frames: list[bytes]) -> None:
        entries = (*event.prompt_logprobs, *event.logprobs)
        logprobs = self._call.dialect.logprobs(entries, choice.offsets) if entries else None
        if event.text or logprobs:
            frames.append(self._frame(choice, event.text, logprobs))

    def _frame(self, choice: Choice, text: str, logprobs: dict[str, object] | None) -> bytes:
        is_first = choice.index not in self._spoke
        self._spoke.add(choice.index)
        return self.frames.text(choice.index, text, logprobs, is_first=is_first, usage=self._running_usage(choice))

    def _running_usage(self, choice: Choice) -> dict[str, object] | None:
        if not self._call.continuous_usage:
            return None
        usage = choice.usage
        return usage_json(Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens))


def _all_ended(choices: Sequence[Choice]) -> bool:
    return all(choice.ended is not None for choice in choices)
