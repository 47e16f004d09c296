"""Historical bugs of serving engines, re-created in our own code, one switch each.

A bug replaces one function of production code by a faulty one for as long as its ``with`` block lasts. The proof that
our tests work is that each is caught: most by random schedules, the rest by the tests named with them
(`tests/sched/test_bugs.py`, `python -m tests.schedules --bugs`). Ids are those of the public incident the idea is from,
as ``docs/proof.md`` lists them.
"""

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import branchline.api.body
import branchline.api.fanout
import branchline.core.limits
import branchline.ops.sample
import branchline.sched.compose
import branchline.text.side
from branchline.api.auth import HostRule, Keyring
from branchline.base.errors import InvalidRequest
from branchline.base.finish import FinishReason
from branchline.cache.node import Node
from branchline.cache.pages import PageLedger
from branchline.cache.radix import RadixCache
from branchline.core.request import Namespace
from branchline.core.result import Finish, Output, Usage
from branchline.sched.admission import Admission
from branchline.sched.budget import StepBudget
from branchline.sched.commit import Committer
from branchline.sched.endings import Endings
from branchline.sched.kv import KvBooks
from branchline.sched.lifecycle import Seq, State
from branchline.sched.roster import Roster
from branchline.sched.scheduler import Scheduler
from branchline.text.detokenize import Detokenizer
from branchline.text.prompts import PromptReader
from branchline.text.side import TextSide
from branchline.text.stops import StopMatcher, _step
from branchline.text.stream import TextStream
from tests.support.schedules import run_schedule

SCHEDULES = "random schedules"


@dataclass(frozen=True)
class Bug:
    name: str
    origin: str
    """Id in the catalogue of incidents; ``own`` for a mistake that only our design makes possible."""
    sentence: str
    owner: Any
    attribute: str
    make: Callable[[Any], Any]
    """From the right function to the faulty one."""
    test: str
    """``module:function`` of the test that catches it, or SCHEDULES."""
    arguments: tuple[Any, ...] = ()

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        original = self.owner.__dict__[self.attribute]
        setattr(self.owner, self.attribute, self.make(original))
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, original)

    def load_test(self) -> Callable[[], None]:
        """The test that catches it. Import it before the bug is on: test modules compute things when imported."""
        module, name = self.test.split(":")
        function = getattr(importlib.import_module(module), name)
        return lambda: function(*self.arguments)


@dataclass(frozen=True)
class Catch:
    bug: Bug
    seeds: int
    """Random schedules it took; 0 if a test of its own caught it."""
    found: str
    """What was raised first; empty if nothing was."""

    @property
    def is_caught(self) -> bool:
        return bool(self.found)

    @property
    def line(self) -> str:
        how = f"{self.seeds} seeds" if self.seeds else self.bug.test.split(":")[1]
        return f"{self.bug.origin:4}  {self.bug.name:52} {how if self.is_caught else 'NOT CAUGHT':40.40}  {self.found:.90}"


def catch(known: Bug, most_seeds: int = 1000) -> Catch:
    """Let the suite look for a bug."""
    if known.test != SCHEDULES:
        test = known.load_test()
        with known.on():
            return Catch(known, 0, _complaint(test))
    with known.on():
        for seed in range(most_seeds):
            found = _complaint(lambda seed=seed: run_schedule(seed))
            if found:
                return Catch(known, seed + 1, found)
    return Catch(known, most_seeds, "")


def _complaint(action: Callable[[], Any]) -> str:
    """What it raises, in a line; warnings are errors, as in all our tests. (``pytest.raises`` that sees nothing raised is
    an outcome, not an exception.)"""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            action()
    except (Exception, pytest.fail.Exception) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


BUGS: list[Bug] = []


def bug(origin, owner, attribute, *, test=SCHEDULES, arguments=()):
    """The decorated function turns the right one into the faulty one; its docstring is the sentence."""

    def add(make):
        name = make.__name__.replace("_", " ")
        BUGS.append(Bug(name, origin, " ".join(make.__doc__.split()), owner, attribute, make, test, arguments))
        return make

    return add


# ---------------------------------------------------------------- pages and locks


@bug("R057", PageLedger, "_retire")
def free_before_the_step_is_done(original):
    """Pages are free at once, though a step in flight still uses them."""

    def faulty(self, pages, last_step):
        self._make_free(pages)

    return faulty


@bug("R071", PageLedger, "settle")
def pages_of_a_lost_event_never_return(original):
    """Retired pages wait for ever for a step that has long been committed."""
    return lambda self, step: setattr(self, "_settled", step) if step % 7 else original(self, step)


@bug("R047", RadixCache, "unlock")
def lock_kept_when_admission_fails(original):
    """The lock on a match is not given back if the pages do not suffice."""
    return lambda self, path, last_step: original(self, path, last_step) if last_step else None


@bug("R044", RadixCache, "unlock")
def unlock_forgets_the_ancestors(original):
    """Only the deepest node of a path is unlocked: what is above it is locked for ever."""

    def faulty(self, path, last_step):
        parent, path.parent = path.parent, path.parent and _Top()
        try:
            original(self, path, last_step)
        finally:
            path.parent = parent

    return faulty


class _Top:
    """Stands for a parent that needs no lock."""

    parent = None


@bug("R054", KvBooks, "let_go")
def pages_freed_though_the_tree_has_them(original):
    """All pages of a sequence that leaves are released, those given to the tree included."""

    def faulty(self, seq, now_ns, *, keep):
        tree = seq.page_table[: seq.tree_pages]
        count = original(self, seq, now_ns, keep=keep)
        for page in tree:
            self.ledger._make_free([page])
        return count

    return faulty


@bug("R055", Seq, "share")
def duplicates_not_remapped(original):
    """After an insertion the sequence goes on with its own copy of pages that it has just released."""

    def faulty(self, insertion):
        table = self.page_table
        original(self, insertion)
        self.page_table = table

    return faulty


@bug("R056", KvBooks, "let_go")
def pages_released_twice(original):
    """The private pages of a sequence that leaves are released twice."""

    def faulty(self, seq, now_ns, *, keep):
        pages = seq.private_pages
        count = original(self, seq, now_ns, keep=keep)
        self.ledger.release(seq.seq, pages, seq.last_step)
        return count

    return faulty


@bug("R076", Node, "is_evictable_leaf")
def locked_leaves_are_evicted(original):
    """Eviction does not look at locks."""
    return property(lambda self: not (self.children or self.dropped or self.parent is None))


@bug("own", Node, "split")
def split_forgets_the_lock(original):
    """The upper half of a locked node that splits is not locked."""

    def faulty(self, page_count):
        upper = original(self, page_count)
        upper.lock_count = 0
        return upper

    return faulty


@bug("R057", Node, "split")
def split_forgets_the_reader(original):
    """The upper half of a node that splits does not know which step still reads it."""

    def faulty(self, page_count):
        upper = original(self, page_count)
        upper.last_step = 0
        return upper

    return faulty


@bug("R095", Admission, "_admit")
def copied_page_not_held(original):
    """The source of a page copy is not held until the copy has run."""

    def faulty(self, seq, match, step, now_ns, copies):
        return original(self, seq, match, 0, now_ns, copies)

    return faulty


@bug("R070", RadixCache, "cut")
def lock_on_more_than_is_used(original):
    """A lock protects the whole node in which a match ends: who runs alone starves beside pages that nobody uses.
    (This one was ours; the random schedules found it.)"""
    return lambda self, match: match.path


@bug("R074", KvBooks, "pages_for")
def pages_rounded_down(original):
    """The page of the last few tokens is not counted."""
    return lambda self, token_count: max(1, token_count // self.page_size)


@bug("R044", Roster, "_vacate")
def slots_leak(original):
    """One slot in five is not given back."""

    def faulty(self, seq):
        original(self, seq)
        if seq.seq % 5 == 0 and seq.slot in self._free_slots:
            self._free_slots.remove(seq.slot)

    return faulty


# ---------------------------------------------------------------- meaning of the cache


@bug("R078", RadixCache, "_root")
def salt_not_in_the_key(original):
    """Salt and tenant are left out of the namespace: everybody hits everybody's pages."""
    return lambda self, namespace: original(self, Namespace(model=namespace.model, adapter=namespace.adapter))


@bug("R079", RadixCache, "_chunks")
def pages_compared_by_a_weak_hash(original):
    """Pages are equal if a two-bit hash of each is."""
    return lambda self, tokens: [(sum(chunk) % 4,) * self.page_size for chunk in original(self, tokens)]


@bug("R093", Seq, "match_limit")
def whole_prompt_from_the_cache(original):
    """A prompt that is cached whole leaves nothing to compute, and no logits to sample from."""
    return property(lambda self: len(self.tokens))


@bug("R053", KvBooks, "match")
def resumed_without_a_new_match(original):
    """A retracted sequence resumes on the match of its first admission."""
    return lambda self, seq: self.__dict__.setdefault("_first", {}).setdefault(seq.seq, original(self, seq))


@bug("R054", KvBooks, "share")
def uncommitted_pages_are_shared(original):
    """Pages enter the tree when they are planned, before the step has written them."""

    def faulty(self, seq, now_ns):
        computed, seq.computed = seq.computed, min(seq.launched, len(seq.tokens))
        try:
            original(self, seq, now_ns)
        finally:
            seq.computed = computed

    return faulty


@bug("own", KvBooks, "let_go")
def pages_of_a_failed_step_are_cached(original):
    """A sequence whose step failed leaves its half-written pages in the cache."""

    def faulty(self, seq, now_ns, *, keep):
        if not keep:
            seq.computed = min(seq.launched, len(seq.tokens))
        return original(self, seq, now_ns, keep=True)

    return faulty


# ---------------------------------------------------------------- plans and results


@bug("R052", StepBudget, "chunk")
def chunk_beyond_the_budget(original):
    """A chunk is admitted though the budget is used up."""

    def faulty(self, wanted):
        self.left = max(self.left, wanted)
        return original(self, wanted)

    return faulty


@bug("own", StepBudget, "chunk")
def chunk_limit_ignored(original):
    """One request prefills more in a step than it may."""
    return lambda self, wanted: min(wanted, self.left)


@bug("R072", Seq, "pending")
def placeholders_beyond_the_end(original):
    """Under overlap a row is launched for a token beyond max_new_tokens."""
    return property(lambda self: self.expected - self.launched)


@bug("R096", Committer, "_current")
def result_of_an_older_epoch_is_applied(original):
    """A row launched before a retraction is applied to the sequence that was resumed."""
    return lambda self, row: self._roster.running.get(row.seq)


@bug("R096", Seq, "publish")
def tokens_are_doubled(original):
    """A token is said again with the next one."""

    def faulty(self):
        news = original(self)
        self.news_from = max(len(self.spec.prompt), self.news_from - (len(news) == 1 and len(self.tokens) % 3 == 0))
        return news

    return faulty


@bug("R045", Committer, "_apply_row")
def one_bad_row_fails_the_batch(original):
    """A row that failed takes everyone else who runs with it."""

    def faulty(self, seq, row, outcome, now_ns):
        original(self, seq, row, outcome, now_ns)
        if outcome.error is not None:
            for other in list(self._roster.running.values()):
                self._endings.end(other, FinishReason.ERROR, now_ns, message=outcome.error)

    return faulty


@bug("R088", Seq, "open_slot")
def penalties_lost_on_retraction(original):
    """A resumed sequence tells the worker that its own output is prompt."""

    def faulty(self):
        opening = original(self)
        return type(opening)(*(*_fields(opening)[:4], len(opening.tokens), *_fields(opening)[5:]))

    return faulty


@bug("R084", Seq, "open_slot")
def parameters_of_the_last_tenant(original):
    """A slot keeps the sampling parameters of whoever had it before."""
    before = {}

    def faulty(self):
        opening = original(self)
        sampling = before.setdefault(opening.slot, opening.sampling)
        before[opening.slot] = opening.sampling
        return type(opening)(*(*_fields(opening)[:5], sampling, *_fields(opening)[6:]))

    return faulty


@bug("R085", Seq, "open_slot")
def seed_by_row(original):
    """The seed goes with the row of the batch, not with the request."""

    def faulty(self):
        opening = original(self)
        return type(opening)(*(*_fields(opening)[:6], opening.slot, *_fields(opening)[7:]))

    return faulty


def _fields(struct):
    return [getattr(struct, name) for name in struct.__struct_fields__]


@bug("R089", Seq, "_prompt_logprobs_from")
def prompt_logprobs_shift_with_chunks(original):
    """Each chunk reports its first position once more."""

    def faulty(self, start, end):
        first = original(self, start, end)
        return first if first is None or first <= 1 else first - 1

    return faulty


@bug("R034", Endings, "end")
def last_logprob_is_missing(original):
    """The token that ends a request has no row of log probabilities."""

    def faulty(self, seq, reason, now_ns, **rest):
        original(self, seq, reason, now_ns, **rest | {"logprobs": ()})

    return faulty


@bug("own", Committer, "_apply_row")
def request_at_its_limit_never_ends(original):
    """The last token that a request may have is told, but not that it is the last."""

    def faulty(self, seq, row, outcome, now_ns):
        if outcome.token is not None and outcome.token not in seq.stop_ids:
            seq.commit(row.end, outcome.token, len(outcome.prompt_logprobs))
            self._endings.tell(seq, (), outcome.prompt_logprobs)
        else:
            original(self, seq, row, outcome, now_ns)

    return faulty


# ---------------------------------------------------------------- aborts, ends, the queue


@bug("R046", Endings, "end")
def token_after_an_abort(original):
    """The end is said, but the rows in flight go on and speak."""

    def faulty(self, seq, reason, now_ns, **rest):
        if reason is FinishReason.CANCELLED and seq.state is State.RUNNING:
            self._close(seq.spec.request_id, self._output(seq, (), (), Finish(reason, seq.usage, "", 499)), now_ns)
        else:
            original(self, seq, reason, now_ns, **rest)

    return faulty


@bug("R060", Scheduler, "cancel")
def queued_requests_of_gone_clients_still_run(original):
    """A cancellation reaches only those who run."""

    def faulty(self, request_id, reason, now_ns):
        seq = self._roster.find(request_id)
        return seq is not None and seq.state is State.RUNNING and original(self, request_id, reason, now_ns)

    return faulty


@bug("R049", Scheduler, "cancel")
def abort_by_prefix(original):
    """An id cancels everyone whose id begins with it; the empty one cancels all."""

    def faulty(self, request_id, reason, now_ns):
        for seq in self._roster.everyone():
            if seq.spec.request_id.startswith(request_id):
                original(self, seq.spec.request_id, reason, now_ns)
        return True

    return faulty


@bug("R071", Scheduler, "cancel")
def unknown_id_is_an_exception(original):
    """A late word about a request that has gone kills the core."""

    def faulty(self, request_id, reason, now_ns):
        if self._roster.find(request_id) is None:
            raise KeyError(request_id)
        return original(self, request_id, reason, now_ns)

    return faulty


@bug("R048", Roster, "finish")
def id_stays_after_a_queued_abort(original):
    """The id of a request that ended in the queue is never forgotten."""

    def faulty(self, seq):
        was_waiting = seq.state is State.WAITING
        original(self, seq)
        if was_waiting:
            self._by_request[seq.spec.request_id] = seq

    return faulty


@bug("R050", Scheduler, "_refusal")
def two_live_requests_with_one_id(original):
    """A live id is taken a second time."""

    def faulty(self, spec):
        found = original(self, spec)
        return None if found is not None and found[1] == 409 else found

    return faulty


@bug("R038", Scheduler, "_refusal")
def request_larger_than_memory_is_queued(original):
    """What can never fit is taken in, and blocks or fails later."""

    def faulty(self, spec):
        found = original(self, spec)
        return None if found is not None and "KV pages" in found[0] else found

    return faulty


@bug("R092", Endings, "refuse")
def refusal_comes_as_success(original):
    """What cannot be served comes back as a success with no tokens."""

    def faulty(self, request_id, prompt_tokens, refusal, now_ns):
        finish = Finish(FinishReason.LENGTH, Usage(prompt_tokens), "", 200)
        self._close(request_id, Output(request_id, finish=finish), now_ns)

    return faulty


@bug("R070", branchline.sched.compose, "choose_victim")
def parked_requests_hold_what_the_head_needs(original):
    """Nobody is retracted when memory runs short: everyone waits for everyone."""
    return lambda *arguments, **words: None


@bug("R098", Admission, "is_open")
def admission_never_recovers(original):
    """After a retraction nobody is admitted again, whoever finishes."""
    return property(lambda self: not self._recovering)


@bug("own", Scheduler, "_expire")
def deadlines_are_not_looked_at(original):
    """A request that is past its deadline goes on."""
    return lambda self, now_ns: None


@bug("own", Scheduler, "_refusal")
def queue_without_a_bound(original):
    """A full queue takes more."""

    def faulty(self, spec):
        found = original(self, spec)
        return None if found is not None and found[1] == 429 else found

    return faulty


# ---------------------------------------------------------------- text


@bug("R101", StopMatcher, "feed", test="tests.text.test_stops:test_agrees_with_a_search_of_the_whole_text_however_it_is_cut")
def stop_found_only_at_the_end_of_a_piece(original):
    """A stop string inside a token is missed."""

    def faulty(self, text):
        if len(text) < 2:
            return original(self, text)
        known = self._held + text[:-1]
        self._held = ""
        for char in text[:-1]:
            self._node = _step(self._node, char)
            self._position += 1
        self._held = known
        return original(self, text[-1])

    return faulty


@bug("R100", StopMatcher, "feed", test="tests.text.test_stream:test_a_stop_spread_over_tokens_leaks_nothing")
def beginning_of_a_stop_leaks(original):
    """Nothing is held back: the beginning of a stop string has been shown when its end comes."""

    def faulty(self, text):
        shown, match = original(self, text)
        held, self._held = self._held, ""
        return (shown + held, None) if match is None else (shown, match)

    return faulty


@bug("R103", StopMatcher, "feed", test="tests.text.test_stops:test_holds_back_no_more_than_the_beginning_of_a_stop")
def held_back_by_length(original):
    """Text is held back by the length of the stop, whether it could become one or not."""

    def faulty(self, text):
        shown, match = original(self, text)
        if match is not None:
            return shown, match
        known = shown + self._held
        keep = max(len(self._held), 2)
        self._held = known[-keep:]
        return known[:-keep], None

    return faulty


@bug("R105", Detokenizer, "feed", test="tests.text.test_detokenize:test_an_emoji_byte_by_byte")
def characters_split_over_tokens(original):
    """Each token is decoded by itself: half a character becomes U+FFFD."""
    return lambda self, token: self._tokenizer.token_bytes(token).decode("utf-8", "replace")


@bug("R048", TextSide, "_hear_outputs", test="tests.text.test_side:test_a_live_id_cannot_be_used_again")
def front_end_map_leaks(original):
    """The text side remembers a request for ever: its id cannot be used again."""

    def faulty(self, message):
        before = dict(self._streams)
        effects = original(self, message)
        self._streams = before
        return effects

    return faulty


@bug("R109", TextSide, "abandon", test="tests.text.test_side:test_without_an_engine_everyone_is_told")
def streams_go_silent_with_the_engine(original):
    """The engine dies and nobody tells those who wait."""
    return lambda self, message: branchline.text.side.Effects()


@bug("R102", TextStream, "end", test="tests.text.test_side:test_cancel_ends_it_once_with_what_was_held_back")
def held_text_lost_at_the_end(original):
    """What had been held back is dropped when a stream ends."""

    def faulty(self, reason, *, message="", status=200):
        self._matcher._held = ""
        return original(self, reason, message=message, status=status)

    return faulty


# ---------------------------------------------------------------- fields of a request


LIMITS = "tests.core.test_limits:test_values_beyond_name_their_field"


@bug("R029", branchline.core.limits, "_check_float", test=LIMITS, arguments=("temperature", [float("nan")]))
def nan_passes(original):
    """A one-sided comparison lets NaN through."""

    def faulty(name, value, low, high):
        if value < low or value > high:
            raise InvalidRequest("out of range", param=name)

    return faulty


@bug("R026", branchline.core.limits, "_check_token", test=LIMITS, arguments=("stop_token_ids", [(100,)]))
def stop_ids_unchecked(original):
    """Ids beyond the vocabulary reach the sampler as stop tokens."""
    return lambda name, token, vocab_size: None


@bug("R025", branchline.core.limits, "_check_token", test=LIMITS, arguments=("logit_bias", [((100, 0.0),)]))
def bias_ids_unchecked(original):
    """Ids beyond the vocabulary reach the sampler with a bias."""
    return lambda name, token, vocab_size: None


@bug("R027", PromptReader, "_checked", test="tests.text.test_side:test_prompt_tokens_must_exist", arguments=(10**9,))
def prompt_ids_unchecked(original):
    """Ids beyond the vocabulary reach the model as a prompt."""
    return lambda self, tokens, param: list(tokens)


@bug("R001", PromptReader, "for_generation", test="tests.text.test_side:test_empty_text_begins_with_bos_if_there_is_one")
def empty_prompt_passes(original):
    """An empty prompt reaches the engine."""
    return lambda self, prompt, *, add_special, param: self.tokens(prompt, add_special=add_special, param=param)


@bug("R035", PromptReader, "context", test="tests.text.test_side:test_a_prompt_must_leave_room_for_a_token",
     arguments=(61, False))  # fmt: skip
def prompt_of_the_whole_context(original):
    """A prompt as long as the context leaves no room for a token."""
    return property(lambda self: original.fget(self) + 1)


# ---------------------------------------------------------------- sampler


@bug("R087", branchline.ops.sample, "LOGIT_STEPS",
     test="tests.worker.test_sample:test_penalties_reach_back_to_the_beginning")  # fmt: skip
def penalty_over_the_last_tokens_only(original):
    """A repetition penalty looks back 20 tokens only."""

    def faulty(logits, columns, row):
        penalty = np.float32(columns.repetition_penalty[row])
        seen = np.unique(columns.known[row][-20:])
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)

    return _replaced(original, branchline.ops.sample.penalise_repetition, faulty)


@bug("own", branchline.ops.sample, "LOGIT_STEPS", test="tests.worker.test_sample:test_masked_tokens_are_never_drawn")
def stop_tokens_not_masked(original):
    """An end token may come before min_tokens."""
    return _replaced(original, branchline.ops.sample.forbid, lambda logits, columns, row: None)


def _replaced(steps, step, faulty):
    return tuple((wanted, faulty if known is step else known) for wanted, known in steps)


@bug("R030", branchline.ops.sample, "GREEDY_BELOW",
     test="tests.worker.test_sample:test_small_temperatures_are_greedy", arguments=(0.0,))  # fmt: skip
def tiny_temperature_divides(original):
    """A temperature of nothing is divided by."""
    return -1.0


# ---------------------------------------------------------------- HTTP


@bug("R148", HostRule, "check", test="tests.api.test_api_access:test_foreign_names_on_loopback", arguments=("evil.example",))
def any_host_is_served(original):
    """A web page that rebinds its name reaches the local server."""
    return lambda self, headers: None


@bug("R082", Keyring, "_identify", test="tests.api.test_api_access:test_keys_make_tenants")
def all_keys_are_one_tenant(original):
    """Callers with different keys share a prefix cache."""

    def faulty(self, key):
        caller = original(self, key)
        return type(caller)(tenant="everybody", is_admin=caller.is_admin)

    return faulty


@bug("R068", branchline.api.fanout.Fanout, "close",
     test="tests.api.test_api_lifecycle:test_a_client_that_leaves_cancels_every_choice",
     arguments=("/v1/completions", False, 3))  # fmt: skip
def only_the_first_choice_is_cancelled(original):
    """The client leaves, and the other choices of its call run on."""

    def faulty(self):
        for pump in self._pumps:
            pump.cancel()
        for generation in self._generations[:1]:
            generation.close()

    return faulty


@bug("R019", branchline.api.body, "MAX_DEPTH", test="tests.api.test_api_body:test_refused",
     arguments=(b'{"a":' + b"[" * 128 + b"]" * 128 + b"}",))  # fmt: skip
def depth_without_a_limit(original):
    """A deeply nested body is taken apart."""
    return 1 << 30
