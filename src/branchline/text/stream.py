"""The text of one request: tokens in as the engine reports them, news out as the client may see them.

A token is reported together with the first character it helped to write: until then its text is held back, as half
of a character or as the possible beginning of a stop string. So counts, log probabilities and text keep step, and a
stop string can take back tokens that nobody has seen.

    characters   [ shown ........ | may become a stop ... | half a character )
                                  ^ released              ^ decoded
    tokens       reported where start < released; the others wait in order of their start

Every stream ends exactly once. Refuses to know: other requests, the engine (``side`` tells it what ended here).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from branchline.base.finish import FinishReason
from branchline.base.ids import TokenId
from branchline.core.result import Finish, Output, TokenLogprobs, Usage
from branchline.text.detokenize import Detokenizer
from branchline.text.stops import StopMatch, StopMatcher
from branchline.text.tokenizer import Tokenizer
from branchline.wire.messages import Delta, Ended, Generate, TextLogprob


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A token that has not been reported."""

    start: int
    """Characters decoded before it came."""
    rows: tuple[TextLogprob, ...]
    """Its log probability, if asked for."""


class TextStream:
    def __init__(self, tokenizer: Tokenizer, request: Generate, prompt: Sequence[TokenId]) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._prompt_tokens = len(prompt)
        self._cached_tokens = 0
        self._detokenizer = Detokenizer(tokenizer, skip_special=request.skip_special_tokens)
        self._matcher = StopMatcher(request.sampling.stop, include_stop=request.include_stop)
        wants_prompt = request.sampling.prompt_logprobs is not None
        self._first_prompt_rows = (self._row(prompt[0], None),) if wants_prompt else ()
        self._taken = 0
        """Tokens taken from the engine."""
        self._reported = 0
        self._waiting: deque[_Waiting] = deque()
        self._decoded = 0
        self._released = 0
        self._has_ended = False

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def hear(self, output: Output) -> Delta | Ended | None:
        """What the client shall hear of ``output``: nothing if it changes nothing, or once the stream has ended."""
        if self._has_ended:
            return None
        if output.cached_tokens is not None:
            self._cached_tokens = output.cached_tokens
        finish = output.finish
        # The token that ended it is no part of the text, unless the client wants to see it.
        hides_last = finish is not None and finish.stop_token is not None and not self._request.include_stop
        written = len(output.tokens) - hides_last
        text, match = self._write(output, max(written, 0))
        if match is not None:
            return self._end_at(match, text, output)
        if finish is None:
            return self._delta(text, output)
        tail, match = self._flush()
        if match is not None and finish.reason.is_success:
            return self._end_at(match, text + tail, output)
        for index in range(max(written, 0), len(output.tokens)):
            self._take(output, index)
        return self._end(finish, text + tail, output)

    def end(self, reason: FinishReason, *, message: str = "", status: int = 200) -> Ended:
        """End it from this side, whatever the engine is doing. Only legal while it has not ended."""
        text, _ = self._flush()
        return self._end(Finish(reason, Usage(), message, status), text, Output(self._request.request_id))

    # -------------------------------------------------------------------------------------------- tokens to text

    def _write(self, output: Output, count: int) -> tuple[str, StopMatch | None]:
        """Text that the first ``count`` tokens release, up to the one that makes a match certain."""
        pieces: list[str] = []
        for index in range(count):
            self._take(output, index)
            piece, match = self._search(self._detokenizer.feed(output.tokens[index]))
            pieces.append(piece)
            if match is not None:
                return "".join(pieces), match
        return "".join(pieces), None

    def _take(self, output: Output, index: int) -> None:
        rows = tuple(self._logprob_row(row) for row in output.logprobs[index : index + 1])
        self._waiting.append(_Waiting(self._decoded, rows))
        self._taken += 1

    def _search(self, text: str) -> tuple[str, StopMatch | None]:
        """Stop strings count only in text after the first ``min_tokens`` tokens."""
        self._decoded += len(text)
        if self._taken <= self._request.sampling.min_tokens:
            self._matcher.skip(len(text))
            safe, match = text, None
        else:
            safe, match = self._matcher.feed(text)
        self._released += len(safe)
        return safe, match

    def _flush(self) -> tuple[str, StopMatch | None]:
        text, match = self._search(self._detokenizer.flush())
        if match is not None:
            return text, match
        held, match = self._matcher.finish()
        return text + held, match

    # -------------------------------------------------------------------------------------------- news

    def _delta(self, text: str, output: Output) -> Delta | None:
        shown: list[_Waiting] = []
        all_shown = self._released == self._decoded and not self._detokenizer.is_mid_character
        while self._waiting and (all_shown or self._waiting[0].start < self._released):
            shown.append(self._waiting.popleft())
        self._reported += len(shown)
        prompt_rows = self._prompt_rows(output)
        if not (text or shown or prompt_rows):
            return None
        return Delta(self._request.request_id, text, len(shown), _rows(shown), prompt_rows)

    def _end_at(self, match: StopMatch, text: str, output: Output) -> Ended:
        """Tokens after the one that completed the stop never happened; those behind the cut have no row to show."""
        counted = [token for token in self._waiting if token.start < match.end]
        cut = match.end if self._request.include_stop else match.start
        rows = _rows([token for token in counted if token.start < cut])
        return self._close(Finish(FinishReason.STOP, Usage()), text, counted, rows, output, match.stop)

    def _end(self, finish: Finish, text: str, output: Output) -> Ended:
        counted = list(self._waiting)
        return self._close(finish, text, counted, _rows(counted), output, finish.stop_token)

    def _close(
        self,
        finish: Finish,
        text: str,
        counted: list[_Waiting],
        rows: tuple[TextLogprob, ...],
        output: Output,
        stop: str | TokenId | None,
    ) -> Ended:
        self._has_ended = True
        self._waiting.clear()
        self._reported += len(counted)
        cached = max(self._cached_tokens, finish.usage.cached_tokens)
        return Ended(
            self._request.request_id,
            finish.reason,
            Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self._reported, cached_tokens=cached),
            text=text,
            token_count=len(counted),
            logprobs=rows,
            prompt_logprobs=self._prompt_rows(output),
            stop=stop,
            message=finish.message,
            status=finish.status,
            retry_after_s=finish.retry_after_s,
        )

    def _prompt_rows(self, output: Output) -> tuple[TextLogprob, ...]:
        first, self._first_prompt_rows = self._first_prompt_rows, ()
        return (*first, *(self._logprob_row(row) for row in output.prompt_logprobs))

    def _logprob_row(self, row: TokenLogprobs) -> TextLogprob:
        known = self._tokenizer
        top = tuple((token, known.token_text(token), known.token_bytes(token), value) for token, value in row.top)
        return self._row(row.token, row.logprob, top)

    def _row(
        self, token: TokenId, logprob: float | None, top: tuple[tuple[TokenId, str, bytes, float], ...] = ()
    ) -> TextLogprob:
        return TextLogprob(token, self._tokenizer.token_text(token), self._tokenizer.token_bytes(token), logprob, top)


def _rows(tokens: Sequence[_Waiting]) -> tuple[TextLogprob, ...]:
    return tuple(row for token in tokens for row in token.rows)
