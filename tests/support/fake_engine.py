"""An engine process without a model: the real process, sockets and heartbeat around an engine that echoes.

The name of the model in the configuration chooses how it behaves: ``echo``, ``bad-config``, ``bad-model``, ``crash``
(while it is built), ``slow`` (to build), ``deaf`` (does not stop), ``seized`` (ready, then no Python code ever runs
again). A submitted prompt comes back token by token, each token one step. The control verb ``crash`` makes the loop
raise, ``bad-stats`` breaks the heartbeat.
"""

import os
import re
import sys
import threading
import time
from functools import partial

from branchline.base.errors import ConfigError, ModelError
from branchline.base.finish import FinishReason
from branchline.core.result import Finish, Output, Usage
from branchline.core.stats import EngineStats
from branchline.engine.process import serve
from branchline.wire.child import EngineSettings, run
from branchline.wire.messages import Cancel, Control, Controlled, ModelFacts, Submit

PATH = os.path.abspath(__file__)
FACTS = ModelFacts(name="fake", digest="0", vocab_size=100, context_length=64, max_prompt_tokens=63, executor="none")


class EchoEngine:
    facts = FACTS

    def __init__(self, inbox, outbox):
        self._inbox = inbox
        self._outbox = outbox
        self._stopping = threading.Event()
        self._turns = 0
        self._stats_break = False

    def run(self):
        while not self._stopping.is_set():
            self._turns += 1
            for message in self._inbox.drain():
                self._obey(message)
            self._inbox.wait(None)  # only a message or a wake ends this

    def stop(self):
        self._stopping.set()

    def stats(self):
        if self._stats_break:
            raise RuntimeError("stats broke")
        return EngineStats(turns=self._turns)

    def close(self):
        print("closed", file=sys.stderr)

    def _obey(self, message):
        match message:
            case Submit():
                self._echo(message.spec)
            case Cancel():
                finish = Finish(FinishReason.CANCELLED, Usage())
                self._outbox.publish([Output(message.request_id, finish=finish)])
            case Control(verb="crash"):
                raise RuntimeError("told to crash")
            case Control():
                self._stats_break = message.verb == "bad-stats"
                self._outbox.reply(Controlled(call_id=message.call_id, done=True, message=message.verb))

    def _echo(self, spec):
        for token in spec.prompt:
            self._outbox.publish([Output(spec.request_id, tokens=(token,))])
        count = len(spec.prompt)
        self._outbox.publish([Output(spec.request_id, finish=Finish(FinishReason.LENGTH, Usage(count, count)))])


def build(config, *, cache_dir, inbox, outbox, clock):
    match config.model:
        case "bad-config":
            raise ConfigError("these settings contradict each other")
        case "bad-model":
            raise ModelError("this model cannot be read")
        case "crash":
            raise RuntimeError("nobody expected this")
        case "slow":
            time.sleep(60)
    engine = EchoEngine(inbox, outbox)
    if config.model == "deaf":
        engine.stop = lambda: None
    if config.model == "seized":
        engine.run = lambda: re.match(r"(a+)+$", "a" * 200 + "b")  # takes for ever and never lets go of the GIL
    return engine


if __name__ == "__main__":
    sys.exit(run("engine", EngineSettings, partial(serve, build)))
