"""Counts and recent failures of the rendezvous table, for operators."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from rd2h_client.v1.rendezvous_pb2 import OUTCOME_EXPIRED, OUTCOME_FAILED, Outcome

from rd2h_meta.rendezvous_events import ChildEnd, outcome_name

_FAILURES = (OUTCOME_FAILED, OUTCOME_EXPIRED)


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure."""

    rendezvous_id: str
    request_id: str
    """Empty for a whole rendezvous."""
    reason: str
    at_s: float


class RendezvousStats:
    """Totals since the start, and the last failures (newest first)."""

    def __init__(self, recent_failures: int) -> None:
        self.advertised = 0
        """Children that advertised."""
        self.rendezvous: Counter[Outcome] = Counter()
        """Ended rendezvous."""
        self.children: Counter[Outcome] = Counter()
        """Ended children."""
        self.failures: deque[Failure] = deque(maxlen=recent_failures)

    def note_child(self, rendezvous_id: str, request_id: str, end: ChildEnd, now_s: float) -> None:
        """Count a child that ended by itself."""
        outcome = end.outcome
        self.children[outcome] += 1
        if outcome in _FAILURES:
            self.failures.appendleft(Failure(rendezvous_id, request_id, end.reason, now_s))

    def note_rendezvous(self, rendezvous_id: str, outcome: Outcome, reason: str, now_s: float) -> None:
        """Count a rendezvous that ended."""
        self.rendezvous[outcome] += 1
        if outcome in _FAILURES:
            self.failures.appendleft(Failure(rendezvous_id, "", reason, now_s))

    def totals(self) -> dict[str, int]:
        """Return all totals by name."""
        totals = {"advertised": self.advertised}
        totals.update({f"rendezvous_{outcome_name(outcome)}": count for outcome, count in self.rendezvous.items()})
        totals.update({f"children_{outcome_name(outcome)}": count for outcome, count in self.children.items()})
        return totals
