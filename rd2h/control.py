"""The control plane as the scheduler halves see it: registration, adverts, notices. Nothing here blocks.

All network work happens in the client's own thread; only the configured meta service is ever contacted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this engine is towards its peers."""

    engine_id: str
    generation: int
    host: str
    base_port: int
    tp_size: int
    dp_size: int
    dp_rank: int


@dataclass(frozen=True, slots=True)
class Advert:
    """One child that wants its KV."""

    rendezvous_id: str
    request_id: str
    token: bytes
    cached_tokens: int
    prompt_tokens: int
    prompt_index: int
    choice_index: int


@dataclass(frozen=True, slots=True)
class Notice:
    """The meta service says that a child of ours will get no KV."""

    rendezvous_id: str
    request_id: str
    reason: str


class DecodeAddress(NamedTuple):
    """Where a Decode engine listens, and which generation of it."""

    generation: int
    host: str
    base_port: int


@dataclass(frozen=True, slots=True)
class Registered:
    """Engines that the meta service vouches for."""

    prefill_generations: frozenset[int] = frozenset()
    decode_addresses: frozenset[DecodeAddress] = frozenset()


class ControlPlane(Protocol):
    """What the scheduler halves need; see ``rd2h.meta_link`` for the real one."""

    def advertise(self, advert: Advert) -> None:
        """Announce a child. Raises QueueFullError."""
        ...

    def withdraw(self, advert: Advert, outcome: str, reason: str) -> None:
        """Take a child back: "done", "aborted" or "failed"."""
        ...

    def report_failure(self, rendezvous_id: str, request_ids: Sequence[str], reason: str) -> None:
        """Prefill will not deliver these children; without any, no child of this rendezvous."""
        ...

    def drain_notices(self) -> list[Notice]:
        """Notices since the last call."""
        ...

    def registered(self) -> Registered:
        """The engines that are registered now; the same object while nothing changes."""
        ...

    def note_unhealthy(self, reason: str) -> None:
        """The data path of a worker is dead."""
        ...

    def stop(self) -> None:
        """Deregister and end the background work."""
        ...
