"""Deadlines of many keys: a heap with lazy deletion whose size stays proportional to the live keys."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_SLACK = 64
"""Dead heap entries tolerated before the heap is rebuilt, beyond the number of live ones."""


class ExpiryQueue(Generic[K]):
    """Keeps one deadline per key. Deadlines are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._deadline_of: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._deadline_of)

    def set(self, key: K, deadline_s: float) -> None:
        """Give `key` a deadline, or move it."""
        self._deadline_of[key] = deadline_s
        # The counter breaks ties, so that keys need no order of their own.
        self._pushes += 1
        heapq.heappush(self._heap, (deadline_s, self._pushes, key))
        if len(self._heap) > 2 * len(self._deadline_of) + _SLACK:
            self._rebuild()

    def discard(self, key: K) -> None:
        """Forget `key`; unknown keys are fine."""
        self._deadline_of.pop(key, None)
        if len(self._heap) > 2 * len(self._deadline_of) + _SLACK:
            self._rebuild()

    def next_deadline_s(self) -> float | None:
        """Return the earliest deadline, or None when there is no key."""
        while self._heap:
            deadline_s, _, key = self._heap[0]
            if self._deadline_of.get(key) == deadline_s:
                return deadline_s
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now_s: float) -> list[K]:
        """Remove and return the keys whose deadline is not after `now_s`, earliest first."""
        due: list[K] = []
        while True:
            deadline_s = self.next_deadline_s()
            if deadline_s is None or deadline_s > now_s:
                return due
            key = heapq.heappop(self._heap)[2]
            del self._deadline_of[key]
            due.append(key)

    def shift(self, delta_s: float) -> None:
        """Move every deadline by `delta_s`, because the service did not run for that long."""
        self._deadline_of = {key: deadline_s + delta_s for key, deadline_s in self._deadline_of.items()}
        self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(deadline_s, index, key) for index, (key, deadline_s) in enumerate(self._deadline_of.items())]
        self._pushes = len(self._heap)
        heapq.heapify(self._heap)
