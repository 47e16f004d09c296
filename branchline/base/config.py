"""Every setting of the engine, in one frozen table. Read the environment here or nowhere.

Knows: names, defaults, ranges. Refuses to know: which machine this is (``engine.build`` derives what is ``None``).
"""

import dataclasses
import os
from collections.abc import Mapping

from branchline.base.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. ``None`` means: derived from the model and the machine when the engine is built."""

    model: str | None = None
    """GGUF file, Hugging Face folder, ``hf:org/name``; ``None`` is the embedded default model."""
    threads: int | None = None
    """Threads of the executor; ``None``: the CPUs this process may use."""
    context_length: int | None = None
    """Longest sequence in tokens; ``None``: what the model was trained for."""
    page_size: int = 16
    """Tokens per KV page."""
    pages: int | None = None
    """KV pages; ``None``: a quarter of the available memory, at most four full contexts per running row."""
    max_running: int = 64
    """Rows of one step, that is: sequences computed at the same time."""
    max_queued: int = 256
    """Waiting requests beyond which a new one is refused (requeued work is exempt)."""
    max_step_tokens: int = 512
    """Token budget of a step, shared by decode rows and prefill chunks."""
    max_chunk_tokens: int | None = None
    """Most tokens one request may prefill in a step; ``None``: whatever the budget leaves."""
    policy: str = "fcfs"
    """Order of the queue: a key of ``sched.policy.POLICIES``."""
    prefix_cache: bool = True
    overlap: bool = True
    """Plan step N+1 while step N runs (loop depth 1 instead of 0)."""
    waiting_timeout_s: float | None = None
    running_timeout_s: float | None = None
    step_timeout_s: float = 120.0
    """A step that runs longer makes ``/ready`` answer 503."""

    def __post_init__(self) -> None:
        for name in ("page_size", "max_running", "max_queued", "max_step_tokens"):
            _require_positive(name, getattr(self, name))
        for name in ("threads", "context_length", "pages", "max_chunk_tokens", "waiting_timeout_s", "running_timeout_s"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        if self.max_step_tokens < self.max_running:
            raise ConfigError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_running ({self.max_running}): "
                "every running sequence may need one token of the budget"
            )

    @property
    def depth(self) -> int:
        """Plans that may be in flight when the next one is made."""
        return 1 if self.overlap else 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP side."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    """Name in ``/v1/models``; ``None``: the name of the model file or folder."""
    text_workers: int = 0
    """0: tokenizer and detokenizer run inside the HTTP process; 1: in a process of their own."""
    chat_template: str | None = None
    """File with a Jinja chat template that replaces the model's."""
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    allow_unauthenticated: bool = False
    """Serve a non-loopback address without a key."""
    max_body_bytes: int = 4 << 20
    drain_timeout_s: float = 30.0
    """How long running requests may go on after SIGTERM."""
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, not {self.port}")
        if self.text_workers not in (0, 1):
            raise ConfigError(f"text_workers must be 0 or 1, not {self.text_workers}")

    @property
    def is_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


@dataclasses.dataclass(frozen=True, slots=True)
class Environment:
    """What the process environment may say. Built once by the command line, passed on from there."""

    api_keys: tuple[str, ...]
    admin_keys: tuple[str, ...]
    cache_dir: str

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> "Environment":
        home = variables.get("HOME") or os.path.expanduser("~")
        cache = variables.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
        return cls(
            api_keys=_split(variables.get("BRANCHLINE_API_KEYS", "")),
            admin_keys=_split(variables.get("BRANCHLINE_ADMIN_KEYS", "")),
            cache_dir=variables.get("BRANCHLINE_CACHE") or os.path.join(cache, "branchline"),
        )


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _require_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not value > 0 or value == float("inf"):
        raise ConfigError(f"{name} must be a positive number, not {value!r}")
