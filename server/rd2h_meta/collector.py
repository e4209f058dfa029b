"""The garbage collector of a service process."""

from __future__ import annotations

import gc

_THRESHOLDS = (50_000, 20, 50)
"""Allocations before a young collection, and so on. The tables hold many small objects without cycles; at the default
(700) the collector would take more time than the work itself, and hold up every waiter while it runs."""


def settle_collector() -> None:
    """Call when everything is loaded: what is there by now stays, and is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
