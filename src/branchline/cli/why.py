"""`branchline why [REQUEST_ID]`, `branchline why --queue`: a running server explains itself.

Knows: words and colours. Refuses to know: how anything was found out (`sched.explain`), what is wrong (`observe.diagnose`).
"""

import argparse
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from branchline.base.clock import NS_PER_S
from branchline.base.config import Environment
from branchline.base.errors import RequestError
from branchline.core.explain import Miss, MissReason, RequestAnswer, RequestStory, RequestView, SchedulerView, WaitingView
from branchline.core.words import count, describe
from branchline.observe.diagnose import Diagnosis, Verdict, diagnose

TIMEOUT_S = 30.0
DEFAULT_URL = "http://127.0.0.1:8000"

Answer = TypeVar("Answer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "request_id", nargs="?", metavar="REQUEST_ID",
        help="`id` of an answer, or the x-request-id header of a call (default: explain the queue)",
    )  # fmt: skip
    parser.add_argument("--queue", action="store_true", help="why the queue grows, and which setting would help")
    parser.add_argument("--url", default=DEFAULT_URL, help="where the server is (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    environment = Environment.read()
    key = next(iter((*environment.admin_keys, *environment.api_keys)), None)
    console = Console(highlight=False)
    if options.request_id is not None:
        path = "/v1/requests/" + urllib.parse.quote(options.request_id, safe="")
        answer = fetch(options.url, path, key, RequestAnswer)
        for view in answer.choices:
            show_request(console, view, answer.now_ns)
    if options.queue or options.request_id is None:
        scheduler = fetch(options.url, "/v1/scheduler", key, SchedulerView)
        show_queue(console, scheduler, diagnose(scheduler))
    return 0


def fetch(url: str, path: str, key: str | None, kind: type[Answer]) -> Answer:
    """Raises RequestError, in words for the person at the terminal, if there is no answer."""
    if not url.startswith(("http://", "https://")):
        raise RequestError(f"{url} is not an address of a server: it must begin with http:// or https://")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url.rstrip("/").removesuffix("/v1") + path, headers=headers)  # noqa: S310 - checked
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310 - checked above
            return msgspec.json.decode(response.read(), type=kind)
    except urllib.error.HTTPError as error:
        raise RequestError(_refusal(error)) from None
    except msgspec.DecodeError:
        raise RequestError(f"What answers at {url} is not a Branchline server of this version.") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise RequestError(f"No server answers at {url} ({reason}). Is it running? Another address: --url.") from None


def _refusal(error: urllib.error.HTTPError) -> str:
    with error:
        if error.code in (401, 403):
            return (
                "The server wants an admin key for this: put it into BRANCHLINE_ADMIN_KEYS, here and where it was started."
            )
        try:
            return str(json.load(error)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return f"The server answered with status {error.code}."


# ---------------------------------------------------------------- the queue


def show_queue(console: Console, view: SchedulerView, diagnosis: Diagnosis) -> None:
    queue = view.queue
    if diagnosis.verdict is not Verdict.NO_QUEUE:
        waits = f"{count(queue.waiting, 'request')} waiting, {queue.running} running"
        console.print(f"{waits}; the longest has waited {seconds(queue.oldest_waited_ns)}.")
    colour = "green" if diagnosis.verdict is Verdict.NO_QUEUE else "yellow"
    console.print(f"[bold {colour}]{escape(diagnosis.sentence)}[/]")
    for sentence in diagnosis.evidence:
        console.print(f"  [dim]•[/] {escape(sentence)}")
    for advice in diagnosis.advice:
        words = f"(now {escape(advice.now)}): {escape(advice.why)}."
        console.print(f"Try [bold]{advice.flag} {escape(advice.value)}[/] {words}")


# ---------------------------------------------------------------- one request


def show_request(console: Console, view: RequestView, now_ns: int) -> None:
    if isinstance(view, WaitingView):
        _show_waiting(console, view)
    else:
        _show_story(console, view, now_ns)


def _show_waiting(console: Console, view: WaitingView) -> None:
    name = escape(view.request_id)
    place = f"number {view.position} in the line, for {seconds(view.waited_ns)}"
    console.print(
        f"[bold]{name}[/] waits: {place}; {view.cached_tokens} of its {view.prompt_tokens} prompt tokens are cached."
    )
    if view.retractions:
        console.print(f"It ran already and was sent back {count(view.retractions, 'time')} because memory ran short.")
    console.print(f"[bold yellow]Why:[/] {escape(describe(view.cause))}.")
    console.print(f"[bold]What would admit it:[/] {escape(view.would_admit)}.")
    start = "unknown" if view.starts_in_ns is None else f"in {seconds(view.starts_in_ns)} or sooner"
    console.print(f"[bold]Estimated start:[/] {start}.")


def _show_story(console: Console, view: RequestStory, now_ns: int) -> None:
    end = f"ended ({view.finish})" if view.is_finished else "is running"
    console.print(f"[bold]{escape(view.request_id)}[/] {end}; it came {seconds(now_ns - view.arrived_at_ns)} ago.")
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in _facts(view):
        table.add_row(f"[bold]{name}[/]", escape(value))
    console.print(table)
    for miss in view.missed:
        console.print(f"  [dim]•[/] {escape(explain_miss(miss, now_ns))}")


def _facts(view: RequestStory) -> Iterator[tuple[str, str]]:
    yield "queue", seconds(view.queue_ns)
    yield "prompt", f"{seconds(view.prefill_ns)} for {count(view.prompt_tokens, 'token')} in {count(view.chunks, 'chunk')}"
    yield (
        "output",
        f"{seconds(view.decode_ns)} for {count(view.completion_tokens, 'token')}; {count(view.steps, 'step')} in all",
    )
    if view.retractions:
        again = f"waited {seconds(view.requeued_ns)} in the line again"
        yield "sent back", f"{count(view.retractions, 'time')} for want of memory, {again}"
    cached = view.cached_page_tokens + view.cached_tail_tokens
    tail = (
        f", {view.cached_tail_tokens} of them copied from a page that goes on differently" if view.cached_tail_tokens else ""
    )
    yield "from the cache", f"{cached} of {count(view.prompt_tokens, 'token')}{tail}"


_MISSES = {
    MissReason.NEVER_SEEN: "had never been seen",
    MissReason.DIVERGED: "had to be computed: what is cached goes on differently from there",
    MissReason.OTHER_NAMESPACE: "are cached for another key or salt, and are not shared",
    MissReason.SHORTER_THAN_PAGE: "are less than a page, and only whole pages are cached",
    MissReason.LOGPROBS_WANTED: "had to be computed for their log probabilities",
    MissReason.CACHE_OFF: "had to be computed: the prefix cache is off",
}


def explain_miss(miss: Miss, now_ns: int) -> str:
    tokens = f"{count(miss.token_count, 'token')} from number {miss.start} on"
    if miss.reason is not MissReason.EVICTED:
        return f"{tokens} {_MISSES[miss.reason]}"
    age = "" if miss.evicted_at_ns is None else f" {seconds(now_ns - miss.evicted_at_ns)} ago"
    whom = f", to make room for {miss.evicted_for}" if miss.evicted_for else ""
    return f"{tokens} had been cached and were evicted{age}{whom}"


def seconds(ns: int) -> str:
    """A duration as people say it."""
    if ns < NS_PER_S // 10:
        return f"{ns / 1_000_000:.1f} ms"
    return f"{ns / NS_PER_S:.1f} s" if ns < 600 * NS_PER_S else f"{ns / NS_PER_S / 60:.0f} min"
