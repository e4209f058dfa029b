"""What the rendezvous table tells its subscribers. Plain tuples, written into the message that carries them: a message
of its own for each would cost more than all else the table does."""

from __future__ import annotations

from typing import NamedTuple

from rd2h_client.v1.rendezvous_pb2 import Child, Outcome, RendezvousEvent

_NAMES = {outcome: Outcome.Name(outcome).removeprefix("OUTCOME_").lower() for outcome in Outcome.values()}


def outcome_name(outcome: Outcome) -> str:
    """Return "done", "aborted", "failed" or "expired"."""
    return _NAMES[outcome]


class ChildEnd(NamedTuple):
    """How a child ended. (A tuple is made in a third of the time of a frozen dataclass.)"""

    outcome: Outcome
    reason: str
    prompt_index: int
    choice_index: int


class Advertised(NamedTuple):
    """A child advertised."""

    rendezvous_id: str
    child: Child

    def write(self, event: RendezvousEvent) -> None:
        """Fill in the message."""
        event.rendezvous_id = self.rendezvous_id
        event.advertised.CopyFrom(self.child)


class Ended(NamedTuple):
    """A child ended."""

    rendezvous_id: str
    request_id: str
    end: ChildEnd

    def write(self, event: RendezvousEvent) -> None:
        """Fill in the message."""
        event.rendezvous_id = self.rendezvous_id
        ended = event.child_ended
        ended.request_id = self.request_id
        ended.outcome, ended.reason, ended.prompt_index, ended.choice_index = self.end


class Complete(NamedTuple):
    """All expected children have advertised or ended."""

    rendezvous_id: str
    live_children: int

    def write(self, event: RendezvousEvent) -> None:
        """Fill in the message."""
        event.rendezvous_id = self.rendezvous_id
        event.complete.SetInParent()  # 0 alone would not be sent
        event.complete.live_children = self.live_children


class Closed(NamedTuple):
    """The rendezvous is over."""

    rendezvous_id: str
    outcome: Outcome
    reason: str

    def write(self, event: RendezvousEvent) -> None:
        """Fill in the message."""
        event.rendezvous_id = self.rendezvous_id
        event.closed.outcome = self.outcome
        event.closed.reason = self.reason


Event = Advertised | Ended | Complete | Closed
