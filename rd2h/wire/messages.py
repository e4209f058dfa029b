"""The messages, their tags and limits."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WIRE_VERSION = 1
MAX_FRAME_BYTES = 16 << 20
MAX_NAME_CHARS = 1024
MAX_REASON_CHARS = 2048
MAX_REQUESTS_PER_MESSAGE = 16384
MAX_JOINT_ACKS = 64
MAX_BLOCK_ID = (1 << 31) - 1
TOKEN_BYTES = 16

TAG_MF_META = b"mf_meta"
TAG_MF_ACK = b"mf_ack"
TAG_READ_READY = b"read_ready_batch"
TAG_READ_DONE = b"read_done"
TAG_READ_FAILED = b"read_failed"
TAG_PREFILL_FAILED = b"prefill_failed"
TAG_STOP_SENDING = b"stop_sending"
TAG_PING = b"ping"
TAG_PONG = b"pong"
LEGACY_ACK = b"ACK"

BlockIds = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Extension map of ``mf_meta``: who the Prefill rank is."""

    version: int
    generation: int
    fingerprint: bytes
    tp_size: int
    tp_rank: int
    peer_timeout_ms: int = 0
    """After how long a silence Prefill gives a Decode up; 0: it did not say."""
    joint_acks: bool = False
    """Prefill takes one ``read_done`` for several layers."""


@dataclass(frozen=True, slots=True)
class MfMeta:
    """Prefill's memory: engine session and encoded layer map; ``peer`` is None for a legacy Prefill."""

    session: str
    encoded_layers: bytes
    peer: PeerInfo | None


@dataclass(frozen=True, slots=True)
class MfAck:
    """Decode's answer to ``mf_meta``: its wire version, generation and clock; ``error`` is empty unless it refuses."""

    version: int
    generation: int
    clock_ns: int
    error: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class ReadRequest:
    """Blocks of one request in a chunk: Prefill's block ids and where they begin in the prompt (block index)."""

    request_id: str
    main_blocks: BlockIds
    indexer_blocks: BlockIds
    main_start: int
    indexer_start: int
    token: bytes | None


class ReadyHead(NamedTuple):
    """A layer is ready. ``requests_raw`` are the undecoded read requests: equal for every layer of a chunk."""

    layer_idx: int
    layer_name: str
    requests_raw: bytes
    done_ids: tuple[str, ...]
    member: int
    ratio: int
    generation: int | None
    seq: int | None
    done_tokens: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """One request of a message that was not read, by token."""

    token: bytes
    reason: str


class ReadDone(NamedTuple):
    """A layer was handled; ``seq`` is None from a legacy Decode."""

    layer_idx: int
    seq: int | None
    refused: tuple[Refusal, ...] = ()
    also: tuple[tuple[int, int], ...] = ()
    """(layer, sequence) of further layers that were read with this one, with the same refusals."""


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """A layer could not be read as a whole."""

    layer_idx: int
    error: str
    seq: int | None


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """Prefill will not deliver these children of Decode generation ``generation``."""

    generation: int
    failures: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class StopSending:
    """Decode no longer wants these children from Prefill generation ``generation``."""

    generation: int
    tokens: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Ping:
    """Decode's heartbeat (also its own health probe): its generation and clock, echoed unchanged in ``Pong``."""

    generation: int
    clock_ns: int


@dataclass(frozen=True, slots=True)
class Pong:
    """The echo of a ``Ping`` with the echoing side's own generation."""

    generation: int
    clock_ns: int


@dataclass(frozen=True, slots=True)
class LegacyAck:
    """The raw ``ACK`` of a legacy Decode."""


FromPrefill = MfMeta | ReadyHead | PrefillFailed | Pong | Ping
FromDecode = MfAck | LegacyAck | ReadDone | ReadFailed | StopSending | Ping
