"""What Prometheus may read: the last photograph of the engine, and histograms of what clients felt.

Knows: names, units and label sets, all of them fixed (no ids, no names from requests). Refuses to know: where figures are
decided. Nothing here is asked by a decision, and reading it asks the engine nothing.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from branchline.base.clock import NS_PER_S, Clock
from branchline.base.finish import FinishReason
from branchline.core.explain import MissReason, WaitingCause
from branchline.core.stats import EngineStats
from branchline.wire.client import TextClient
from branchline.wire.messages import Heartbeat, ModelFacts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_DURATION_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = tuple(1 << power for power in range(0, 18, 2))

_GAUGES = {
    "running_requests": ("running", "Requests that are being computed."),
    "waiting_requests": ("waiting", "Requests in the queue."),
    "waiting_prompt_tokens": ("waiting_tokens", "Prompt tokens of requests in the queue that have not run yet."),
    "paused": ("paused", "1 while the engine is paused."),
    "draining": ("draining", "1 while the engine takes no new requests."),
    "plans_in_flight": ("plans_in_flight", "Steps launched and not yet committed."),
    "evictable_pages": ("pages_evictable", "Pages of the prefix cache that may be evicted."),
    "locked_nodes": ("locked_nodes", "Nodes of the prefix cache that running requests and pins hold."),
    "pins": ("pins", "Pinned prefixes."),
    "pinned_pages": ("pages_pinned", "Pages of pinned prefixes."),
    "slots_used": ("slots_used", "Rows of worker state in use."),
    "slots_total": ("max_running", "Rows of worker state."),
    "new_token_ratio": ("new_token_ratio", "Share of promised output tokens that admission sets aside."),
    "page_size_tokens": ("page_size", "Tokens per KV page."),
}
_COUNTERS = {
    "steps": ("steps", "Committed steps."),
    "loop_turns": ("turns", "Turns of the engine loop, idle ones included."),
    "submitted_requests": ("submitted", "Requests the engine has received."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "cached_prompt_tokens": ("cached_tokens", "Prompt tokens taken from the prefix cache."),
    "computed_tokens": ("computed_tokens", "Positions computed, recomputation included."),
    "generated_tokens": ("generated_tokens", "Output tokens."),
    "retractions": ("retractions", "Running requests sent back to the queue."),
    "preemptions": ("preemptions", "Those of them that made way for a higher priority."),
    "evicted_pages": ("evicted_pages", "Pages evicted from the prefix cache."),
    "late_results": ("late_results", "Row results dropped because their request had moved on."),
    "failed_steps": ("failed_steps", "Steps that raised."),
    "dropped_messages": ("dropped_messages", "Messages that could not be read or placed."),
    "journal_bytes": ("journal_bytes", "Written to the journal."),
    "journal_lost_records": ("journal_lost", "Records that came after the journal had ended."),
}
_PAGE_STATES = ("free", "private", "tree", "retired")
_REASONS = tuple(reason.value for reason in FinishReason)
_CAUSES = tuple(cause.value for cause in WaitingCause)
_MISSES = tuple(reason.value for reason in MissReason)


class Metrics:
    """A registry of its own and the verbs that feed it. Belongs to the HTTP side."""

    def __init__(self, client: TextClient, facts: ModelFacts, clock: Clock, version: str, served_name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._ttft = self._histogram("time_to_first_token_seconds", "From the call to the first output token.", _TTFT_S)
        self._tpot = self._histogram("time_per_output_token_seconds", "Mean time between output tokens.", _TPOT_S)
        self._duration = self._histogram("request_duration_seconds", "From the call to the end of a choice.", _DURATION_S)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a choice.", _TOKENS)
        self._output = self._histogram("request_output_tokens", "Output tokens of a choice.", _TOKENS)
        self._choices = Counter("branchline_choices", "Choices by how they ended.", ["reason"], registry=self.registry)
        for reason in _REASONS:
            self._choices.labels(reason)
        self._responses = Counter(
            "branchline_http_responses", "Answers by route and status.", ["route", "status"], registry=self.registry
        )
        Info("branchline_build", "What is served.", registry=self.registry).info(
            {"version": version, "model": served_name, "executor": facts.executor}
        )
        self.registry.register(EngineCollector(client, clock))
        ProcessCollector(registry=self.registry)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def output_pace(self, seconds_per_token: float) -> None:
        self._tpot.observe(seconds_per_token)

    def choice_ended(self, reason: FinishReason, duration_s: float, prompt_tokens: int, output_tokens: int) -> None:
        self._choices.labels(reason.value).inc()
        self._duration.observe(duration_s)
        self._prompt.observe(prompt_tokens)
        self._output.observe(output_tokens)

    def answered(self, route: str, status: int) -> None:
        """``route`` is a name of the route table."""
        self._responses.labels(route, str(status)).inc()

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"branchline_{name}", text, buckets=buckets, registry=self.registry)


class EngineCollector(Collector):
    """Reads the last heartbeat when it is scraped. Before the first one there are no engine figures."""

    def __init__(self, client: TextClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        yield from self._http_side()
        latest = self._client.latest
        if latest is not None:
            yield from _engine_gauges(latest.stats)
            yield from _engine_counters(latest.stats)

    def _http_side(self) -> Iterator[Metric]:
        live = GaugeMetricFamily("branchline_live_requests", "Requests in the maps of each side.", labels=["side"])
        live.add_metric(["http"], self._client.live_count)
        live.add_metric(["text"], _live_texts(self._client.latest))
        yield live
        yield CounterMetricFamily(
            "branchline_late_messages", "News of requests nobody waits for any longer.", self._client.late_messages
        )
        if self._client.latest_ns is not None:
            age_s = (self._clock.now_ns() - self._client.latest_ns) / NS_PER_S
            yield GaugeMetricFamily("branchline_heartbeat_age_seconds", "Age of the engine's last sign of life.", age_s)


def _live_texts(latest: Heartbeat | None) -> int:
    return 0 if latest is None else latest.live_texts


def _engine_gauges(stats: EngineStats) -> Iterator[Metric]:
    for name, (field, text) in _GAUGES.items():
        yield GaugeMetricFamily(f"branchline_{name}", text, float(getattr(stats, field)))
    pages = GaugeMetricFamily("branchline_pages", "KV pages by state.", labels=["state"])
    for state in _PAGE_STATES:
        pages.add_metric([state], getattr(stats, f"pages_{state}"))
    yield pages
    causes = GaugeMetricFamily(
        "branchline_waiting_requests_by_cause", "Requests in the queue, by what keeps them.", labels=["cause"]
    )
    for cause in _CAUSES:
        causes.add_metric([cause], stats.waiting_causes.get(cause, 0))
    yield causes
    yield GaugeMetricFamily("branchline_pages_capacity", "KV pages in all.", stats.pages_total)


def _engine_counters(stats: EngineStats) -> Iterator[Metric]:
    for name, (field, text) in _COUNTERS.items():
        yield CounterMetricFamily(f"branchline_{name}", text, getattr(stats, field))
    yield CounterMetricFamily("branchline_busy_seconds", "Time the worker spent in steps.", stats.busy_ns / NS_PER_S)
    missed = CounterMetricFamily(
        "branchline_missed_prompt_tokens", "Prompt tokens not found in the prefix cache, by reason.", labels=["reason"]
    )
    for reason in _MISSES:
        missed.add_metric([reason], stats.missed_tokens.get(reason, 0))
    yield missed
    finished = CounterMetricFamily("branchline_finished_requests", "Requests by how they ended.", labels=["reason"])
    for reason in _REASONS:
        finished.add_metric([reason], stats.finished.get(reason, 0))
    yield finished
