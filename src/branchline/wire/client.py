"""What the HTTP side sees of everything behind it: requests go in, their news come out, calls are answered.

Knows: which requests and calls are open in this process, and the last heartbeat. Refuses to know: whether the text side
lives here or in a process of its own (``send`` and ``deliver`` are all there is of it), HTTP, tokens.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

from branchline.base.clock import Clock
from branchline.base.errors import EngineDead, InvalidRequest, RequestError
from branchline.base.finish import FinishReason
from branchline.base.ids import RequestId, TokenId
from branchline.core.result import Usage
from branchline.wire.messages import (
    Ask,
    CancelText,
    ChatPrompt,
    Control,
    Controlled,
    Delta,
    Detokenize,
    Detokenized,
    Ended,
    Generate,
    Heartbeat,
    Pin,
    Prompt,
    Refused,
    Started,
    Subject,
    TextPrompt,
    ToClient,
    Tokenize,
    Tokenized,
    Told,
    ToText,
)

GenerateEvent: TypeAlias = Started | Delta | Ended | Refused
_Answer: TypeAlias = Tokenized | Detokenized | Controlled | Told | Refused
_Wanted = TypeVar("_Wanted", Tokenized, Detokenized, Controlled, Told)


class Generation:
    """News of one request, in order. The last is its only ``Ended`` or ``Refused``.

    with client.generate(request) as generation:  # leaving early cancels
        async for event in generation: ...

    Events that came in one burst are handed out without suspending in between.
    """

    def __init__(self, request_id: RequestId, leave: Callable[[RequestId], None]) -> None:
        self.request_id = request_id
        self._leave = leave
        self._news: deque[GenerateEvent] = deque()
        self._changed = asyncio.Event()
        self._is_complete = False  # nothing more will come; there may be news to hand out

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerateEvent:
        await self._wait()
        if not self._news:
            raise StopAsyncIteration
        return self._news.popleft()

    async def burst(self) -> list[GenerateEvent]:
        """Wait for news and take all that is there; empty after the end."""
        await self._wait()
        events = list(self._news)
        self._news.clear()
        return events

    def close(self) -> None:
        """The reader has gone: cancel unless it is over, and forget unread news. Idempotent, never blocks."""
        self._news.clear()
        if not self._is_complete:
            self._complete()
            self._leave(self.request_id)

    def put(self, event: GenerateEvent) -> None:
        """For :class:`TextClient` alone."""
        self._news.append(event)
        if isinstance(event, Ended | Refused):
            self._complete()
        self._changed.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _complete(self) -> None:
        self._is_complete = True
        self._changed.set()

    async def _wait(self) -> None:
        while not self._news and not self._is_complete:
            self._changed.clear()
            await self._changed.wait()


class TextClient:
    """The HTTP side's only door to text side and engine. Belongs to one event loop."""

    def __init__(self, send: Callable[[ToText], None], clock: Clock) -> None:
        """``send`` must not block; it may raise RequestError (there is no room, it cannot be encoded)."""
        self._send = send
        self._clock = clock
        self._generations: dict[RequestId, Generation] = {}
        self._calls: dict[str, asyncio.Future[_Answer]] = {}
        self._call_numbers = count(1)
        self._obituary: str | None = None
        self._latest: Heartbeat | None = None
        self._latest_ns: int | None = None
        self.late_messages = 0
        """News of requests and calls that nobody waits for any longer."""

    # ------------------------------------------------------------ state

    @property
    def latest(self) -> Heartbeat | None:
        """The last heartbeat of the engine."""
        return self._latest

    @property
    def latest_ns(self) -> int | None:
        """When it arrived, by the clock of this process."""
        return self._latest_ns

    @property
    def live_count(self) -> int:
        """Requests and calls that wait for something."""
        return len(self._generations) + len(self._calls)

    @property
    def is_dead(self) -> bool:
        return self._obituary is not None

    # ------------------------------------------------------------ generation

    def generate(self, request: Generate) -> Generation:
        """Send a request at once; a refusal is an event like any other.

        Raises:
            InvalidRequest: a live request has the same id.
        """
        request_id = request.request_id
        if request_id in self._generations:
            raise InvalidRequest(f"A request with the id {request_id!r} is running already.")
        generation = Generation(request_id, self._abandon)
        if self._obituary is not None:
            generation.put(_shut_down(request_id, self._obituary))
            return generation
        self._generations[request_id] = generation
        try:
            self._send(request)
        except RequestError as error:
            self._end(_refusal(request_id, error))
        return generation

    def cancel(self, request_id: RequestId) -> None:
        """Ask for the end of a request; its news end with ``Ended(CANCELLED)``. Unknown ids are ignored."""
        if request_id in self._generations:
            self._post(CancelText(request_id))

    # ------------------------------------------------------------ calls

    async def tokenize(
        self, prompt: TextPrompt | ChatPrompt, *, add_special_tokens: bool = True, timeout_s: float = 10.0
    ) -> Tokenized:
        """Raises RequestError if it is refused, EngineDead if there is no answer."""
        call_id = self._new_call()
        message = Tokenize(call_id=call_id, prompt=prompt, add_special_tokens=add_special_tokens)
        return await self._call(call_id, message, Tokenized, timeout_s)

    async def detokenize(self, tokens: tuple[TokenId, ...], *, timeout_s: float = 10.0) -> Detokenized:
        """Raises RequestError if it is refused, EngineDead if there is no answer."""
        call_id = self._new_call()
        return await self._call(call_id, Detokenize(call_id=call_id, tokens=tokens), Detokenized, timeout_s)

    async def pin(
        self,
        prompt: Prompt,
        *,
        seconds: float,
        tenant: str = "",
        salt: str = "",
        add_special_tokens: bool = True,
        timeout_s: float = 15.0,
    ) -> Controlled:
        """Keep a prompt in the prefix cache. Raises RequestError if it is refused, EngineDead if there is no answer."""
        call_id = self._new_call()
        message = Pin(
            call_id=call_id, prompt=prompt, seconds=seconds, tenant=tenant, salt=salt, add_special_tokens=add_special_tokens
        )
        return await self._call(call_id, message, Controlled, timeout_s)

    async def control(self, verb: str, *, timeout_s: float = 5.0) -> Controlled:
        """Raises RequestError if it is refused, EngineDead if there is no answer."""
        call_id = self._new_call()
        return await self._call(call_id, Control(call_id=call_id, verb=verb), Controlled, timeout_s)

    async def ask(
        self, what: Subject, request_id: RequestId = "", *, tenant: str | None = None, timeout_s: float = 15.0
    ) -> Told:
        """Put a question to the engine (see :class:`Ask`). Raises EngineDead if there is no answer: the engine answers
        between two steps, so a long step delays it."""
        call_id = self._new_call()
        return await self._call(
            call_id, Ask(call_id=call_id, what=what, request_id=request_id, tenant=tenant), Told, timeout_s
        )

    # ------------------------------------------------------------ the other side

    def deliver(self, messages: Iterable[ToClient]) -> None:
        """What came back from the text side, in order; one call per burst."""
        for message in messages:
            match message:
                case Heartbeat():
                    self._latest, self._latest_ns = message, self._clock.now_ns()
                case Started() | Delta():
                    self._tell(message)
                case Ended():
                    self._end(message)
                case Refused() if message.request_id in self._generations:
                    self._end(message)
                case Refused():
                    self._answer(message.request_id, message)
                case Tokenized() | Detokenized() | Controlled() | Told():
                    self._answer(message.call_id, message)

    def fail_all(self, message: str) -> None:
        """The engine has gone: all that is open ends now, and whatever comes later ends at once."""
        self._obituary = message
        for request_id in list(self._generations):
            self._end(_shut_down(request_id, message))
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineDead(message))

    # ------------------------------------------------------------ inside

    def _tell(self, event: Started | Delta) -> None:
        generation = self._generations.get(event.request_id)
        if generation is None:
            self.late_messages += 1
        else:
            generation.put(event)

    def _end(self, event: Ended | Refused) -> None:
        generation = self._generations.pop(event.request_id, None)
        if generation is None:
            self.late_messages += 1
        else:
            generation.put(event)

    def _abandon(self, request_id: RequestId) -> None:
        """The reader of a request left before its end."""
        if self._generations.pop(request_id, None) is not None:
            self._post(CancelText(request_id))

    def _post(self, cancel: CancelText) -> None:
        with contextlib.suppress(RequestError):  # no room: the sender has counted it, and the request ends by itself
            self._send(cancel)

    def _new_call(self) -> str:
        return f"call-{next(self._call_numbers)}"

    async def _call(self, call_id: str, message: ToText, wanted: type[_Wanted], timeout_s: float) -> _Wanted:
        if self._obituary is not None:
            raise EngineDead(self._obituary)
        future: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(message)
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError:
            raise EngineDead(f"There was no answer within {timeout_s:g} seconds.") from None
        finally:
            del self._calls[call_id]
        if isinstance(answer, Refused):
            raise _request_error(answer)
        if not isinstance(answer, wanted):
            raise EngineDead(f"The answer was a {type(answer).__name__} instead of a {wanted.__name__}.")
        return answer

    def _answer(self, call_id: str, answer: _Answer) -> None:
        call = self._calls.get(call_id)
        if call is None or call.done():
            self.late_messages += 1
        else:
            call.set_result(answer)


def _shut_down(request_id: RequestId, message: str) -> Ended:
    return Ended(request_id=request_id, reason=FinishReason.SHUTDOWN, usage=Usage(), message=message, status=503)


def _refusal(request_id: RequestId, error: RequestError) -> Refused:
    return Refused(
        request_id=request_id,
        message=error.message,
        status=error.status,
        kind=error.kind,
        code=error.code,
        param=error.param,
    )


def _request_error(refused: Refused) -> RequestError:
    error = RequestError(refused.message, param=refused.param)
    error.status, error.kind, error.code = refused.status, refused.kind, refused.code
    return error
