"""How sequences end and how their news leave: every request gets exactly one `Finish`, whatever happened to it.

Knows: releasing everything, counting, telling. Refuses to know: why (the caller brings the reason).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from branchline.base.finish import FinishReason
from branchline.base.ids import RequestId, TokenId
from branchline.core.events import Event, Finished
from branchline.core.result import Finish, Output, TokenLogprobs, Usage
from branchline.sched.admission import Admission
from branchline.sched.kv import KvBooks
from branchline.sched.lifecycle import Seq, State
from branchline.sched.roster import Roster

STATUS = {
    FinishReason.STOP: 200,
    FinishReason.LENGTH: 200,
    FinishReason.CANCELLED: 499,
    FinishReason.WAITING_TIMEOUT: 503,
    FinishReason.RUNNING_TIMEOUT: 504,
    FinishReason.REJECTED: 429,
    FinishReason.ERROR: 500,
    FinishReason.SHUTDOWN: 503,
}


@dataclass(slots=True)
class Counters:
    """Totals that only grow. Written by the scheduler's parts, read for `EngineStats`."""

    submitted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    retractions: int = 0
    preemptions: int = 0
    """Those retractions that made way for somebody more important."""
    late_results: int = 0
    failed_steps: int = 0
    steps: int = 0
    busy_ns: int = 0


class Refusal(NamedTuple):
    """Why a request did not come in."""

    message: str
    status: int
    retry_after_s: int = 0
    """An estimate; 0: none."""


class Endings:
    def __init__(
        self, roster: Roster, kv: KvBooks, admission: Admission, counters: Counters, emit: Callable[[Event], None]
    ) -> None:
        self._roster = roster
        self._kv = kv
        self._admission = admission
        self._counters = counters
        self._emit = emit
        self._news: list[Output] = []

    def take_news(self) -> list[Output]:
        news, self._news = self._news, []
        return news

    def tell(self, seq: Seq, logprobs: tuple[TokenLogprobs, ...], prompt_logprobs: tuple[TokenLogprobs, ...]) -> None:
        """New tokens of a sequence that goes on."""
        self._news.append(self._output(seq, logprobs, prompt_logprobs, None))

    def end(
        self,
        seq: Seq,
        reason: FinishReason,
        now_ns: int,
        *,
        message: str = "",
        stop_token: TokenId | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        """Take a live sequence out, release everything it holds, and say so. Its computed prefix stays cached."""
        finish = Finish(reason, seq.usage, message, STATUS[reason], stop_token)
        output = self._output(seq, logprobs, prompt_logprobs, finish)
        if seq.state is State.RUNNING:
            self._kv.let_go(seq, now_ns, keep=reason is not FinishReason.ERROR)
            self._admission.note_finish()
        self._roster.finish(seq)
        self._close(seq.spec.request_id, output, now_ns, seq.chunks, seq.steps)

    def refuse(self, request_id: RequestId, prompt_tokens: int, refusal: Refusal, now_ns: int) -> None:
        """A request that never came in."""
        finish = Finish(
            FinishReason.REJECTED, Usage(prompt_tokens), refusal.message, refusal.status, retry_after_s=refusal.retry_after_s
        )
        self._close(request_id, Output(request_id, finish=finish), now_ns)

    def _output(
        self,
        seq: Seq,
        logprobs: tuple[TokenLogprobs, ...],
        prompt_logprobs: tuple[TokenLogprobs, ...],
        finish: Finish | None,
    ) -> Output:
        return Output(seq.spec.request_id, seq.publish(), logprobs, prompt_logprobs, seq.cached_tokens, finish)

    def _close(self, request_id: RequestId, output: Output, now_ns: int, chunks: int = 0, steps: int = 0) -> None:
        finish = output.finish
        if finish is None:
            return
        name = finish.reason.value
        self._counters.finished[name] = self._counters.finished.get(name, 0) + 1
        self._news.append(output)
        usage = finish.usage
        self._emit(Finished(now_ns, request_id, finish.reason, usage.prompt_tokens, usage.completion_tokens, chunks, steps))
