"""Ledger and prefix cache as a configuration asks for them: the wiring that a real engine and a simulated one share.

Knows: which class a setting names. Refuses to know: models, workers, and anything that needs arrays.
"""

from branchline.base.config import EngineConfig
from branchline.cache.eviction import EVICTION_ORDERS
from branchline.cache.null import NullCache
from branchline.cache.pages import PageLedger
from branchline.cache.radix import RadixCache
from branchline.core.ports import PrefixCache


def make_books(config: EngineConfig) -> tuple[PageLedger, PrefixCache]:
    """``config.pages`` must be known."""
    ledger = PageLedger(config.pages or 0)
    if not config.prefix_cache:
        return ledger, NullCache(ledger, config.page_size)
    return ledger, RadixCache(ledger, config.page_size, EVICTION_ORDERS[config.eviction]())
