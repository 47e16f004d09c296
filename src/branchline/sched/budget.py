"""How full we want to be: the tokens of one step and the share of promised output that memory is kept for.

Neither is a matter of safety (the ledger is); both are policy. Knows: numbers. Refuses to know: sequences, pages.
"""

from branchline.base.errors import require

INITIAL_RATIO = 0.7
FLOOR_RATIO = 0.1
DECAY_STEPS = 600
"""Steps without a retraction in which the ratio falls from the initial value to the floor."""
RETRACT_HEADROOM_STEPS = 20
CLIP_NEW_TOKENS = 4096
"""Longest output that admission keeps memory for; few requests use a huge ``max_tokens``."""


class StepBudget:
    """Tokens of one step, shared by decode rows and prefill chunks."""

    def __init__(self, tokens: int, chunk_tokens: int | None) -> None:
        self.left = tokens
        self._chunk_tokens = chunk_tokens

    def chunk(self, wanted: int) -> int:
        """How many of ``wanted`` prefill tokens one request may take now."""
        allowed = min(wanted, self.left)
        return min(allowed, self._chunk_tokens) if self._chunk_tokens is not None else allowed

    def spend(self, tokens: int) -> None:
        require(0 < tokens <= self.left, "the step budget is overdrawn")
        self.left -= tokens


class NewTokenRatio:
    """Share of the promised new tokens that admission keeps memory for.

    Starts high, decays while decoding goes well, is raised by a retraction and starts again when the engine is idle
    (SGLang's new-token ratio).
    """

    def __init__(self) -> None:
        self.value = INITIAL_RATIO

    def decay(self) -> None:
        """A step went by without a retraction."""
        self.value = max(FLOOR_RATIO, self.value - (INITIAL_RATIO - FLOOR_RATIO) / DECAY_STEPS)

    def raise_after_retraction(self, generated: int, promised: int, rows: int) -> None:
        """``generated`` and ``promised`` new tokens of the ``rows`` sequences that stay."""
        self.value = min(1.0, (generated + RETRACT_HEADROOM_STEPS * rows) / (promised + 1))

    def reset(self) -> None:
        self.value = INITIAL_RATIO
