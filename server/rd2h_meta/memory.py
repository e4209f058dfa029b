"""Ended rendezvous, remembered for a while so that whoever comes late learns how they ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from rd2h_client.v1.rendezvous_pb2 import OUTCOME_DONE, Outcome, RendezvousEvent

from rd2h_meta.limits import RendezvousLimits
from rd2h_meta.rendezvous_record import ChildEnd


class EndedRendezvous(NamedTuple):
    """How a rendezvous and its children ended."""

    outcome: Outcome
    reason: str
    children: dict[str, ChildEnd]
    forget_at_s: float

    def end_of(self, request_id: str) -> tuple[Outcome, str]:
        """Return outcome and reason for a child; one that was not known ended with the rendezvous."""
        end = self.children.get(request_id)
        return (end.outcome, end.reason) if end else (self.outcome, self.reason)

    def closed_event(self, rendezvous_id: str) -> RendezvousEvent:
        """Return the event that says that it is over."""
        event = RendezvousEvent(rendezvous_id=rendezvous_id)
        event.closed.outcome = self.outcome
        event.closed.reason = self.reason
        return event

    def replay(self, rendezvous_id: str) -> Iterator[RendezvousEvent]:
        """Yield what a waiter who comes now has missed."""
        for request_id, end in self.children.items():
            yield end.event(rendezvous_id, request_id)
        yield self.closed_event(rendezvous_id)


class _Shelf:
    """Ended rendezvous in the order they ended, bounded in number and in children."""

    def __init__(self, max_entries: int, max_children: int) -> None:
        self._max_entries = max_entries
        self._max_children = max_children
        self._entries: deque[tuple[str, EndedRendezvous]] = deque()
        self._children = 0

    def add(self, rendezvous_id: str, entry: EndedRendezvous) -> list[str]:
        """Add an entry; return what had to be forgotten for it."""
        self._entries.append((rendezvous_id, entry))
        self._children += len(entry.children)
        forgotten = []
        while len(self._entries) > self._max_entries or self._children > self._max_children:
            forgotten.append(self._forget_oldest())
        return forgotten

    def forget_due(self, now_s: float) -> list[str]:
        """Forget what was kept long enough; return it."""
        forgotten = []
        while self._entries and self._entries[0][1].forget_at_s <= now_s:
            forgotten.append(self._forget_oldest())
        return forgotten

    def _forget_oldest(self) -> str:
        rendezvous_id, entry = self._entries.popleft()
        self._children -= len(entry.children)
        return rendezvous_id


class RendezvousMemory:
    """The ended rendezvous. Successes have a shelf of their own, so that a high rate of them cannot push out the
    failures that late joiners ask for."""

    def __init__(self, limits: RendezvousLimits) -> None:
        self._memory_s = limits.memory_s
        self._entries: dict[str, EndedRendezvous] = {}
        self._done = _Shelf(limits.max_remembered, limits.max_remembered_children)
        self._other = _Shelf(limits.max_remembered, limits.max_remembered_children)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, rendezvous_id: str) -> EndedRendezvous | None:
        """Return how a rendezvous ended, or None when it has not or that is forgotten."""
        return self._entries.get(rendezvous_id)

    def add(
        self, rendezvous_id: str, outcome: Outcome, reason: str, children: dict[str, ChildEnd], now_s: float
    ) -> EndedRendezvous:
        """Remember an ended rendezvous that is not yet remembered."""
        entry = EndedRendezvous(outcome, reason, children, now_s + self._memory_s)
        self._entries[rendezvous_id] = entry
        self._forget((self._done if outcome == OUTCOME_DONE else self._other).add(rendezvous_id, entry))
        return entry

    def forget_due(self, now_s: float) -> None:
        """Forget what was remembered long enough."""
        self._forget(self._done.forget_due(now_s))
        self._forget(self._other.forget_due(now_s))

    def _forget(self, rendezvous_ids: list[str]) -> None:
        for rendezvous_id in rendezvous_ids:
            del self._entries[rendezvous_id]
