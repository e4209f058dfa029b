"""One Decode rank as Prefill sees it: connecting, handshaking, ready, lost. Pure state; time is passed in.

One endpoint object is one TCP session with one Decode generation. It is never revived: after a loss the next request
makes a new object with a new DEALER identity, which publishes its metadata again.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from rd2h.gates import ChunkBlocks
from rd2h.prefill.options import PublisherOptions
from rd2h.wire import Refusal

MAX_OUTBOX = 65536


class EndpointKey(NamedTuple):
    """Where a Decode rank listens, and which generation of it; ``generation`` is None for a legacy Decode."""

    host: str
    port: int
    generation: int | None


class EndpointState(Enum):
    """Life of an endpoint; it only moves forward."""

    CONNECTING = 1
    HANDSHAKING = 2
    READY = 3
    LOST = 4


@dataclass(frozen=True, slots=True, eq=False)
class EndpointChunk:
    """What one chunk publishes to one endpoint, encoded once for all its layers."""

    key: EndpointKey
    requests_raw: bytes
    blocks: ChunkBlocks
    tokens: tuple[bytes, ...]
    """Every child in the message, for failure reports."""
    done_ids: tuple[str, ...]
    done_tokens: tuple[bytes, ...]
    member: int
    ratio: int
    child_ids: tuple[str, ...] = ()
    """Decode's request ids, for people."""


class LayerMessage(NamedTuple):
    """A ready message to send: one layer of one chunk."""

    seq: int
    layer_idx: int
    last_layer: bool
    chunk: EndpointChunk


@dataclass(slots=True, eq=False)
class Endpoint:
    """State of one endpoint. ``number`` identifies it in the gates."""

    number: int
    key: EndpointKey
    deadline_s: float
    """While connecting or handshaking: when to give up."""
    state: EndpointState = EndpointState.CONNECTING
    reason: str = ""
    last_heard_s: float | None = None
    outbox: deque[LayerMessage] = field(default_factory=deque)
    notices: deque[bytes] = field(default_factory=deque)
    """Encoded messages other than ready messages, sent before the outbox."""
    unacknowledged: OrderedDict[int, tuple[LayerMessage, float]] = field(default_factory=OrderedDict)
    """Sent messages by sequence number, with the time of sending."""
    legacy_waiting: dict[int, int] = field(default_factory=dict)
    """Legacy Decode: layer index to the one sequence number that is outstanding for it."""

    @property
    def legacy(self) -> bool:
        """Whether this Decode speaks only the legacy messages."""
        return self.key.generation is None

    @property
    def answered(self) -> bool:
        """Whether Decode has answered, or never will."""
        return self.state not in (EndpointState.CONNECTING, EndpointState.HANDSHAKING)

    @property
    def usable(self) -> bool:
        """Whether new messages may be queued."""
        return self.state is not EndpointState.LOST

    def connected(self, handshake_deadline_s: float) -> None:
        """TCP and ZMQ are up; metadata goes out now."""
        if self.state is EndpointState.CONNECTING:
            self.state, self.deadline_s = EndpointState.HANDSHAKING, handshake_deadline_s

    def acknowledged(self, now_s: float) -> None:
        """Decode has our metadata."""
        if self.state is EndpointState.HANDSHAKING:
            self.state, self.last_heard_s = EndpointState.READY, now_s

    def heard(self, now_s: float) -> None:
        """Anything valid arrived."""
        if self.state is EndpointState.READY:
            self.last_heard_s = now_s

    def lost(self, reason: str) -> None:
        """The connection is gone; what was sent stays gated until ``give_up_at_s``."""
        if self.state is not EndpointState.LOST:
            self.state, self.reason = EndpointState.LOST, reason

    def next_message(self) -> LayerMessage | None:
        """The next ready message that may go out now; towards a legacy Decode one per layer is outstanding."""
        if self.state is not EndpointState.READY or not self.outbox:
            return None
        message = self.outbox[0]
        if self.legacy:
            if message.layer_idx in self.legacy_waiting:
                return None
            self.legacy_waiting[message.layer_idx] = message.seq
        return self.outbox.popleft()

    def sent(self, message: LayerMessage, now_s: float) -> None:
        """A ready message is on its way."""
        self.unacknowledged[message.seq] = (message, now_s)

    def match(self, layer_idx: int, seq: int | None) -> tuple[LayerMessage, float] | None:
        """The sent message that a reply belongs to, removed; None for a stale, duplicate or foreign reply."""
        if self.legacy:
            seq = self.legacy_waiting.get(layer_idx)
        if seq is None:
            return None
        found = self.unacknowledged.get(seq)
        if found is None or found[0].layer_idx != layer_idx:
            return None
        del self.unacknowledged[seq]
        if self.legacy:
            del self.legacy_waiting[layer_idx]
        return found

    def give_up_at_s(self, options: PublisherOptions) -> float:
        """When to give this endpoint up as things are: infinite while nothing limits it.

        Once lost, what was sent may no longer be in use by Decode from then on. A legacy Decode has no heartbeat, so
        its silence means nothing while its connection stands, but that it does not answer does after a long time.
        """
        if not self.answered:
            return self.deadline_s
        if self.legacy and self.state is EndpointState.READY:
            oldest = next(iter(self.unacknowledged.values()), None)
            return math.inf if oldest is None else oldest[1] + options.legacy_ack_timeout_s
        return math.inf if self.last_heard_s is None else self.last_heard_s + options.peer_timeout_s

    def open_failures(self, reason: str) -> list[Refusal]:
        """Every child with a message that is queued or unacknowledged."""
        messages = [message for message, _ in self.unacknowledged.values()] + list(self.outbox)
        tokens = dict.fromkeys(token for message in messages for token in message.chunk.tokens)
        return [Refusal(token, reason) for token in tokens]
