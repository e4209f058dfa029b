"""Ended rendezvous, remembered for a while so that whoever comes late learns how they ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from rd2h_client.v1.rendezvous_pb2 import OUTCOME_DONE, Outcome

from rd2h_meta.limits import RendezvousLimits
from rd2h_meta.rendezvous_events import ChildEnd, Closed, Ended, Event


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

    def replay(self, rendezvous_id: str) -> Iterator[Event]:
        """Yield what a waiter who comes now has missed."""
        for request_id, end in self.children.items():
            yield Ended(rendezvous_id, request_id, end)
        yield Closed(rendezvous_id, self.outcome, self.reason)


class _Shelf:
    """Ended rendezvous in the order they ended, bounded in number and in children."""

    def __init__(self, max_entries: int, max_children: int) -> None:
        self._max_entries = max_entries
        self._max_children = max_children
        self._children = 0
        self.entries: OrderedDict[str, EndedRendezvous] = OrderedDict()

    def add(self, rendezvous_id: str, entry: EndedRendezvous) -> None:
        """Add an entry, and forget what there is no more room for."""
        entries = self.entries
        entries[rendezvous_id] = entry
        self._children += len(entry.children)
        while len(entries) > self._max_entries or self._children > self._max_children:
            self._forget_oldest()

    def forget_due(self, now_s: float) -> None:
        """Forget what was kept long enough."""
        while self.entries and next(iter(self.entries.values())).forget_at_s <= now_s:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, entry = self.entries.popitem(last=False)
        self._children -= len(entry.children)


class RendezvousMemory:
    """The ended rendezvous. Successes have a shelf of their own, so that a high rate of them cannot push out the
    failures that late joiners ask for."""

    def __init__(self, limits: RendezvousLimits) -> None:
        self._memory_s = limits.memory_s
        self._done = _Shelf(limits.max_remembered, limits.max_remembered_children)
        self._other = _Shelf(limits.max_remembered, limits.max_remembered_children)

    def __len__(self) -> int:
        return len(self._done.entries) + len(self._other.entries)

    def get(self, rendezvous_id: str) -> EndedRendezvous | None:
        """Return how a rendezvous ended, or None when it has not or that is forgotten."""
        return self._done.entries.get(rendezvous_id) or self._other.entries.get(rendezvous_id)

    def add(
        self, rendezvous_id: str, outcome: Outcome, reason: str, children: dict[str, ChildEnd], now_s: float
    ) -> None:
        """Remember an ended rendezvous that is not yet remembered."""
        shelf = self._done if outcome == OUTCOME_DONE else self._other
        shelf.add(rendezvous_id, EndedRendezvous(outcome, reason, children, now_s + self._memory_s))

    def forget_due(self, now_s: float) -> None:
        """Forget what was remembered long enough."""
        self._done.forget_due(now_s)
        self._other.forget_due(now_s)
