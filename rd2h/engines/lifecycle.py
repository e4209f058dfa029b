"""Life of an engine: new, ready, closing, closed; and the count of reads that are running."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rd2h.engines.base import EngineRole
from rd2h.errors import EngineError, StateError


class EngineState(enum.Enum):
    """States of an engine. FAILED and CLOSED are final except that a failed engine may be closed."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    CLOSING = "closing"
    CLOSED = "closed"


TRANSITIONS: dict[EngineState, frozenset[EngineState]] = {
    EngineState.NEW: frozenset({EngineState.STARTING, EngineState.CLOSED}),
    EngineState.STARTING: frozenset({EngineState.READY, EngineState.FAILED}),
    EngineState.READY: frozenset({EngineState.CLOSING}),
    EngineState.FAILED: frozenset({EngineState.CLOSED}),
    EngineState.CLOSING: frozenset({EngineState.CLOSED, EngineState.READY}),
    EngineState.CLOSED: frozenset(),
}


class Lifecycle:
    """Owner of an engine's state. Reads enter and leave through it, so that `close` can wait for the last one."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._state = EngineState.NEW
        self._role: EngineRole | None = None
        self._reads_in_flight = 0

    @property
    def state(self) -> EngineState:
        """The current state."""
        return self._state

    @property
    def reads_in_flight(self) -> int:
        """How many reads are running now."""
        return self._reads_in_flight

    @property
    def role(self) -> EngineRole:
        """The role given to `initialize`. Raises StateError before it."""
        if self._role is None:
            raise StateError(f"engine {self._backend}: initialize(role) has not been called")
        return self._role

    @contextmanager
    def starting(self, role: EngineRole) -> Iterator[None]:
        """Body of `initialize`: READY when it ends normally, FAILED when it raises."""
        with self._condition:
            self._move(EngineState.STARTING)
            self._role = role
        outcome = EngineState.FAILED
        try:
            yield
            outcome = EngineState.READY
        finally:
            with self._condition:
                self._move(outcome)

    def require_ready(self, action: str) -> None:
        """Raise StateError unless the engine is ready; `action` says what was tried."""
        if self._state is not EngineState.READY:
            raise StateError(f"engine {self._backend}: cannot {action} while {self._state.value}; expected ready")

    def begin_read(self) -> bool:
        """Count a read in. False when the engine is not ready (closing, closed): then nothing may be read."""
        with self._lock:
            if self._state is not EngineState.READY:
                return False
            self._reads_in_flight += 1
            return True

    def end_read(self) -> None:
        """Count a read out; to be called once for every `begin_read` that returned True."""
        with self._lock:
            self._reads_in_flight -= 1
            if not self._reads_in_flight:
                self._condition.notify_all()

    @contextmanager
    def closing(self, timeout_s: float) -> Iterator[bool]:
        """Body of `close`: yields True when there is something to free, after the last running read has returned.

        Raises EngineError when reads still run after `timeout_s`; the engine is then ready as before, and may be closed
        again. No new read starts while waiting.
        """
        with self._condition:
            was_ready = self._enter_closing(timeout_s)
        try:
            yield was_ready
        finally:
            with self._condition:
                if self._state is not EngineState.CLOSED:
                    self._move(EngineState.CLOSED)

    def _enter_closing(self, timeout_s: float) -> bool:
        if self._state is not EngineState.READY:
            if self._state in (EngineState.STARTING, EngineState.CLOSING):
                raise StateError(f"engine {self._backend}: close called while {self._state.value}")
            return False
        self._move(EngineState.CLOSING)
        if not self._condition.wait_for(lambda: self._reads_in_flight == 0, timeout_s):
            self._move(EngineState.READY)
            raise EngineError(
                f"engine {self._backend}: {self._reads_in_flight} reads still running {timeout_s:g} s after close"
            )
        return True

    def _move(self, to: EngineState) -> None:
        if to not in TRANSITIONS[self._state]:
            raise StateError(f"engine {self._backend}: cannot go from {self._state.value} to {to.value}")
        self._state = to
