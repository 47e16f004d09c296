"""Which steps to time, and what work they are at least.

Knows: counts of tokens, pages, numbers and operations. Refuses to know: executors, clocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from branchline.base.errors import ConfigError

DECODE_CONTEXT = 128
"""Own positions of a decode row that has no prefix."""
DECODE_TAIL = 16
"""Own positions of a decode row behind a shared prefix."""
WARM_UPS = 1
"""Times that each case is run before it is timed."""


@dataclass(frozen=True, slots=True)
class Case:
    kind: Literal["decode", "prefill"]
    rows: int
    tokens: int
    """New tokens of each row in one run: 1, or a whole prompt."""
    context: int
    """Own positions of each row, computed before."""
    prefix: int
    """Positions before those, in whole pages that all rows share."""

    @property
    def base(self) -> int:
        """Position of the first new token."""
        return self.prefix + self.context


@dataclass(frozen=True, slots=True)
class Design:
    """What to measure and how carefully."""

    cases: tuple[Case, ...]
    """At least one."""
    skipped: tuple[str, ...]
    """Sentences about cases that the model has no room for."""
    repeats: int
    page_size: int
    step_tokens: int
    """Most tokens of a step: longer prompts are computed in chunks."""

    def own_pages(self, case: Case) -> int:
        """Pages of one row behind the prefix."""
        return -(-(_length(case, self.repeats) - case.prefix) // self.page_size)

    @property
    def page_count(self) -> int:
        """Pages of the largest case, and page 0, the pattern of all others."""
        return 1 + max(case.prefix // self.page_size + case.rows * self.own_pages(case) for case in self.cases)

    def chunks(self, case: Case) -> list[tuple[int, int]]:
        """Start and count of the steps that compute the new tokens of a row."""
        end = case.base + case.tokens
        return [(start, min(self.step_tokens, end - start)) for start in range(case.base, end, self.step_tokens)]


def design(
    *, context_length: int, rows: Sequence[int], prompts: Sequence[int], prefixes: Sequence[int], repeats: int,
    page_size: int, step_tokens: int,
) -> Design:  # fmt: skip
    """Every number of rows and every prompt, without a prefix and behind each of ``prefixes`` (rounded to whole pages).

    Raises:
        ConfigError: a number is out of range, or nothing is left to measure.
    """
    if min((1, *rows, *prompts, repeats, page_size, step_tokens)) < 1 or min((page_size, *prefixes)) < page_size:
        raise ConfigError(
            "rows, prompts, repeats, step tokens and page size must be positive, a prefix at least a page long"
        )
    if max((1, *rows)) > step_tokens:
        raise ConfigError(f"{max(rows)} rows do not fit a step of {step_tokens} tokens")
    shared = [0, *(length // page_size * page_size for length in prefixes)]
    wanted = [
        *(
            Case("decode", count, 1, DECODE_TAIL if prefix else DECODE_CONTEXT, prefix)
            for prefix in shared
            for count in rows
        ),
        *(Case("prefill", 1, count, 0, prefix) for prefix in shared for count in prompts),
    ]
    fitting = tuple(case for case in wanted if _length(case, repeats) <= context_length)
    if not fitting:
        raise ConfigError(f"nothing to measure: nothing of this fits the model's context of {context_length} tokens")
    skipped = tuple(
        f"{_named(case)} takes {_length(case, repeats)} positions, more than the model's context of {context_length}"
        for case in wanted
        if case not in fitting
    )
    return Design(fitting, skipped, repeats, page_size, step_tokens)


def _length(case: Case, repeats: int) -> int:
    """Positions of a row when the case is done. A decode row grows from one run to the next, a prompt starts afresh."""
    return case.base + (WARM_UPS + repeats if case.kind == "decode" else case.tokens)


def _named(case: Case) -> str:
    behind = f" behind a shared prefix of {case.prefix}" if case.prefix else ""
    return f"decode of {case.rows} rows{behind}" if case.kind == "decode" else f"a prompt of {case.tokens}{behind}"


# ---------------------------------------------------------------- work


@dataclass(frozen=True, slots=True)
class ModelSize:
    matrix_weights: int
    """Numbers of the matrices that every token is multiplied with."""
    head_weights: int
    """Numbers of the output head: only for tokens that sample."""
    weight_bytes: float
    """Of both, as the executor holds them."""
    byte_share: float
    """Share of both that are multiplied as bytes."""
    kv_position_bytes: int
    """Keys and values of one position in one layer."""
    query_width: int
    """Numbers of all query heads of one token."""
    windows: tuple[int | None, ...]
    """How far each layer's attention looks back, the own position included; ``None``: to the beginning."""


@dataclass(frozen=True, slots=True)
class Work:
    read_bytes: float
    """Weights, and keys and values that must be read, each once a step."""
    flop: float
    byte_op: float
    """Of those: on bytes."""
    page_op: float
    """Of those: on numbers of KV pages. The rest is float32."""


def work_of(size: ModelSize, case: Case, chunks: Sequence[tuple[int, int]]) -> Work:
    """The least work of the steps ``chunks`` of all rows of a case."""
    last = case.base + case.tokens
    read, flop, byte_op, page_op = 0.0, 0.0, 0.0, 0.0
    for start, count in chunks:
        read += size.weight_bytes
        linear = 2.0 * case.rows * (count * size.matrix_weights + (start + count == last) * size.head_weights)
        flop += linear
        byte_op += linear * size.byte_share
        for window in size.windows:
            read += size.kv_position_bytes * _positions_read(case, start, count, window)
            page_op += 4.0 * case.rows * size.query_width * _pairs(start, count, window)
    return Work(read, flop + page_op, byte_op, page_op)


def _positions_read(case: Case, start: int, count: int, window: int | None) -> int:
    """Positions before ``start`` that a layer must read, those in shared pages once for all rows."""
    first = 0 if window is None else max(0, start - window + 1)
    own = start - max(first, case.prefix)
    return max(0, case.prefix - first) + case.rows * max(0, own)


def _pairs(start: int, count: int, window: int | None) -> int:
    """Pairs of a query and a key it sees, for queries ``[start, start + count)`` of one row."""
    if window is None:
        return count * start + count * (count + 1) // 2
    return sum(min(position + 1, window) for position in range(start, start + count))
