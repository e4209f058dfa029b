"""The life of a request, as an explicit state machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Phase(Enum):
    """Where a request is."""

    QUEUED = "queued"
    """Waits for the meta service or a Decode engine with room."""
    RENDEZVOUS = "rendezvous"
    """Decode has the request; its children have not all advertised."""
    PREFILL = "prefill"
    """At least one wave has been sent to Prefill; Decode has not answered."""
    STREAMING = "streaming"
    """The answer is on its way to the client."""
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"
    """The client went away."""

    @property
    def final(self) -> bool:
        """Whether nothing follows."""
        return self in _FINAL


_FINAL = frozenset({Phase.DONE, Phase.FAILED, Phase.ABORTED})
# A retry goes back to QUEUED; from STREAMING when Decode gave a complete answer back, of which nothing was sent, and it
# could not be continued. RENDEZVOUS -> STREAMING: Decode had the whole prompt cached, or it is a whole request.
_NEXT = {
    Phase.QUEUED: {Phase.RENDEZVOUS, Phase.FAILED, Phase.ABORTED},
    Phase.RENDEZVOUS: {Phase.PREFILL, Phase.STREAMING, Phase.QUEUED, Phase.FAILED, Phase.ABORTED},
    Phase.PREFILL: {Phase.STREAMING, Phase.QUEUED, Phase.FAILED, Phase.ABORTED},
    Phase.STREAMING: {Phase.DONE, Phase.QUEUED, Phase.FAILED, Phase.ABORTED},
}


class PhaseError(RuntimeError):
    """A transition that the life of a request does not have."""


@dataclass(slots=True)
class Life:
    """One request's phases with the time each began (seconds of a monotonic clock)."""

    phase: Phase
    since: float
    began: float = field(init=False)
    history: list[tuple[Phase, float]] = field(default_factory=list)
    """Finished phases with their durations in seconds."""

    def __post_init__(self) -> None:
        self.began = self.since

    def move(self, phase: Phase, now: float) -> None:
        """Enters a phase; entering the present one again changes nothing.

        Raises:
            PhaseError: there is no such transition.
        """
        if phase is self.phase:
            return
        if self.phase.final or phase not in _NEXT[self.phase]:
            raise PhaseError(f"a request cannot go from {self.phase.value} to {phase.value}")
        self.history.append((self.phase, now - self.since))
        self.phase = phase
        self.since = now
