"""A photograph of an engine: gauges read from state, counters that only grow. Frozen; safe to hand to any thread."""

import msgspec


class EngineStats(msgspec.Struct, frozen=True):
    # gauges
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    """Prompt tokens of waiting requests that have not run yet."""
    paused: bool = False
    draining: bool = False
    plans_in_flight: int = 0
    step_started_ns: int | None = None
    """Clock value at which the oldest plan in flight was launched."""
    pages_total: int = 0
    pages_free: int = 0
    pages_private: int = 0
    pages_tree: int = 0
    pages_retired: int = 0
    pages_evictable: int = 0
    locked_nodes: int = 0
    pins: int = 0
    pages_pinned: int = 0
    slots_used: int = 0
    new_token_ratio: float = 0.0
    max_running: int = 0
    page_size: int = 0
    context_length: int = 0
    waiting_causes: dict[str, int] = {}
    """Waiting requests by ``core.explain.WaitingCause``, as the last planning pass left them."""
    # counters
    steps: int = 0
    """Committed steps: the progress counter behind ``/ready``."""
    turns: int = 0
    """Turns of the loop; grows while idle too."""
    submitted: int = 0
    finished: dict[str, int] = {}
    """By finish reason."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    """Positions computed, recomputation after retraction included."""
    generated_tokens: int = 0
    retractions: int = 0
    preemptions: int = 0
    """Those retractions that made way for a higher priority."""
    evicted_pages: int = 0
    missed_tokens: dict[str, int] = {}
    """Prompt tokens that were not in the cache at first admission, by ``core.explain.MissReason``."""
    late_results: int = 0
    """Row results dropped because their epoch had passed."""
    failed_steps: int = 0
    dropped_messages: int = 0
    busy_ns: int = 0
    """Time the worker spent in steps."""
    journal_bytes: int = 0
    journal_lost: int = 0
    """Records that came after the journal had ended, for example because the disk is full."""

    def snapshot(self, *, step_started_ns: int | None, turns: int) -> "EngineStats":
        """The same with what only the loop knows."""
        return msgspec.structs.replace(self, step_started_ns=step_started_ns, turns=turns)
