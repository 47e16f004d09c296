"""Every setting of the engine, in one frozen table. Read the environment here or nowhere.

Knows: names, defaults, ranges. Refuses to know: which machine this is (``engine.build`` derives what is ``None``).
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence

from branchline.base.errors import ConfigError

POLICY_NAMES = ("hrrn", "fcfs", "lpm", "dfs-weight", "lof", "random", "priority", "fair")
CACHE_ONLY_POLICIES = ("lpm", "dfs-weight")
"""Policies that order by nothing but cached prefixes."""
EXECUTOR_NAMES = ("auto", "native", "reference")
KV_DTYPES = ("auto", "f32", "bf16", "int8")
QUANTIZE_NAMES = ("int8", "int4")
EVICTION_NAMES = ("lru", "lfu", "slru", "fifo", "priority")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. ``None`` means: derived from the model and the machine when the engine is built."""

    model: str | None = None
    """GGUF file, Hugging Face folder, ``hf:org/name``; ``None`` is the embedded default model."""
    threads: int | None = None
    """Threads of the executor; ``None``: the CPUs this process may use."""
    executor: str = "auto"
    """What computes: one of EXECUTOR_NAMES; ``auto``: the native kernels where they are installed."""
    isa: str = "auto"
    """Instruction set of the native kernels (``branchline doctor`` lists them); ``auto``: the best one."""
    kv_dtype: str = "auto"
    """Numbers of the KV pages: one of KV_DTYPES; ``auto``: bf16 with native kernels, f32 with the reference executor."""
    quantize: str | None = None
    """Round F32, F16 and BF16 matrices to groups of 32 when they are loaded: one of QUANTIZE_NAMES; ``None``: keep every
    bit. Weights that are quantized already, and rows that are not whole groups, stay what they are."""
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
    max_queued_tokens: int | None = None
    """Prompt tokens of waiting requests beyond which a new one is refused, unless nobody waits; ``None``: no limit."""
    max_step_tokens: int = 512
    """Token budget of a step, shared by decode rows and prefill chunks."""
    max_chunk_tokens: int | None = None
    """Most tokens one request may prefill in a step; ``None``: whatever the budget leaves."""
    policy: str = "hrrn"
    """Order of the queue: one of POLICY_NAMES."""
    overtake_tokens: int = 4096
    """``hrrn``: work for later arrivals, in tokens, after which nobody may overtake a waiting request any more."""
    preemption_gap: int = 10
    """``priority``: running work gives way to a waiting request whose priority is higher by more than this."""
    tenant_weights: tuple[tuple[str, float], ...] = ()
    """``fair``: shares of tenants by name; everyone else has 1."""
    policy_seed: int = 0
    """``random``: the seed."""
    prefix_cache: bool = True
    eviction: str = "lru"
    """Which cached prefix goes first when pages are needed: one of EVICTION_NAMES."""
    pin_share: float = 0.25
    """Share of the pages that pinned prefixes may hold."""
    overlap: bool = True
    """Plan step N+1 while step N runs (loop depth 1 instead of 0)."""
    waiting_timeout_s: float | None = None
    running_timeout_s: float | None = None
    step_timeout_s: float = 120.0
    """A step that runs longer makes ``/ready`` answer 503."""
    journal: str | None = None
    """Directory for a record of all that the engine hears and plans, so that it can be replayed; ``None``: none is kept."""
    journal_text: bool = False
    """Keep token ids in the journal, and so the text. By default it tells only which prompts begin alike."""
    journal_max_bytes: int | None = None
    """Beyond this the oldest parts of the journal are deleted. A run without its beginning cannot be proved any more."""

    def __post_init__(self) -> None:
        for name in ("page_size", "max_running", "max_queued", "max_step_tokens", "overtake_tokens"):
            _require_positive(name, getattr(self, name))
        for name in (
            "threads", "context_length", "pages", "max_chunk_tokens", "max_queued_tokens", "waiting_timeout_s",
            "running_timeout_s", "journal_max_bytes",
        ):  # fmt: skip
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        _require_name("policy", self.policy, POLICY_NAMES)
        _require_name("executor", self.executor, EXECUTOR_NAMES)
        _require_name("kv_dtype", self.kv_dtype, KV_DTYPES)
        if self.quantize is not None:
            _require_name("quantization", self.quantize, QUANTIZE_NAMES)
        _require_name("eviction order", self.eviction, EVICTION_NAMES)
        if self.max_step_tokens < self.max_running:
            raise ConfigError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_running ({self.max_running}): "
                "every running sequence may need one token of the budget"
            )
        if self.policy in CACHE_ONLY_POLICIES and not self.prefix_cache:
            raise ConfigError(
                f"policy {self.policy} orders by cached prefixes, but prefix_cache is off: no request would ever have one"
            )
        if self.preemption_gap < 0:
            raise ConfigError(f"preemption_gap must not be negative, not {self.preemption_gap}: equals would take turns")
        if not 0 <= self.pin_share < 1:
            raise ConfigError(f"pin_share must be at least 0 and below 1, not {self.pin_share!r}")
        for tenant, weight in self.tenant_weights:
            _require_positive(f"the weight of tenant {tenant!r}", weight)

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


def _require_name(kind: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise ConfigError(f"there is no {kind} {name!r}; choose one of {', '.join(names)}")
