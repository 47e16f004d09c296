"""Why a request ended: a closed set. Every request ends exactly once, with one of these."""

import enum


class FinishReason(enum.Enum):
    STOP = "stop"
    """An end-of-sequence token, a stop token, or a stop string found by the text side."""
    LENGTH = "length"
    """``max_tokens`` or the context is used up."""
    CANCELLED = "cancelled"
    """The client left or asked for it."""
    WAITING_TIMEOUT = "waiting_timeout"
    RUNNING_TIMEOUT = "running_timeout"
    REJECTED = "rejected"
    """Refused at submit: it can never fit, the queue is full, the engine drains."""
    ERROR = "error"
    """The step that computed it failed, or its numbers were not finite."""
    SHUTDOWN = "shutdown"

    @property
    def is_success(self) -> bool:
        return self in (FinishReason.STOP, FinishReason.LENGTH)
