"""A text side with an engine behind it that knows one sentence: enough for everything HTTP.

It answers over the real :class:`TextClient`. ``hold`` keeps requests running until they are cancelled; ``say`` and
``end`` speak for one by hand; ``script`` replaces what a request hears.
"""

import asyncio

from branchline.base.clock import MonotonicClock
from branchline.base.finish import FinishReason
from branchline.core.result import Usage
from branchline.core.stats import EngineStats
from branchline.wire.client import TextClient
from branchline.wire.messages import (
    Ask,
    CancelText,
    ChatPrompt,
    Control,
    Controlled,
    Delta,
    Detokenize,
    Detokenized,
    Ended,
    Generate,
    Heartbeat,
    ModelFacts,
    Pin,
    Started,
    TextLogprob,
    TextPrompt,
    Tokenize,
    Tokenized,
    TokenPrompt,
    Told,
)

WORDS = ("Hello", " wörld", " and", " you", "!")
FACTS = ModelFacts(
    name="org/tiny-model",
    digest="d",
    vocab_size=1000,
    context_length=512,
    max_prompt_tokens=500,
    executor="fake",
)


class ScriptedText:
    def __init__(self, clock=None):
        self.clock = clock or MonotonicClock()
        self.client = TextClient(self._hear, self.clock)
        self.received = []
        self.live = {}
        self.cancelled = []
        self.hold = False
        self.pause_s = 0.0
        self.script = None
        self.control_done = True
        self.asked = []
        self.told = {}
        """JSON by question and request id."""

    # ------------------------------------------------------------ by hand

    def say(self, request_id, text, **fields):
        self.client.deliver([Delta(request_id=request_id, text=text, token_count=1, **fields)])

    def end(self, request_id, reason=FinishReason.STOP, **fields):
        self.live.pop(request_id, None)
        usage = fields.pop("usage", Usage(3, 2, 1))
        self.client.deliver([Ended(request_id=request_id, reason=reason, usage=usage, **fields)])

    def beat(self, **stats):
        self.client.deliver([Heartbeat(stats=EngineStats(**stats), clock_ns=self.clock.now_ns(), live_texts=len(self.live))])

    async def until(self, truth, timeout_s=5.0):
        async with asyncio.timeout(timeout_s):
            while not truth():
                await asyncio.sleep(0.001)

    @property
    def requests(self):
        return [message for message in self.received if isinstance(message, Generate)]

    @property
    def is_idle(self):
        return not self.live and self.client.live_count == 0

    # ------------------------------------------------------------ by itself

    def _hear(self, message):
        self.received.append(message)
        loop = asyncio.get_running_loop()
        match message:
            case Generate():
                self.live[message.request_id] = loop.create_task(self._run(message))
            case CancelText():
                self._cancel(message.request_id)
            case Tokenize():
                tokens = prompt_tokens(message.prompt)
                pieces = tuple(f"t{token}" for token in tokens)
                loop.call_soon(self.client.deliver, [Tokenized(message.call_id, tokens, pieces)])
            case Detokenize():
                text = " ".join(str(token) for token in message.tokens)
                loop.call_soon(self.client.deliver, [Detokenized(message.call_id, text)])
            case Ask():
                self.asked.append(message)
                body = self.told.get((message.what, message.request_id))
                loop.call_soon(self.client.deliver, [Told(message.call_id, body)])
            case Pin():
                answer = Controlled(call_id=message.call_id, done=self.control_done, message="as you wish")
                loop.call_soon(self.client.deliver, [answer])
            case Control():
                if message.verb == "abort_all":
                    for request_id in list(self.live):
                        self._cancel(request_id)
                words = "" if self.control_done else "busy"
                answer = Controlled(call_id=message.call_id, done=self.control_done, message=words)
                loop.call_soon(self.client.deliver, [answer])

    def _cancel(self, request_id):
        self.cancelled.append(request_id)
        task = self.live.pop(request_id, None)
        if task is not None:
            task.cancel()
            asyncio.get_running_loop().call_soon(self.end, request_id, FinishReason.CANCELLED)

    async def _run(self, request):
        await asyncio.sleep(0)
        events = (self.script or sentence)(request)
        for event in events:
            if isinstance(event, Ended):
                if self.hold:
                    await asyncio.Event().wait()
                self.live.pop(request.request_id, None)
            self.client.deliver([event])
            await asyncio.sleep(self.pause_s)


def prompt_tokens(prompt):
    match prompt:
        case TokenPrompt():
            return prompt.tokens
        case TextPrompt():
            return tuple(range(10, 10 + len(prompt.text.split())))
        case ChatPrompt():
            return tuple(range(20, 20 + len(prompt.messages)))


def prompt_text(prompt):
    match prompt:
        case TextPrompt():
            return prompt.text
        case TokenPrompt():
            return "".join(f"<{token}>" for token in prompt.tokens)
        case ChatPrompt():
            return ""


def row(token, text, wanted, logprob=-0.5):
    words = [text, *(f"alt{i}" for i in range(1, wanted))][:wanted]
    top = tuple((token + i, word, word.encode(), -0.5 - i) for i, word in enumerate(words))
    return TextLogprob(token, text, text.encode(), logprob, top if logprob is not None else ())


def sentence(request):
    """``Hello wörld and you!`` as far as ``max_tokens`` goes; the last word is held back until the end."""
    rid, sampling = request.request_id, request.sampling
    tokens = prompt_tokens(request.prompt)
    limit = len(WORDS) if sampling.max_tokens is None else min(sampling.max_tokens, len(WORDS))
    reason = FinishReason.STOP if limit == len(WORDS) else FinishReason.LENGTH
    yield Started(rid, len(tokens), prompt_text(request.prompt) if request.echo else "")
    if sampling.prompt_logprobs is not None:
        rows = [row(t, f"<{t}>", sampling.prompt_logprobs, None if i == 0 else -1.0) for i, t in enumerate(tokens)]
        yield Delta(rid, "", 0, (), tuple(rows))
    wanted = sampling.logprobs

    def rows_of(index):
        return () if wanted is None else (row(100 + index, WORDS[index], wanted),)

    for index in range(limit - 1):
        yield Delta(rid, WORDS[index], 1, rows_of(index))
    last = limit - 1
    usage = Usage(len(tokens), limit, max(0, len(tokens) - 1))
    yield Ended(request_id=rid, reason=reason, usage=usage, text=WORDS[last], token_count=1, logprobs=rows_of(last))
