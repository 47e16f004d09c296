"""A bar on the terminal while a model is packed, once that has taken longer than a second.

Knows: how many numbers there are, and the clock. Refuses to know: how they are packed (``models.repack``) and into what.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Self, TextIO

from branchline.base.clock import NS_PER_S, Clock
from branchline.ops.packed import Groups, Numbers, PackedWeight

PATIENCE_NS = NS_PER_S
"""How long loading may take without a word."""


class Loading:
    """Use it as a context manager around the packing.

    Args:
        total: numbers of all matrices.
        terminal: where the bar is drawn, unless it is a file; ``None``: standard error.
    """

    def __init__(self, total: int, clock: Clock, terminal: TextIO | None = None) -> None:
        self._total = total
        self._done = 0
        self._clock = clock
        self._silent_until_ns = clock.now_ns() + PATIENCE_NS
        self._terminal = terminal or sys.stderr
        self._bar = ExitStack()
        self._draw: Callable[[int], None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()

    def watch(self, weight: PackedWeight) -> PackedWeight:
        """The same weight; its slabs are counted as they are taken."""
        return dataclasses.replace(weight, slabs=self._counted(weight.slabs))

    def _counted(self, slabs: Iterable[Numbers | Groups]) -> Iterator[Numbers | Groups]:
        for slab in slabs:
            yield slab
            self._done += slab.codes.size if isinstance(slab, Groups) else slab.rows.size
            if self._draw is None and self._terminal.isatty() and self._clock.now_ns() >= self._silent_until_ns:
                self._draw = self._open_bar()
            if self._draw is not None:
                self._draw(self._done)

    def _open_bar(self) -> Callable[[int], None]:
        from rich.console import Console  # imported late: most models are loaded before anybody has looked
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

        bar = self._bar.enter_context(
            Progress(
                "branchline: loading the model", BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
                console=Console(file=self._terminal), transient=True,
            )
        )  # fmt: skip
        task = bar.add_task("", total=self._total)
        return lambda done: bar.update(task, completed=done)
