"""Text side, loop, scheduler and a stamped worker in one thread: what a client reads does not depend on the schedule (I16).

Tokens are single bytes, so that characters are spread over several, and stop strings over more.
"""

import random

import pytest

from branchline.base.finish import FinishReason
from branchline.core.request import Namespace
from branchline.wire.messages import CancelText, Ended, Outputs, TokenPrompt
from tests.support.harness import Harness
from tests.support.stamped import reference_output
from tests.support.texts import FACTS, generate, make_side
from tests.text.test_stops import naive

LETTERS = "aé🙂b"
STOPS = ((), ("ab",), ("é",), ("🙂b", "b"), ("aa", "aab", "ba"))


class Conversation:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.side, self.tokenizer = make_side()
        self.alphabet = [*dict.fromkeys(self.tokenizer.encode(LETTERS, add_special=False))]
        self.harness = Harness(
            pages=rng.choice([16, 24, 64]), page_size=rng.choice([4, 16]), max_running=rng.choice([1, 4]),
            max_step_tokens=16, max_chunk_tokens=rng.choice([None, 2]), overlap=rng.random() < 0.8,
            vocabulary=len(self.alphabet), check_every=8,
        )  # fmt: skip
        self.harness.worker.alphabet = self.alphabet
        self.heard = 0
        self.news = {}
        self.requests = {}
        self.cancelled = set()

    def ask(self, name: str) -> None:
        rng = self.rng
        prompt = tuple(rng.choice(self.alphabet) for _ in range(rng.randint(1, 12)))
        sampling = {
            "max_tokens": rng.randint(1, 30), "seed": rng.randrange(5), "stop": rng.choice(STOPS),
            "stop_token_ids": rng.choice([(), (), (self.alphabet[-1],)]),
        }  # fmt: skip
        request = generate(name, prompt=TokenPrompt(prompt), sampling=sampling, include_stop=rng.random() < 0.3)
        self.requests[name] = request
        self.tell(self.side.handle(request))

    def cancel(self, name: str) -> None:
        self.cancelled.add(name)
        self.tell(self.side.handle(CancelText(name)))

    def tell(self, effects) -> None:
        for message in effects.to_client:
            self.news.setdefault(message.request_id, []).append(message)
        if effects.to_engine:
            self.harness.inbox.put(*effects.to_engine)

    def turn(self) -> bool:
        busy = self.harness.turn()
        outputs, self.heard = self.harness.outbox.outputs[self.heard :], len(self.harness.outbox.outputs)
        self.tell(self.side.hear(Outputs(tuple(outputs))))
        return busy

    def judge(self, name: str) -> None:
        started, *deltas, ended = self.news[name]
        assert isinstance(ended, Ended)
        assert not any(isinstance(delta, Ended) for delta in deltas)
        sampling = self.requests[name].sampling
        text = "".join(delta.text for delta in (*deltas, ended))
        count = sum(delta.token_count for delta in (*deltas, ended))
        assert count == ended.usage.completion_tokens
        assert ended.usage.prompt_tokens == started.prompt_tokens
        assert ended.usage.cached_tokens < started.prompt_tokens
        expected, reason, tokens = self.expected(name, sampling)
        if ended.reason is FinishReason.CANCELLED:
            assert name in self.cancelled
            assert self.tokenizer.decode(tokens, skip_special=True).startswith(text.removesuffix("\ufffd"))
            return
        assert (text, ended.reason) == (expected, reason)
        assert count == len(tokens) or isinstance(ended.stop, str)

    def expected(self, name: str, sampling):
        request = self.requests[name]
        namespace = Namespace(model=FACTS.digest)
        tokens = reference_output(
            request.prompt.tokens, sampling.seed, len(self.alphabet), sampling.max_tokens, sampling.stop_token_ids,
            namespace, self.alphabet,
        )  # fmt: skip
        is_stopped = tokens[-1] in sampling.stop_token_ids
        shown = tokens[:-1] if is_stopped and not request.include_stop else tokens
        text = self.tokenizer.decode(shown, skip_special=True)
        match = naive(text, sampling.stop)
        if match is None:
            return text, FinishReason.STOP if is_stopped else FinishReason.LENGTH, tokens
        start, stop = match
        return text[: start + len(stop) if request.include_stop else start], FinishReason.STOP, tokens


@pytest.mark.parametrize("seed", range(40))
def test_streams_are_exact_whatever_the_schedule(seed):
    talk = Conversation(seed)
    rng = talk.rng
    for turn in range(40):
        if turn < 12:
            talk.ask(f"r{turn}")
        if rng.random() < 0.05:
            talk.cancel(rng.choice(sorted(talk.requests)))
        if rng.random() < 0.1:
            talk.harness.scheduler.retract_youngest(turn)
        talk.turn()
    while talk.turn():
        pass
    for name in talk.requests:
        talk.judge(name)
    assert talk.side.live_count == 0
    assert talk.harness.scheduler.is_empty
