"""Circuit breaker: stops sending to an engine that keeps failing, and tries it again carefully."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    """Where a breaker is."""

    CLOSED = "closed"
    """Requests pass."""
    OPEN = "open"
    """Nothing passes until the pause is over."""
    TRIAL = "trial"
    """One request has been let through; its end decides."""


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """When a breaker opens and for how long."""

    failures_to_open: int = 3
    """Failures in a row."""
    first_pause_s: float = 2.0
    """Pause after the first opening; doubles with every failed trial."""
    longest_pause_s: float = 30.0


class Breaker:
    """One engine's breaker. Time is passed in, in seconds of a monotonic clock."""

    def __init__(self, options: BreakerOptions = BreakerOptions()) -> None:
        self._options = options
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._pause_s = options.first_pause_s
        self._reopens_at = 0.0

    @property
    def state(self) -> BreakerState:
        """The state as of the last event."""
        return self._state

    @property
    def failures(self) -> int:
        """Failures in a row."""
        return self._failures

    def allows(self, now: float) -> bool:
        """Whether a request may be sent now."""
        if self._state is BreakerState.OPEN:
            return now >= self._reopens_at
        return self._state is BreakerState.CLOSED

    def wakes_at(self) -> float | None:
        """When an open breaker lets a trial through; None when nothing is to wait for."""
        return self._reopens_at if self._state is BreakerState.OPEN else None

    def started(self, now: float) -> bool:
        """A request that `allows` let through is being sent. Returns whether it is the trial."""
        if self._state is BreakerState.OPEN and now >= self._reopens_at:
            self._state = BreakerState.TRIAL
            return True
        return False

    def succeeded(self) -> None:
        """The engine answered as an engine in good health does (a 4xx counts as such)."""
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._pause_s = self._options.first_pause_s

    def failed(self, now: float) -> None:
        """The engine refused the connection, dropped it, or answered with a server error."""
        self._failures += 1
        if self._state is BreakerState.TRIAL:
            self._pause_s = min(self._pause_s * 2, self._options.longest_pause_s)
            self._open(now)
        elif self._state is BreakerState.CLOSED and self._failures >= self._options.failures_to_open:
            self._open(now)

    def abandoned(self) -> None:
        """The trial ended without telling anything about the engine (its client went away)."""
        if self._state is BreakerState.TRIAL:
            # The next request is the trial; the pause is over already.
            self._state = BreakerState.OPEN

    def _open(self, now: float) -> None:
        self._state = BreakerState.OPEN
        self._reopens_at = now + self._pause_s
