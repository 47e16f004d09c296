"""A text process without a model: the real process and sockets around a service whose tokens are code points."""

import os
import sys
from functools import partial

from branchline.core.request import RequestSpec
from branchline.engine.text_process import serve
from branchline.wire.child import TextSettings, run
from branchline.wire.messages import (
    Ask,
    Cancel,
    CancelText,
    Control,
    Controlled,
    Delta,
    Detokenize,
    Detokenized,
    Ended,
    Generate,
    Heartbeat,
    Outputs,
    Started,
    Submit,
    Tokenize,
    Tokenized,
    Told,
)

PATH = os.path.abspath(__file__)


class CodePoints:
    def __init__(self, send_to_client, send_to_engine):
        self._client = send_to_client
        self._engine = send_to_engine

    async def handle(self, message):
        match message:
            case Generate():
                tokens = tuple(map(ord, message.prompt.text))
                self._client(Started(message.request_id, len(tokens)))
                spec = RequestSpec(
                    request_id=message.request_id, prompt=tokens, sampling=message.sampling, max_new_tokens=1, seed=0
                )
                self._engine(Submit(spec))
            case CancelText():
                self._engine(Cancel(message.request_id))
            case Control() | Ask():
                self._engine(message)
            case Tokenize():
                text = message.prompt.text
                self._client(Tokenized(message.call_id, tuple(map(ord, text)), tuple(text)))
            case Detokenize():
                self._client(Detokenized(message.call_id, "".join(map(chr, message.tokens))))

    def hear(self, message):
        match message:
            case Outputs():
                for output in message.outputs:
                    if output.finish is None:
                        self._client(Delta(output.request_id, "".join(map(chr, output.tokens)), len(output.tokens)))
                    else:
                        self._client(Ended(output.request_id, output.finish.reason, output.finish.usage))
            case Controlled() | Told() | Heartbeat():
                self._client(message)

    def close(self):
        pass


def build(settings, facts):
    return CodePoints


if __name__ == "__main__":
    sys.exit(run("text", TextSettings, partial(serve, build)))
