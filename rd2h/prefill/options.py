"""What a Prefill rank's publisher is told at its start."""

from collections.abc import Sequence
from dataclasses import dataclass

from rd2h.gates import Slot
from rd2h.wire import PeerInfo


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """Times in seconds."""

    peer_timeout_s: float = 20.0
    connect_timeout_s: float = 5.0
    handshake_timeout_s: float = 10.0
    legacy_ack_timeout_s: float = 300.0
    """How long a legacy Decode, which has no heartbeat, may leave a ready message unanswered."""
    cpus: frozenset[int] = frozenset()
    """Processors of the publisher's background thread and its I/O thread; empty: any."""


@dataclass(frozen=True, slots=True)
class SourceMemory:
    """What a Prefill rank publishes about itself."""

    session: str
    encoded_layers: bytes
    layer_names: Sequence[str]
    slots: Sequence[tuple[Slot, ...]]
    """Physical slots of each layer."""
    peer: PeerInfo
