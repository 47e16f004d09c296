"""Causes in plain words. No ids: a sentence may be shown to anybody who may see the figures in it.

Knows: English. Refuses to know: where the figures come from.
"""

from branchline.core.explain import (
    Behind,
    Cause,
    Fairness,
    Follows,
    KvShort,
    NotTried,
    Paused,
    Priority,
    Recovering,
    RowCap,
    TokenBudget,
    WaitingCause,
)

NAMES = {
    WaitingCause.TOKEN_BUDGET: "the token budget of a step",
    WaitingCause.KV_SHORT: "KV space",
    WaitingCause.ROW_CAP: "the row cap",
    WaitingCause.FOLLOWS: "a running request that computes the same prefix",
    WaitingCause.RECOVERING: "recovery from a retraction",
    WaitingCause.BEHIND: "the request in front",
    WaitingCause.PRIORITY: "requests of higher priority",
    WaitingCause.FAIRNESS: "other tenants, who have had less",
    WaitingCause.PAUSED: "a pause by an operator",
    WaitingCause.NOT_TRIED: "the next step",
}


def count(number: int, noun: str) -> str:
    """``1 page``, ``2 pages``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe(cause: Cause) -> str:
    """What keeps a request waiting, with its numbers."""
    match cause:
        case TokenBudget():
            words = (
                f"the token budget of {cause.step_tokens} tokens a step is used up: {cause.decode_tokens} by requests that "
                f"generate, {cause.prefill_tokens} by prompts; {count(cause.prompt_tokens_ahead, 'prompt token')} come first"
            )
        case KvShort():
            words = _describe_shortage(cause)
        case RowCap():
            words = f"all {count(cause.rows, 'row')} are taken{_at_the_latest(cause.next_row_tokens, 'the next is free')}"
        case Follows():
            words = f"a running request computes the same prefix: {count(cause.tokens_left, 'token')} to go"
        case Recovering():
            words = (
                f"memory ran short a moment ago: {count(cause.available_pages, 'page')} are available, "
                f"admission opens at {cause.needed_pages} or when a running request ends"
            )
        case Behind():
            words = f"it stands behind a request that waits for {NAMES[cause.because]}"
        case Priority():
            words = (
                f"{count(cause.ahead_count, 'waiting request')} of higher priority come first "
                f"(up to {cause.their_priority}; its own is {cause.own_priority})"
            )
        case Fairness():
            words = f"{count(cause.ahead_count, 'waiting request')} of tenants that have had less come first"
        case Paused():
            words = "the engine is paused"
        case NotTried():
            words = "it has come, or come back, since the last step was planned"
    return words


def remedy(cause: Cause) -> str:
    """What would admit it."""
    match cause:
        case TokenBudget():
            words = "room in the token budget: when the prompts before it are computed, or with a larger --max-step-tokens"
        case KvShort():
            after = cause.enough_after_tokens
            when = "" if after is None else f" (in {count(after, 'token')} at the latest)"
            words = f"{count(cause.short_pages, 'more free KV page')}: when running requests end{when}, or with more --pages"
        case RowCap():
            words = "a free row: when a running request ends, or with a larger --max-running"
        case Follows():
            words = "the end of the prefix that is being computed; it will not be computed twice"
        case Recovering():
            words = f"{count(cause.needed_pages, 'available page')}, or the end of a running request"
        case Behind():
            words = "the admission of the request in front: nobody overtakes it for being small"
        case Priority():
            words = "the admission of those of higher priority, or a higher priority of its own"
        case Fairness():
            words = "other tenants catching up with what its own has had"
        case Paused():
            words = "POST /continue_generation"
        case NotTried():
            words = "the next step, if there is room"
    return words


def _describe_shortage(cause: KvShort) -> str:
    promise = f" and {cause.promised_pages} for output to come" if cause.promised_pages else ""
    held = f", held by {count(cause.holder_count, 'running request')}" if cause.holder_count else ""
    return (
        f"KV memory is short by {count(cause.short_pages, 'page')}: {cause.needed_pages} needed{promise}, "
        f"{cause.available_pages} available{held}{_at_the_latest(cause.next_release_tokens, 'the next of them ends')}"
    )


def _at_the_latest(tokens: int | None, what: str) -> str:
    return "" if tokens is None else f"; {what} in {count(tokens, 'token')} at the latest"
