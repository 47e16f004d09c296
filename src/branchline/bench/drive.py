"""Drives a server: in closed loop (so many clients, each with its next request when the last one is answered) or in open
loop (requests come when they come). A failed request ends its conversation and is counted; nothing is tried again.

Knows: order and bounds. Refuses to know: HTTP (``bench.client``), what figures mean (``bench.figures``).
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from branchline.bench.arrivals import Arrival
from branchline.bench.client import Completion, RequestFailed, Server, complete
from branchline.bench.workloads import Conversation

MOST_IN_FLIGHT = 512
"""Open loop: conversations at the same time. Those that come beyond fail, for to delay them would flatter the server."""
TOO_MANY = f"more than {MOST_IN_FLIGHT} requests at the same time: not sent"
NEVER_SENT = "not sent: an earlier turn of the conversation failed"


@dataclass(slots=True)
class Tally:
    """What has come of the requests so far. Filled by one run, then read."""

    completions: list[Completion] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    wall_s: float = 0.0

    @property
    def failed(self) -> int:
        return self.failures.total()


async def closed_loop(server: Server, model: str, conversations: Iterable[Conversation], clients: int) -> Tally:
    tally, queue = Tally(), deque(conversations)

    async def client() -> None:
        while queue:
            await _converse(server, model, queue.popleft(), tally)

    started_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    tally.wall_s = time.perf_counter() - started_s
    return tally


async def open_loop(server: Server, model: str, arrivals: Sequence[Arrival]) -> Tally:
    """``arrivals`` in order of time. Their first turns are timed from the moment they are due."""
    tally, running = Tally(), set[asyncio.Task[None]]()
    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for arrival in arrivals:
            due_s = started_s + arrival.at_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            if len(running) >= MOST_IN_FLIGHT:
                tally.failures[TOO_MANY] += len(arrival.conversation)
                continue
            task = group.create_task(_converse(server, model, arrival.conversation, tally, due_s))
            running.add(task)
            task.add_done_callback(partial(set.discard, running))
    tally.wall_s = time.perf_counter() - started_s
    return tally


async def _converse(
    server: Server, model: str, conversation: Conversation, tally: Tally, due_s: float | None = None
) -> None:
    history = ""
    for number, turn in enumerate(conversation):
        try:
            completion = await complete(server, model, history + turn.text, turn.output_tokens, due_s)
        except RequestFailed as error:
            tally.failures[str(error)] += 1
            if left := len(conversation) - number - 1:
                tally.failures[NEVER_SENT] += left
            return
        history += turn.text + completion.text + "\n"
        tally.completions.append(completion)
        due_s = None
