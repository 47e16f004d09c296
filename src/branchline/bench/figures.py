"""From the requests of a run to the figures that are shown and saved.

Knows: definitions. Refuses to know: where the requests came from.
"""

import statistics
from collections.abc import Sequence

import msgspec

from branchline.bench.client import Completion
from branchline.bench.drive import Tally

ERRORS_KEPT = 5


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Percentiles over completed requests; ``None`` where none was completed."""

    workload: str
    requests: int
    """Completed."""
    failed: int
    wall_s: float
    output_tok_s: float
    total_tok_s: float
    """Prompt and output."""
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    """Time from first to last token over the tokens after the first."""
    tpot_p99_ms: float | None
    output_tokens: int
    prompt_tokens: int
    errors: dict[str, int]
    """The most frequent reasons of failures and how often each occurred."""


def summarize(workload: str, tally: Tally) -> Figures:
    done = tally.completions
    output, prompt = sum(one.output_tokens for one in done), sum(one.prompt_tokens for one in done)
    ttft, tpot = [one.ttft_s for one in done], [time_per_output_token_s(one) for one in done]
    return Figures(
        workload=workload,
        requests=len(done),
        failed=tally.failed,
        wall_s=round(tally.wall_s, 3),
        output_tok_s=round(output / tally.wall_s, 1),
        total_tok_s=round((output + prompt) / tally.wall_s, 1),
        ttft_p50_ms=_ms(statistics.median(ttft)) if ttft else None,
        ttft_p99_ms=_ms(percentile(ttft, 0.99)) if ttft else None,
        tpot_p50_ms=_ms(statistics.median(tpot)) if tpot else None,
        tpot_p99_ms=_ms(percentile(tpot, 0.99)) if tpot else None,
        output_tokens=output,
        prompt_tokens=prompt,
        errors=dict(tally.failures.most_common(ERRORS_KEPT)),
    )


def time_per_output_token_s(one: Completion) -> float:
    return (one.total_s - one.ttft_s) / max(1, one.output_tokens - 1)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed, or the next one; ``values`` not empty."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
