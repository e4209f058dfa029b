"""Queues of registry changes: a bounded history to resume from, and a bounded queue for every watcher."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from rd2h_client.v1.engine_registry_pb2 import ENGINE_ROLE_UNSPECIFIED, EngineEvent, EngineRole

from rd2h_meta.errors import RevisionGoneError


class Watcher:
    """Changes queued for one watcher. A watcher that lags too far is told so once and gets nothing more."""

    def __init__(self, role: EngineRole, capacity: int, wake: Callable[[], None]) -> None:
        """`wake` is called when there is something to take; it must not block."""
        self._role = role
        self._capacity = capacity
        self._wake = wake
        self._events: deque[EngineEvent] = deque()
        self.overflowed = False
        """True when events were dropped: list again."""

    def offer(self, event: EngineEvent) -> None:
        """Queue `event` if it concerns this watcher."""
        if self.overflowed or not role_matches(self._role, event.engine.role):
            return
        if len(self._events) >= self._capacity:
            self.overflowed = True
            self._events.clear()
        else:
            self._events.append(event)
        self._wake()

    def take(self, limit: int) -> list[EngineEvent]:
        """Remove and return up to `limit` events, oldest first."""
        return [self._events.popleft() for _ in range(min(limit, len(self._events)))]

    def __len__(self) -> int:
        return len(self._events)


class History:
    """The last changes, so that a watcher which lost its stream can go on without a new list."""

    def __init__(self, capacity: int) -> None:
        self._events: deque[EngineEvent] = deque(maxlen=capacity)
        self.revision = 0
        """Revision of the newest change; 0 before the first."""

    def append(self, event: EngineEvent) -> None:
        """Add a change; its revision must be the next one."""
        if event.revision != self.revision + 1:
            raise ValueError(f"revision: got {event.revision}, allowed: {self.revision + 1}")
        self._events.append(event)
        self.revision = event.revision

    def after(self, revision: int, role: EngineRole) -> Iterable[EngineEvent]:
        """Return the changes after `revision` that concern `role`.

        Raises:
            RevisionGoneError: changes after `revision` are no longer kept, or it lies in the future.
        """
        oldest = self.revision - len(self._events)
        if not oldest <= revision <= self.revision:
            raise RevisionGoneError(f"after_revision: got {revision}, allowed: {oldest}..{self.revision}; list again")
        missed = self.revision - revision
        events = list(self._events)[len(self._events) - missed :]
        return [event for event in events if role_matches(role, event.engine.role)]


def role_matches(wanted: EngineRole, role: EngineRole) -> bool:
    """Return True when an engine of `role` passes the filter `wanted` (UNSPECIFIED passes all)."""
    return wanted in (ENGINE_ROLE_UNSPECIFIED, role)
