"""The story of a request, heard in events."""

import branchline.observe.stories as stories_module
from branchline.base.finish import FinishReason
from branchline.core.events import Admitted, Committed, Finished, FirstToken, Retracted, Submitted
from branchline.core.explain import Miss, MissReason
from branchline.observe.stories import Stories

MISS = Miss(MissReason.NEVER_SEEN, 60, 40)


def tell(stories, *events):
    for event in events:
        stories.notice(event)


def test_times_tokens_and_a_retraction():
    stories = Stories()
    tell(
        stories,
        Submitted(10, "a", 100, 8, "tenant"),
        Admitted(30, "a", 60, 0, tail_tokens=4, missed=(MISS,)),
        Committed(35, 1, 5),
        FirstToken(50, "a"),
        Retracted(60, "a", 102, 3),
        Admitted(75, "a", 60, 1),
    )
    live = stories.so_far("a", 80, completion_tokens=3, chunks=2, steps=5)
    assert (live.is_finished, live.finish, live.decode_ns, live.completion_tokens) == (False, "", 30, 3)
    assert stories.finished("a") is None
    tell(stories, Finished(100, "a", FinishReason.STOP, 100, 8, chunks=3, steps=11))
    story = stories.finished("a")
    assert (story.queue_ns, story.prefill_ns, story.decode_ns, story.requeued_ns) == (20, 20, 50, 15)
    assert (story.cached_page_tokens, story.cached_tail_tokens, story.missed) == (56, 4, (MISS,))
    assert (story.chunks, story.steps, story.retractions, story.finish) == (3, 11, 1, "stop")
    assert story.tenant == "tenant"
    assert stories.so_far("a", 110, completion_tokens=8, chunks=3, steps=11) is None


def test_whoever_never_ran_only_queued():
    stories = Stories()
    tell(stories, Submitted(10, "a", 5, 8), Finished(40, "a", FinishReason.WAITING_TIMEOUT, 5, 0))
    story = stories.finished("a")
    assert (story.queue_ns, story.prefill_ns, story.decode_ns, story.finish) == (30, 0, 0, "waiting_timeout")


def test_a_refusal_has_a_short_story_and_does_not_end_another():
    stories = Stories()
    tell(stories, Finished(40, "a", FinishReason.REJECTED, 5, 0))
    assert stories.finished("a").finish == "rejected"
    tell(stories, Submitted(50, "b", 5, 8), Finished(60, "b", FinishReason.REJECTED, 5, 0))
    assert stories.finished("b") is None
    assert stories.so_far("b", 70, completion_tokens=0, chunks=0, steps=0) is not None


def test_only_so_many_are_remembered(monkeypatch):
    monkeypatch.setattr(stories_module, "FINISHED_STORIES", 3)
    stories = Stories()
    for i in range(5):
        tell(stories, Submitted(i, f"r{i}", 5, 8), Finished(i, f"r{i}", FinishReason.LENGTH, 5, 8))
    assert [i for i in range(5) if stories.finished(f"r{i}")] == [2, 3, 4]
