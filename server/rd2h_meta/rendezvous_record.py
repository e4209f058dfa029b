"""One open rendezvous and its children."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rd2h_client.v1.rendezvous_pb2 import (
    OUTCOME_ABORTED,
    OUTCOME_DONE,
    OUTCOME_EXPIRED,
    OUTCOME_FAILED,
    Child,
    Outcome,
    RendezvousEvent,
)

from rd2h_meta.errors import LimitError, PreconditionError

_SEVERITY = (OUTCOME_DONE, OUTCOME_ABORTED, OUTCOME_EXPIRED, OUTCOME_FAILED)
"""Outcomes from the mildest to the worst: a rendezvous ends like its worst child."""


_NAMES = {outcome: Outcome.Name(outcome).removeprefix("OUTCOME_").lower() for outcome in Outcome.values()}


def outcome_name(outcome: Outcome) -> str:
    """Return "done", "aborted", "failed" or "expired"."""
    return _NAMES[outcome]


def advertised_event(rendezvous_id: str, child: Child) -> RendezvousEvent:
    """Return the event that tells of an advert. (Filling a message in is three times as fast as its constructor.)"""
    event = RendezvousEvent(rendezvous_id=rendezvous_id)
    event.advertised.CopyFrom(child)
    return event


class ChildEnd(NamedTuple):
    """How a child ended. (A tuple is made in a third of the time of a frozen dataclass.)"""

    outcome: Outcome
    reason: str
    prompt_index: int
    choice_index: int

    def event(self, rendezvous_id: str, request_id: str) -> RendezvousEvent:
        """Return the event that tells of it."""
        event = RendezvousEvent(rendezvous_id=rendezvous_id)
        ended = event.child_ended
        ended.request_id = request_id
        ended.outcome = self.outcome
        ended.reason = self.reason
        ended.prompt_index = self.prompt_index
        ended.choice_index = self.choice_index
        return event


@dataclass(slots=True)
class LiveChild:
    """A child that advertised and has not ended.

    A child is unknown, then live, then ended; or it ends (withdrawn, reported as failed) before it advertised. The
    dictionary of RendezvousRecord that holds it is its state.
    """

    child: Child
    deadline_s: float
    advertiser: int
    """Subscriber that advertised it last; 0 when its stream is gone."""


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

    __slots__ = ("deadline_s", "ended", "expected_children", "live", "scheduled_s", "state", "waiters")

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

    def end_child(self, request_id: str, end: ChildEnd) -> LiveChild | None:
        """Note the end of a child; return it when it was live."""
        self.ended[request_id] = end
        return self.live.pop(request_id, None)

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

    def replay(self, rendezvous_id: str) -> Iterator[RendezvousEvent]:
        """Yield what a waiter who comes now has missed."""
        for request_id, end in self.ended.items():
            yield end.event(rendezvous_id, request_id)
        for live in self.live.values():
            yield advertised_event(rendezvous_id, live.child)
        if self.state is RendezvousState.COMPLETE:
            yield self.complete_event(rendezvous_id)

    def complete_event(self, rendezvous_id: str) -> RendezvousEvent:
        """Return the event that says that all expected children are known."""
        event = RendezvousEvent(rendezvous_id=rendezvous_id)
        event.complete.live_children = len(self.live)
        if not self.live:
            event.complete.SetInParent()  # 0 alone would not be sent
        return event

    def next_deadline_s(self) -> float:
        """Return when this record must be looked at next."""
        return min(self.deadline_s, min((live.deadline_s for live in self.live.values()), default=self.deadline_s))

    def shift_deadlines(self, delta_s: float) -> None:
        """Move all deadlines by `delta_s`."""
        self.deadline_s += delta_s
        self.scheduled_s += delta_s
        for live in self.live.values():
            live.deadline_s += delta_s
