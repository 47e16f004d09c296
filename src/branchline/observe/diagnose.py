"""Why does the queue grow, and which setting would help? A pure function of one photograph of the scheduler.

The rule that ended most of the recent planning passes names what there is too little of. If that is room for prompts, and
much of what the prompts need was cached once and had to go, or may not be shared, then the cache is what is at fault.

Knows: which figure speaks for which setting. Refuses to know: how the figures were found, and how the answer is shown.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from branchline.core.explain import CacheView, MissReason, SchedulerView, WaitingCause
from branchline.core.words import NAMES, count, describe

MISSES_MATTER = 0.25
"""Share of recent prompt tokens that a better cache would have spared, from which on the cache is the cause."""


class Verdict(enum.Enum):
    NO_QUEUE = "no_queue"
    PAUSED = "paused"
    CACHE_MISSES = "cache_misses"
    TOKEN_BUDGET = "token_budget"  # noqa: S105 - tokens of text
    KV_SPACE = "kv_space"
    ROW_CAP = "row_cap"
    PASSING = "passing"
    """Somebody waits, but no rule keeps them: a shared prefix is being computed, or they have just come."""


@dataclass(frozen=True, slots=True)
class Advice:
    flag: str
    """An option of ``branchline serve``."""
    value: str
    """Suggested; a starting point, not an optimum."""
    now: str
    why: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    verdict: Verdict
    sentence: str
    evidence: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()


def diagnose(view: SchedulerView) -> Diagnosis:
    if not view.queue.waiting:
        return Diagnosis(Verdict.NO_QUEUE, f"Nobody waits; {count(view.queue.running, 'request')} run.")
    if view.paused:
        return Diagnosis(Verdict.PAUSED, "The engine is paused: POST /continue_generation lets it go on.")
    ruling = _ruling(view)
    if ruling is None:
        return Diagnosis(
            Verdict.PASSING, "Nothing keeps those who wait for long: they will be tried in the next steps.", _present(view)
        )
    if ruling is not Verdict.KV_SPACE and _spared_share(view) >= MISSES_MATTER:
        return _misses(view)
    return _WORDS[ruling](view)


_RULES = {
    WaitingCause.TOKEN_BUDGET.value: Verdict.TOKEN_BUDGET,
    WaitingCause.KV_SHORT.value: Verdict.KV_SPACE,
    WaitingCause.RECOVERING.value: Verdict.KV_SPACE,
    WaitingCause.ROW_CAP.value: Verdict.ROW_CAP,
}
_SPARED = (MissReason.EVICTED, MissReason.OTHER_NAMESPACE, MissReason.CACHE_OFF)
"""Misses that another cache would not have had."""


def _ruling(view: SchedulerView) -> Verdict | None:
    """What ended most of the recent passes."""
    counts: dict[Verdict, int] = {}
    for cause, number in view.queue.recent_stops.items():
        if cause in _RULES:
            counts[_RULES[cause]] = counts.get(_RULES[cause], 0) + number
    return max(counts, key=lambda verdict: counts[verdict], default=None)


def _spared_share(view: SchedulerView) -> float:
    cache = view.cache
    spared = sum(cache.recent_missed_tokens.get(reason.value, 0) for reason in _SPARED)
    return spared / cache.recent_prompt_tokens if cache.recent_prompt_tokens else 0.0


# ---------------------------------------------------------------- one verdict each


def _misses(view: SchedulerView) -> Diagnosis:
    cache, missed = view.cache, view.cache.recent_missed_tokens
    main = max(_SPARED, key=lambda reason: missed.get(reason.value, 0))
    share = missed.get(main.value, 0) / cache.recent_prompt_tokens
    evidence = (
        f"Of the last {cache.recent_prompt_tokens:,} prompt tokens {_percent(cache.recent_cached_tokens, cache)} came from "
        f"the cache; {_percent(missed.get(main.value, 0), cache)} {_FATES[main]}.",
        *_stops(view),
        *_present(view),
    )
    sentence = f"The queue grows because of cache misses: {share:.0%} of the prompt tokens {_FATES[main]}."
    return Diagnosis(Verdict.CACHE_MISSES, sentence, evidence, _CURES[main](view))


_FATES = {
    MissReason.EVICTED: "had been cached and were evicted before they were needed again",
    MissReason.OTHER_NAMESPACE: "are cached for another key or salt, with whom nothing is shared",
    MissReason.CACHE_OFF: "are computed every time, because the prefix cache is off",
}


def _keep_more(view: SchedulerView) -> tuple[Advice, ...]:
    settings, lost_tokens = view.settings, view.cache.recent_missed_tokens.get(MissReason.EVICTED.value, 0)
    more = min(settings.pages, -(-lost_tokens // settings.page_size))
    pages = Advice("--pages", str(settings.pages + more), str(settings.pages), "the cache can keep what is asked for again")
    if settings.policy == "fcfs":
        hint = "requests that share a prefix run while it is cached"
        return pages, Advice("--policy", "hrrn", "fcfs", hint)
    return (pages,)


def _share_more(view: SchedulerView) -> tuple[Advice, ...]:
    return ()  # who may share with whom is decided by keys and salts, not by a setting


def _switch_on(view: SchedulerView) -> tuple[Advice, ...]:
    return (Advice("--prefix-cache", "on", "off", "common prefixes are computed once"),)


_CURES: dict[MissReason, Callable[[SchedulerView], tuple[Advice, ...]]] = {
    MissReason.EVICTED: _keep_more,
    MissReason.OTHER_NAMESPACE: _share_more,
    MissReason.CACHE_OFF: _switch_on,
}


def _budget(view: SchedulerView) -> Diagnosis:
    budget, waiting_tokens = view.budget, view.queue.waiting_prompt_tokens
    steps = -(-waiting_tokens // max(1, budget.step_tokens - budget.decode_tokens))
    evidence = (
        f"{count(waiting_tokens, 'prompt token')} wait: {count(steps, 'step')} of {budget.step_tokens} tokens, "
        f"of which requests that generate take {budget.decode_tokens}.",
        *_stops(view),
        *_present(view),
    )
    larger = 2 * budget.step_tokens
    why = "more prompts are computed in one step; each step takes longer, so output gets a little less even"
    sentence = f"The queue grows because the token budget of a step is too small: {budget.step_tokens} tokens."
    advice = Advice("--max-step-tokens", str(larger), str(budget.step_tokens), why)
    return Diagnosis(Verdict.TOKEN_BUDGET, sentence, evidence, (advice,))


def _kv(view: SchedulerView) -> Diagnosis:
    kv = view.kv
    held = sum(holder.own_pages + holder.shared_pages for holder in kv.holders)
    evidence = [
        f"Of {kv.pages} pages {kv.free} are free and {kv.evictable} hold cached prefixes in nobody's use; {kv.promised} are "
        f"kept for output to come (ratio {kv.new_token_ratio:.2f}).",
        f"{count(held, 'page')} are held by {count(len(kv.holders), 'running request')}.",
    ]
    if view.cache.retractions:
        evidence.append(f"{count(view.cache.retractions, 'running request')} had to be sent back for want of memory.")
    wanted = max(kv.peak_wanted, kv.pages + 1)
    why = f"all {count(min(view.queue.waiting + view.queue.running, view.settings.max_running), 'request')} fit at once"
    sentence = (
        f"The queue grows because KV space is too small: {count(kv.pages, 'page')} of {view.settings.page_size} tokens."
    )
    advice = Advice("--pages", str(wanted), str(kv.pages), why)
    return Diagnosis(Verdict.KV_SPACE, sentence, (*evidence, *_stops(view), *_present(view)), (advice,))


def _rows(view: SchedulerView) -> Diagnosis:
    settings, wanted = view.settings, view.queue.running + view.queue.waiting
    room = view.kv.free + view.kv.evictable - view.kv.promised
    evidence = (
        f"{count(max(0, room), 'KV page')} are free for others, and a step has {settings.max_step_tokens} tokens.",
        *_stops(view),
        *_present(view),
    )
    rows = Advice("--max-running", str(wanted), str(settings.max_running), "all of them are computed side by side")
    sentence = f"The queue grows because of the row cap: only {count(settings.max_running, 'request')} may run at a time."
    if wanted <= settings.max_step_tokens:
        return Diagnosis(Verdict.ROW_CAP, sentence, evidence, (rows,))
    budget = Advice(
        "--max-step-tokens", str(wanted), str(settings.max_step_tokens), "a step must have a token for every row"
    )
    return Diagnosis(Verdict.ROW_CAP, sentence, evidence, (rows, budget))


_WORDS: dict[Verdict, Callable[[SchedulerView], Diagnosis]] = {
    Verdict.TOKEN_BUDGET: _budget,
    Verdict.KV_SPACE: _kv,
    Verdict.ROW_CAP: _rows,
}

# ---------------------------------------------------------------- evidence for all


def _stops(view: SchedulerView) -> tuple[str, ...]:
    stops = view.queue.recent_stops
    words = [f"{NAMES[WaitingCause(cause)]} ({number})" for cause, number in sorted(stops.items(), key=lambda s: -s[1])]
    return (f"What stopped the last {count(sum(stops.values()), 'step')} that left somebody waiting: {', '.join(words)}.",)


def _present(view: SchedulerView) -> tuple[str, ...]:
    head = view.queue.head
    return () if head is None else (f"First in the line: {describe(head.cause)}.",)


def _percent(tokens: int, cache: CacheView) -> str:
    return f"{tokens / max(1, cache.recent_prompt_tokens):.0%}"
