"""The production loop around a real executor, driven turn by turn in the thread of the test."""

from branchline.base.clock import MonotonicClock
from branchline.base.config import EngineConfig
from branchline.cache.null import NullCache
from branchline.cache.pages import PageLedger
from branchline.cache.radix import RadixCache
from branchline.core.request import RequestSpec, SamplingParams
from branchline.engine.loop import Loop
from branchline.sched.scheduler import Scheduler
from branchline.wire.inproc import InprocInbox
from branchline.wire.messages import Submit
from branchline.worker.runner import LocalWorker
from tests.support.harness import ListOutbox

MOST_RETRACTIONS = 6
"""Then there are no more: a prompt that needs more steps than it is given between two of them would never end."""


def generate_tokens(executor, prompts, *, max_new, retract_every=None, sampling=None, **settings):
    """Output tokens of each prompt, all submitted at once; the scheduler is checked on the way and at the end."""
    config = EngineConfig(
        **{"context_length": 2048, "page_size": executor.page_size, "pages": executor.page_count, "max_running": 16}
        | settings
    )
    clock = MonotonicClock()
    ledger = PageLedger(config.pages)
    cache = (RadixCache if config.prefix_cache else NullCache)(ledger, config.page_size)
    scheduler = Scheduler(config, ledger, cache)
    worker = LocalWorker(executor, token_limit=executor.vocab_size, threads=2, clock=clock)
    inbox, outbox = InprocInbox(), ListOutbox()
    loop = Loop(scheduler, worker, inbox, outbox, clock, config.depth)
    for index, prompt in enumerate(prompts):
        spec = RequestSpec(
            request_id=str(index), prompt=tuple(prompt), sampling=sampling or SamplingParams(temperature=0),
            max_new_tokens=max_new, seed=index,
        )  # fmt: skip
        inbox.put(Submit(spec))
    turn = 0
    try:
        while loop.turn():
            turn += 1
            if retract_every and turn % retract_every == 0 and turn <= retract_every * MOST_RETRACTIONS:
                scheduler.retract_youngest(clock.now_ns())
        scheduler.check()
    finally:
        worker.close()
    tokens = {str(index): [] for index in range(len(prompts))}
    for output in outbox.outputs:
        tokens[output.request_id].extend(output.tokens)
    return [tokens[str(index)] for index in range(len(prompts))], scheduler.stats()
