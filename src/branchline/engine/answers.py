"""What the engine answers when it is asked about its decisions. The loop asks here between two turns.

Knows: which record answers which question, and who may see what. Refuses to know: how a record comes about
(`sched.explain`, `observe.stories`).
"""

from collections.abc import Iterator

import msgspec

from branchline.base.ids import RequestId
from branchline.core.explain import RequestAnswer, RequestStory, RequestView, hide_others
from branchline.observe.stories import Stories
from branchline.sched.scheduler import Scheduler
from branchline.wire.messages import Ask, Told

MAX_CHOICES = 64
"""Choices of one call that are looked for: as many as a call may have."""


class Answers:
    def __init__(self, scheduler: Scheduler, stories: Stories) -> None:
        """``stories`` must have been among the scheduler's observers from the start."""
        self._explain = scheduler.explain
        self._stories = stories

    def answer(self, ask: Ask, now_ns: int) -> Told:
        """Changes nothing."""
        match ask.what:
            case "request":
                return self._request(ask, now_ns)
            case "requests":
                return _told(ask, self._explain.requests(now_ns))
            case "scheduler":
                return _told(ask, self._explain.scheduler(now_ns))
            case "tree":
                return _told(ask, self._explain.tree(now_ns))

    def view(self, request_id: RequestId, now_ns: int) -> RequestView | None:
        """One request, waiting, running or finished not too long ago."""
        waiting = self._explain.waiting(request_id, now_ns)
        if waiting is not None:
            return waiting
        progress = self._explain.progress(request_id)
        if progress is None:
            return self._stories.finished(request_id)
        return self._stories.so_far(
            request_id, now_ns,
            completion_tokens=progress.completion_tokens, chunks=progress.chunks, steps=progress.steps,
        )  # fmt: skip

    def _request(self, ask: Ask, now_ns: int) -> Told:
        views = tuple(self._visible(ask, now_ns))
        return _told(ask, RequestAnswer(ask.request_id, now_ns, views)) if views else Told(ask.call_id, None)

    def _visible(self, ask: Ask, now_ns: int) -> Iterator[RequestView]:
        for name in (ask.request_id, *(f"{ask.request_id}-{index}" for index in range(MAX_CHOICES))):
            view = self.view(name, now_ns)
            if view is None or (ask.tenant is not None and self._tenant(view) != ask.tenant):
                continue
            yield view if ask.tenant is None else hide_others(view)

    def _tenant(self, view: RequestView) -> str | None:
        return view.tenant if isinstance(view, RequestStory) else self._explain.tenant(view.request_id)


def _told(ask: Ask, body: msgspec.Struct) -> Told:
    return Told(ask.call_id, msgspec.json.encode(body))
