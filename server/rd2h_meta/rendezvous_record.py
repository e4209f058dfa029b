"""One open rendezvous and its children."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from rd2h_client.v1.rendezvous_pb2 import (
    OUTCOME_ABORTED,
    OUTCOME_DONE,
    OUTCOME_EXPIRED,
    OUTCOME_FAILED,
    Child,
    Outcome,
)

from rd2h_meta.errors import LimitError, PreconditionError
from rd2h_meta.rendezvous_events import Advertised, ChildEnd, Complete, Ended, Event

_SEVERITY = (OUTCOME_DONE, OUTCOME_ABORTED, OUTCOME_EXPIRED, OUTCOME_FAILED)
"""Outcomes from the mildest to the worst: a rendezvous ends like its worst child."""


@dataclass(slots=True)
class LiveChild:
    """A child that advertised and has not ended.

    A child is unknown, then live, then ended; or it ends (withdrawn, reported as failed) before it advertised. The
    dictionary of RendezvousRecord that holds it is its state.
    """

    child: Child
    deadline_s: float
    advertiser: int
    """Subscriber that advertised it last, perhaps by a stream that has ended meanwhile; 0 for a unary caller."""


class RendezvousState(enum.Enum):
    """Life of a rendezvous in the table: GATHERING -> COMPLETE, then it leaves the table."""

    GATHERING = enum.auto()
    """Children are missing, or nobody has said how many there are."""
    COMPLETE = enum.auto()
    """All expected children have advertised or ended."""


NEVER_S = float("inf")
"""Deadline of what is not queued."""


class RendezvousRecord:
    """An open rendezvous. Made for every request, so it is kept small: a tuple of waiters (there is nearly always one)
    costs less than a set."""

    __slots__ = (
        "deadline_s",
        "ended",
        "expected_children",
        "live",
        "scheduled_s",
        "state",
        "tell_conclusions",
        "waiters",
    )

    def __init__(self, deadline_s: float) -> None:
        """`deadline_s` is when it expires; children have deadlines of their own."""
        self.deadline_s = deadline_s
        self.expected_children = 0
        """0 until somebody awaits."""
        self.state = RendezvousState.GATHERING
        self.live: dict[str, LiveChild] = {}
        self.ended: dict[str, ChildEnd] = {}
        self.waiters: tuple[int, ...] = ()
        """Subscribers that await it."""
        self.tell_conclusions = False
        """One of them does not count the children itself, so it has to be told when they are complete and when all have
        ended."""
        self.scheduled_s = NEVER_S
        """Deadline under which the table has queued this record; never later than the earliest one of it."""

    def add_waiter(self, subscriber: int) -> None:
        """Note who awaits it."""
        if subscriber not in self.waiters:
            self.waiters = (*self.waiters, subscriber)

    def drop_waiter(self, subscriber: int) -> None:
        """Forget a waiter."""
        self.waiters = tuple(waiter for waiter in self.waiters if waiter != subscriber)

    @property
    def known_children(self) -> int:
        """Children that have advertised or ended."""
        return len(self.live) + len(self.ended)

    def check_room(self, rendezvous_id: str, max_children: int) -> None:
        """Check that one more child may come.

        Raises:
            PreconditionError: the awaiter expects no more.
            LimitError: a rendezvous holds no more.
        """
        known_children = len(self.live) + len(self.ended)
        if self.expected_children and known_children >= self.expected_children:
            raise PreconditionError(
                f"rendezvous {rendezvous_id!r}: all {self.expected_children} expected children are known already"
            )
        if known_children >= max_children:
            raise LimitError(f"rendezvous {rendezvous_id!r} has {max_children} children, the most allowed", 1.0)

    def expect(self, rendezvous_id: str, expected_children: int, deadline_s: float) -> None:
        """Take over what an awaiter says; the same again only extends the life.

        Raises:
            PreconditionError: another number was said before, or more children are known.
        """
        if self.expected_children not in (0, expected_children):
            raise PreconditionError(
                f"expected_children: got {expected_children}, but {rendezvous_id!r} is awaited already with "
                f"{self.expected_children}"
            )
        if self.known_children > expected_children:
            raise PreconditionError(
                f"expected_children: got {expected_children}, but {self.known_children} children of "
                f"{rendezvous_id!r} are known already"
            )
        self.deadline_s = max(self.deadline_s, deadline_s) if self.expected_children else deadline_s
        self.expected_children = expected_children

    def note_complete(self) -> bool:
        """Move to COMPLETE when all expected children are known; return True when that happened now."""
        if self.state is RendezvousState.COMPLETE or len(self.live) + len(self.ended) != self.expected_children:
            return False
        self.state = RendezvousState.COMPLETE
        return True

    def final_end(self) -> tuple[Outcome, str] | None:
        """Return outcome and reason when every expected child has ended, else None."""
        children = len(self.ended)
        if self.live or children != self.expected_children:
            return None
        if children == 1:
            (worst,) = self.ended.values()
        else:
            worst = max(self.ended.values(), key=lambda end: _SEVERITY.index(end.outcome))
        return worst.outcome, worst.reason

    def replay(self, rendezvous_id: str) -> Iterator[Event]:
        """Yield what a waiter who comes now has missed."""
        for request_id, end in self.ended.items():
            yield Ended(rendezvous_id, request_id, end)
        for live in self.live.values():
            yield Advertised(rendezvous_id, live.child)
        if self.state is RendezvousState.COMPLETE and self.tell_conclusions:
            yield Complete(rendezvous_id, len(self.live))

    def next_deadline_s(self) -> float:
        """Return when this record must be looked at next."""
        return min(self.deadline_s, min((live.deadline_s for live in self.live.values()), default=self.deadline_s))

    def shift_deadlines(self, delta_s: float) -> None:
        """Move all deadlines by `delta_s`."""
        self.deadline_s += delta_s
        self.scheduled_s += delta_s
        for live in self.live.values():
            live.deadline_s += delta_s
