"""The life of one request, told as a test: submit, two chunks, three decodes, a retraction, a finish.

Read it after docs/architecture.md. The scheduler is the real one; the worker is played by hand, so that every plan and
every result is on the page. Pages hold 4 tokens, a step has a budget of 6 tokens, and nothing overlaps.
"""

from branchline.base.config import EngineConfig
from branchline.base.finish import FinishReason
from branchline.cache.pages import PageLedger
from branchline.cache.radix import RadixCache
from branchline.core.plan import PageCopy, PlanRow
from branchline.core.request import RequestSpec, SamplingParams
from branchline.core.result import Output, RowResult, StepResult, Usage
from branchline.sched.scheduler import Scheduler

NOW = 0


def test_the_life_of_one_request():
    config = EngineConfig(page_size=4, max_step_tokens=6, max_running=2, context_length=64)
    ledger = PageLedger(8)
    scheduler = Scheduler(config, ledger, RadixCache(ledger, page_size=4))

    # A client asks for five tokens after a prompt of ten. It is waiting; nothing is reserved yet.
    prompt = tuple(range(10))
    scheduler.submit(
        RequestSpec(request_id="tale", prompt=prompt, sampling=SamplingParams(temperature=0), max_new_tokens=5, seed=1), NOW
    )
    assert scheduler.stats().waiting == 1
    assert ledger.free_pages == 8

    # The first plan admits it: three pages for ten tokens, and a chunk of six, which is all the budget allows.
    # The worker is told everything about the sequence once, when it enters slot 0.
    first = scheduler.plan(NOW)
    assert ledger.private_pages == 3
    assert first.opens[0].tokens == prompt
    pages = first.rows[0].pages
    assert first.rows == (PlanRow(slot=0, seq=1, epoch=0, start=0, count=6, sample=False, pages=pages),)

    # The chunk comes back. Its one whole page goes into the tree, where others could hit it already.
    scheduler.commit(StepResult(1, (RowResult(1, 0),)), NOW)
    assert (ledger.tree_pages, ledger.private_pages) == (1, 2)
    assert scheduler.take_news() == []

    # The second chunk is the rest of the prompt, and it samples.
    second = scheduler.plan(NOW)
    assert second.opens == ()
    assert [(row.start, row.count, row.sample) for row in second.rows] == [(6, 4, True)]
    scheduler.commit(StepResult(2, (RowResult(1, 0, token=50),)), NOW)
    assert scheduler.take_news() == [Output("tale", (50,), cached_tokens=0)]

    # Three decodes: rows of one token. The first two fit on the third page, the third one starts a new page.
    for step, token in ((3, 51), (4, 52), (5, 53)):
        plan = scheduler.plan(NOW)
        assert [(row.start, row.count, row.sample) for row in plan.rows] == [(7 + step, 1, True)]
        scheduler.commit(StepResult(step, (RowResult(1, 0, token=token),)), NOW)
    assert [output.tokens for output in scheduler.take_news()] == [(51,), (52,), (53,)]
    assert len(scheduler.plan(NOW).rows[0].pages) == 4

    # While step 6 runs, the sequence is retracted. The thirteen positions that are committed fill three pages: these
    # stay in the tree, unlocked. The rest of its pages is retired, for the step in flight still writes there.
    assert scheduler.retract_youngest(NOW)
    assert (ledger.tree_pages, ledger.private_pages, ledger.retired_pages) == (3, 0, 1)

    # The result of step 6 comes too late: its epoch has passed. The token is dropped, the page becomes free.
    scheduler.commit(StepResult(6, (RowResult(1, 0, token=54),)), NOW)
    assert scheduler.take_news() == []
    assert scheduler.stats().late_results == 1
    assert (ledger.retired_pages, ledger.free_pages) == (0, 5)

    # It is admitted again: twelve of its fourteen known tokens are still cached, two are computed anew. The worker
    # hears of it as of a new tenant, and what was dropped is sampled again: the same token, by the same counter.
    again = scheduler.plan(NOW)
    assert again.opens[0].tokens == (*prompt, 50, 51, 52, 53)
    assert [(row.epoch, row.start, row.count, row.sample) for row in again.rows] == [(1, 12, 2, True)]

    # The fifth token is the last: the request ends once, with a reason, and everything it held is given back.
    scheduler.commit(StepResult(7, (RowResult(1, 1, token=54),)), NOW)
    (end,) = scheduler.take_news()
    assert end.tokens == (54,)
    assert end.finish.reason is FinishReason.LENGTH
    assert end.finish.usage == Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=0)
    assert scheduler.plan(NOW) is None
    scheduler.check()
    assert ledger.private_pages == 0
    assert scheduler.stats().locked_nodes == 0

    # What it computed outlives it. A second request that shares eleven tokens shares two pages as they are, and gets
    # the common part of the third as a copy: sharing is exact to the token.
    scheduler.submit(
        RequestSpec(request_id="heir", prompt=(*prompt, 50, 99), sampling=SamplingParams(), max_new_tokens=1, seed=1), NOW
    )
    heir = scheduler.plan(NOW)
    assert [(row.start, row.count) for row in heir.rows] == [(11, 1)]
    assert heir.rows[0].pages[:2] == pages[:2]
    assert heir.copies == (PageCopy(source=pages[2], target=heir.rows[0].pages[2], token_count=3),)
    scheduler.commit(StepResult(8, (RowResult(heir.rows[0].seq, 0, token=7),)), NOW)
    (end,) = scheduler.take_news()
    assert end.finish.usage == Usage(prompt_tokens=12, completion_tokens=1, cached_tokens=11)

    # Flushed, the engine is as empty as on the first day.
    assert scheduler.flush()
    assert ledger.free_pages == 8
