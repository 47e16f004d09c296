"""The tree of errors. One drawn tree, so that a reader sees at once who is to blame and who has to act.

    BranchlineError
    ├── RequestError            the client can mend it: an HTTP status and OpenAI's type, code and param travel along
    │   ├── InvalidRequest          400
    │   ├── ContextLengthExceeded   400, code ``context_length_exceeded``
    │   ├── UnknownModel            404, code ``model_not_found``
    │   └── Overloaded              429, the queue is full or the engine is draining
    ├── ModelError              the operator can mend it: a file that cannot be served, in one sentence
    ├── ConfigError             the operator can mend it: settings that contradict each other
    ├── EngineDead              the engine process has gone; nobody waits for it any longer
    ├── StepFailed              the worker raised: the rows of that step end, the engine goes on
    └── InvariantBroken         our own bug: accounting no longer adds up

Refuses to know: HTTP (``api.errors`` renders), logging, exit codes (``cli`` chooses).
"""


class BranchlineError(Exception):
    """Base of everything raised on purpose."""


class RequestError(BranchlineError):
    """A request that cannot be served, with words that are safe to show to its sender."""

    status = 400
    kind = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(RequestError):
    """A field is missing, of the wrong type or out of range."""


class ContextLengthExceeded(RequestError):
    """The prompt leaves no room for even one token."""

    code = "context_length_exceeded"

    def __init__(self, *, context: int, prompt: int, param: str = "prompt") -> None:
        super().__init__(
            f"This model's maximum context length is {context} tokens. However, your prompt resulted in {prompt} tokens. "
            "Please reduce the length of the prompt.",
            param=param,
        )


class UnknownModel(RequestError):
    status = 404
    code = "model_not_found"


class Overloaded(RequestError):
    status = 429
    kind = "rate_limit_error"
    code = "overloaded"


class ModelError(BranchlineError):
    """A model that cannot be found, read or run. The message is one sentence for the operator."""


class ConfigError(BranchlineError):
    """Settings that are out of range or contradict each other."""


class EngineDead(BranchlineError):
    """The engine process is gone or no longer answers."""


class StepFailed(BranchlineError):
    """A worker could not execute a plan."""


class InvariantBroken(BranchlineError):
    """A structure's ``check`` found that its accounting is wrong."""


def require(truth: bool, message: str) -> None:
    """Raise :class:`InvariantBroken` unless ``truth``. Unlike ``assert`` it survives ``python -O``."""
    if not truth:
        raise InvariantBroken(message)
