"""Names for the integers and strings that travel between packages.

Knows: which number means what. Refuses to know: how any of them is allocated.
"""

from typing import TypeAlias

RequestId: TypeAlias = str
"""Public, unguessable, chosen at the edge; unique among live requests."""

SeqId: TypeAlias = int
"""Private to one scheduler, never reused within a process."""

Slot: TypeAlias = int
"""Row of worker state, ``0 <= slot < max_running``; reused after its last plan has been committed."""

Epoch: TypeAlias = int
"""Attempt number of a sequence. Results that carry an older epoch are dropped."""

StepId: TypeAlias = int
"""Number of a plan, counted from 1 without gaps."""

PageId: TypeAlias = int
"""Index of a KV page, ``0 <= page < page_count``."""

TokenId: TypeAlias = int
