"""Waiting on conditions with deadlines."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PAUSE_S = 0.01


def wait_for(what: str, condition: Callable[[], T], deadline_s: float = 30.0) -> T:
    """Call ``condition`` until it is true, and return its value; raises AssertionError that names ``what``."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come true within {deadline_s:g} s")
        time.sleep(PAUSE_S)
    return value


def stays(what: str, condition: Callable[[], object], for_s: float) -> None:
    """Check that ``condition`` holds all the time; raises AssertionError that names ``what``."""
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        if not condition():
            raise AssertionError(f"{what} did not stay true for {for_s:g} s")
        time.sleep(PAUSE_S)
