"""How long a step takes: a sum of five products, fitted to measured steps, kept in a file.

    duration = fixed + per_new_token * new tokens + per_context_token * context tokens + per_pair * pairs + per_row * rows

    new tokens      positions that are computed
    context tokens  positions that the rows look back at, each counted once a row: what attention reads from memory
    pairs           the same, counted for each new token: what attention multiplies
    rows            sequences

Decode has as many pairs as context tokens, prefill many more; with one of the two alone either would be predicted badly.
Knows: plans as numbers. Refuses to know: models and how steps are measured.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from branchline.base.errors import ConfigError
from branchline.core.plan import StepPlan

FILE_KIND = "branchline-latency-1"
FOLDS = 4
"""Parts of the cross-check: each is predicted by a model fitted to the others."""

Matrix = npt.NDArray[np.float64]


class Load(NamedTuple):
    """What a plan asks of a worker."""

    new_tokens: int
    context_tokens: int
    pairs: int
    rows: int

    @classmethod
    def of(cls, plan: StepPlan) -> "Load":
        new = context = pairs = 0
        for row in plan.rows:
            start, count = row.start, row.count
            new += count
            context += start + count
            pairs += count * start + count * (count + 1) // 2
        return cls(new, context, pairs, len(plan.rows))


class Sample(NamedTuple):
    """One measured step."""

    load: Load
    duration_ns: int


class LatencyModel(msgspec.Struct, frozen=True, kw_only=True):
    fixed_ns: float
    per_new_token_ns: float
    per_context_token_ns: float
    per_row_ns: float
    per_pair_ns: float = 0.0

    def __post_init__(self) -> None:
        values = msgspec.structs.astuple(self)
        if not all(0 <= value < float("inf") for value in values) or not any(values):
            raise ConfigError("the coefficients of a latency model are not negative, and one of them is above zero")

    def duration_ns(self, plan: StepPlan) -> int:
        return self.predict_ns(Load.of(plan))

    def predict_ns(self, load: Load) -> int:
        return max(1, round(
            self.fixed_ns + self.per_new_token_ns * load.new_tokens + self.per_context_token_ns * load.context_tokens
            + self.per_pair_ns * load.pairs + self.per_row_ns * load.rows
        ))  # fmt: skip

    def faster(self, factor: float) -> "LatencyModel":
        """The same worker, ``factor`` times as fast."""
        return LatencyModel(**{name: value / factor for name, value in msgspec.structs.asdict(self).items()})


class FitError(msgspec.Struct, frozen=True, kw_only=True):
    """How far predictions are off, as shares of the measured duration."""

    mean: float
    p95: float
    held_out_mean: float
    """Of steps that the fit did not see."""
    held_out_p95: float


class Fit(NamedTuple):
    model: LatencyModel
    error: FitError


class LatencyFile(msgspec.Struct, frozen=True, kw_only=True):
    """A latency model, and where it comes from."""

    kind: str = FILE_KIND
    model: str
    """Name of the language model."""
    executor: str
    machine: str
    """Processor and number of threads, for people."""
    measured: str
    """What was measured and when, for people."""
    samples: int
    page_size: int
    pages: int
    """KV pages that the engine gives itself on that machine, unless told otherwise."""
    context_length: int
    latency: LatencyModel
    error: FitError

    def save(self, path: Path) -> None:
        """Raises ConfigError: the file cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
        except OSError as error:
            raise ConfigError(f"the latency file {path} cannot be written: {error.strerror}") from None

    @property
    def words(self) -> str:
        """What was measured, in one line."""
        error = f"predictions are off by {self.error.held_out_mean:.1%} on average"
        return f"{self.model} on {self.machine}, {self.executor}; {error}"

    @classmethod
    def load(cls, path: Path) -> "LatencyFile":
        """Raises ConfigError: the file cannot be read or is no latency file."""
        try:
            return cls.parse(path.read_bytes(), str(path))
        except OSError as error:
            raise ConfigError(f"the latency file {path} cannot be read: {error.strerror}") from None

    @classmethod
    def parse(cls, data: bytes, name: str) -> "LatencyFile":
        try:
            file = msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, ConfigError) as error:
            raise ConfigError(f"{name} is not a latency file: {error}") from None
        if file.kind != FILE_KIND:
            raise ConfigError(f"{name} is of kind {file.kind!r}, this version reads {FILE_KIND!r}")
        return file


# ---------------------------------------------------------------- fitting


def fit(samples: Sequence[Sample]) -> Fit:
    """Least squares of the relative error, with coefficients that are not negative; cross-checked on held-out samples.

    Relative, because a short decode step matters as much as a long prefill step: there are many more of them.

    Raises:
        ConfigError: fewer samples than it takes to tell five coefficients and an error.
    """
    if len(samples) < 2 * FOLDS:
        raise ConfigError(f"a latency model needs at least {2 * FOLDS} measured steps, not {len(samples)}")
    features, durations = _features(samples), np.array([sample.duration_ns for sample in samples], np.float64)
    coefficients = _non_negative(features, durations)
    own = _errors(features, durations, coefficients)
    held_out = _held_out_errors(features, durations)
    error = FitError(
        mean=_rounded(own.mean()), p95=_rounded(np.quantile(own, 0.95)),
        held_out_mean=_rounded(held_out.mean()), held_out_p95=_rounded(np.quantile(held_out, 0.95)),
    )  # fmt: skip
    fixed, new, context, pairs, rows = (round(float(value), 3) for value in coefficients)
    model = LatencyModel(
        fixed_ns=fixed, per_new_token_ns=new, per_context_token_ns=context, per_pair_ns=pairs, per_row_ns=rows
    )
    return Fit(model, error)


def _features(samples: Sequence[Sample]) -> Matrix:
    """``[samples, 5]``: one, new tokens, context tokens, pairs, rows."""
    return np.array([(1, *sample.load) for sample in samples], np.float64)


def _non_negative(features: Matrix, durations: Matrix) -> Matrix:
    """The best coefficients ``[5]`` of which none is negative.

    At the optimum some coefficients are zero and the rest solves plain least squares: with five there are only 31 choices,
    so all are tried (Lawson and Hanson's active set, by exhaustion).
    """
    weighted, target = features / durations[:, None], np.ones(len(durations))
    width = features.shape[1]
    best, best_loss = np.zeros(width), float("inf")
    for size in range(1, width + 1):
        for chosen in itertools.combinations(range(width), size):
            columns = list(chosen)
            solution, *_ = np.linalg.lstsq(weighted[:, columns], target, rcond=None)
            loss = float(np.sum((weighted[:, columns] @ solution - target) ** 2))
            if solution.min() >= 0 and loss < best_loss:
                best, best_loss = np.zeros(width), loss
                best[columns] = solution
    return best


def _errors(features: Matrix, durations: Matrix, coefficients: Matrix) -> Matrix:
    return np.abs(features @ coefficients / durations - 1)


def _held_out_errors(features: Matrix, durations: Matrix) -> Matrix:
    fold = np.arange(len(durations)) % FOLDS
    return np.concatenate([
        _errors(features[fold == k], durations[fold == k], _non_negative(features[fold != k], durations[fold != k]))
        for k in range(FOLDS)
    ])  # fmt: skip


def _rounded(share: np.floating) -> float:
    return round(float(share), 4)
