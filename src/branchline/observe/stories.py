"""The story of each request, told by events: waiting, prompt, output, and what its prompt did not find in the cache.

Knows: live requests, and the last finished ones. Refuses to know: who decides (it only hears) and who asks.
"""

from collections.abc import Callable
from typing import Any

from branchline.base.finish import FinishReason
from branchline.base.ids import RequestId
from branchline.core.events import Admitted, Event, Finished, FirstToken, Retracted, Submitted
from branchline.core.explain import Miss, RequestStory

FINISHED_STORIES = 1024
"""Finished requests remembered, the last ones (some 500 bytes each)."""


class Draft:
    """A story that is not over."""

    __slots__ = (
        "arrived_ns", "cached", "first_admitted_ns", "first_token_ns", "missed", "prompt_tokens", "requeued_from_ns",
        "requeued_ns", "retractions", "tail", "tenant",
    )  # fmt: skip

    def __init__(self, event: Submitted) -> None:
        self.tenant = event.tenant
        self.prompt_tokens = event.prompt_tokens
        self.arrived_ns = event.at_ns
        self.first_admitted_ns: int | None = None
        self.first_token_ns: int | None = None
        self.requeued_from_ns: int | None = None
        self.requeued_ns = 0
        self.cached = self.tail = self.retractions = 0
        self.missed: tuple[Miss, ...] = ()

    def admit(self, event: Admitted) -> None:
        if self.first_admitted_ns is None:
            self.first_admitted_ns = event.at_ns
            self.cached, self.tail, self.missed = event.cached_tokens, event.tail_tokens, event.missed
        if self.requeued_from_ns is not None:
            self.requeued_ns += event.at_ns - self.requeued_from_ns
            self.requeued_from_ns = None

    def retract(self, event: Retracted) -> None:
        self.retractions += 1
        self.requeued_from_ns = event.at_ns

    def tell(
        self, request_id: RequestId, until_ns: int, completion_tokens: int, chunks: int, steps: int, finish: str
    ) -> RequestStory:
        admitted = self.first_admitted_ns if self.first_admitted_ns is not None else until_ns
        spoke = self.first_token_ns if self.first_token_ns is not None else until_ns
        requeued = 0 if self.requeued_from_ns is None else until_ns - self.requeued_from_ns
        return RequestStory(
            request_id=request_id,
            tenant=self.tenant,
            is_finished=bool(finish),
            finish=finish,
            arrived_at_ns=self.arrived_ns,
            queue_ns=admitted - self.arrived_ns,
            prefill_ns=spoke - admitted,
            decode_ns=until_ns - spoke,
            requeued_ns=self.requeued_ns + requeued,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=completion_tokens,
            chunks=chunks,
            steps=steps,
            cached_page_tokens=self.cached - self.tail,
            cached_tail_tokens=self.tail,
            missed=self.missed,
            retractions=self.retractions,
        )


class Stories:
    """An observer. Live requests are as many as the scheduler has; finished ones are bounded."""

    def __init__(self) -> None:
        self._live: dict[RequestId, Draft] = {}
        self._finished: dict[RequestId, tuple[Draft, Finished]] = {}
        """Oldest first. Written out when somebody asks."""
        self._verbs: dict[type, Callable[[Any], None]] = {
            Submitted: self._submitted,
            Admitted: self._admitted,
            FirstToken: self._spoke,
            Retracted: self._retracted,
            Finished: self._ended,
        }

    def notice(self, event: Event) -> None:
        verb = self._verbs.get(type(event))
        if verb is not None:
            verb(event)

    def finished(self, request_id: RequestId) -> RequestStory | None:
        """``None`` if it was never here, is still live, or ended too long ago."""
        found = self._finished.get(request_id)
        if found is None:
            return None
        draft, end = found
        return draft.tell(request_id, end.at_ns, end.completion_tokens, end.chunks, end.steps, end.reason.value)

    def so_far(
        self, request_id: RequestId, now_ns: int, *, completion_tokens: int, chunks: int, steps: int
    ) -> RequestStory | None:
        """The story of a live request; events do not tell how far its output has come."""
        draft = self._live.get(request_id)
        return None if draft is None else draft.tell(request_id, now_ns, completion_tokens, chunks, steps, "")

    def _submitted(self, event: Submitted) -> None:
        self._live[event.request_id] = Draft(event)

    def _admitted(self, event: Admitted) -> None:
        if (draft := self._live.get(event.request_id)) is not None:
            draft.admit(event)

    def _spoke(self, event: FirstToken) -> None:
        if (draft := self._live.get(event.request_id)) is not None:
            draft.first_token_ns = event.at_ns

    def _retracted(self, event: Retracted) -> None:
        if (draft := self._live.get(event.request_id)) is not None:
            draft.retract(event)

    def _ended(self, event: Finished) -> None:
        """Also of a request that was refused: it has a short story, unless it came under the name of a live one."""
        name, is_refused = event.request_id, event.reason is FinishReason.REJECTED
        if is_refused and name in self._live:
            return
        draft = self._live.pop(name, None) or Draft(Submitted(event.at_ns, name, event.prompt_tokens, 0))
        self._finished.pop(name, None)
        self._finished[name] = (draft, event)
        if len(self._finished) > FINISHED_STORIES:
            del self._finished[next(iter(self._finished))]
