"""Bytes to validated messages. Everything here is hostile until it has passed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

from rd2h.errors import WireError
from rd2h.wire.encoding import READY_TAG_PACKED
from rd2h.wire.fields import Fields, check_token
from rd2h.wire.messages import (
    LEGACY_ACK,
    MAX_BLOCK_ID,
    MAX_FRAME_BYTES,
    MAX_JOINT_ACKS,
    MAX_REASON_CHARS,
    MAX_REQUESTS_PER_MESSAGE,
    TAG_MF_ACK,
    TAG_MF_META,
    TAG_PING,
    TAG_PONG,
    TAG_PREFILL_FAILED,
    TAG_READ_DONE,
    TAG_READ_FAILED,
    TAG_READ_READY,
    TAG_STOP_SENDING,
    BlockIds,
    FromDecode,
    FromPrefill,
    LegacyAck,
    MfAck,
    MfMeta,
    PeerInfo,
    Ping,
    Pong,
    PrefillFailed,
    ReadDone,
    ReadFailed,
    ReadRequest,
    Refusal,
    StopSending,
)
from rd2h.wire.ready import MAX_LISTS, MAX_MAPS, ReadySplitter, split_ready
from rd2h.wire.unpacking import MALFORMED, no_extension, shown, unpack

_unpackb = msgpack.unpackb
_READ_DONE_HEAD = b"\x94" + msgpack.packb(TAG_READ_DONE, use_bin_type=True)
_SHORT_BYTES = 64
_DONE_TYPES = [bytes, int, int, list]


def _unpack(payload: bytes) -> Fields:
    if len(payload) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(payload)} bytes exceeds {MAX_FRAME_BYTES}")
    values = unpack(payload, "frame", lists=MAX_LISTS, maps=MAX_MAPS, longest_list=MAX_REQUESTS_PER_MESSAGE)
    if not isinstance(values, list) or not values or not isinstance(values[0], bytes):
        raise WireError("frame is not a tuple that begins with a bin tag")
    return Fields(values[0], values)


def decode_from_prefill(payload: bytes, splitter: ReadySplitter | None = None) -> FromPrefill:
    """A message that Decode received; ``splitter``: that of its connection. Raises WireError."""
    if READY_TAG_PACKED in payload[:24]:
        return split_ready(payload) if splitter is None else splitter.split(payload)
    fields = _unpack(payload)
    if fields.tag == TAG_MF_META:
        peer = None
        if len(fields.values) > 3:
            peer = _peer_info(fields.at(3, dict, "extension map"))
        return MfMeta(fields.text(1, "session"), fields.at(2, bytes, "layer metadata"), peer)
    if fields.tag == TAG_PONG:
        return Pong(fields.unsigned(1, "generation"), fields.unsigned(2, "clock"))
    if fields.tag == TAG_PING:
        return Ping(fields.unsigned(1, "generation"), fields.unsigned(2, "clock"))
    if fields.tag == TAG_PREFILL_FAILED:
        return PrefillFailed(fields.unsigned(1, "generation"), _refusals(fields.list(2, "failures")))
    raise WireError(f"unknown tag {fields.tag[:32]!r}")


def decode_from_decode(payload: bytes) -> FromDecode:
    """A message that Prefill received. Raises WireError."""
    if payload.startswith(_READ_DONE_HEAD) and len(payload) < _SHORT_BYTES:
        # By far the most frequent one; what is unusual about it gets the full treatment below.
        values = _unpack_short(payload)
        if values is not None and list(map(type, values)) == _DONE_TYPES and not values[3] and min(values[1:3]) >= 0:
            return ReadDone(values[1], values[2])
    if payload == LEGACY_ACK:
        return LegacyAck()
    fields = _unpack(payload)
    extended = len(fields.values)
    if fields.tag == TAG_READ_DONE:
        seq = fields.unsigned(2, "sequence") if extended > 2 else None
        refused = _refusals(fields.list(3, "refusals")) if extended > 3 else ()
        also = _further_layers(fields.list(4, "further layers")) if extended > 4 else ()
        return ReadDone(fields.unsigned(1, "layer"), seq, refused, also)
    if fields.tag == TAG_READ_FAILED:
        seq = fields.unsigned(3, "sequence") if extended > 3 else None
        return ReadFailed(fields.unsigned(1, "layer"), fields.text(2, "error", 1 << 20)[:MAX_REASON_CHARS], seq)
    if fields.tag == TAG_PING:
        return Ping(fields.unsigned(1, "generation"), fields.unsigned(2, "clock"))
    if fields.tag == TAG_STOP_SENDING:
        tokens = tuple(check_token(token) for token in fields.list(2, "tokens"))
        return StopSending(fields.unsigned(1, "generation"), tokens)
    if fields.tag == TAG_MF_ACK:
        extension = _Map(TAG_MF_ACK, fields.at(1, dict, "extension map"))
        error = extension.values.get("err", "")
        if not isinstance(error, str):
            raise WireError(f"{TAG_MF_ACK!r}: 'err' must be text")
        return MfAck(
            extension.unsigned("v"), extension.unsigned("d_gen"), extension.unsigned("t"), error[:MAX_REASON_CHARS]
        )
    raise WireError(f"unknown tag {fields.tag[:32]!r}")


def _unpack_short(payload: bytes) -> list[Any] | None:
    """The value of a frame too short to be dangerous; None when it is malformed."""
    try:
        values: list[Any] = _unpackb(payload, ext_hook=no_extension)
    except MALFORMED:
        return None
    return values


def decode_read_requests(raw: bytes) -> tuple[ReadRequest, ...]:
    """The read requests that ``split_ready`` delimited. Raises WireError."""
    rows = unpack(raw, "read requests", lists=3 * MAX_REQUESTS_PER_MESSAGE + 1, maps=0)
    if not isinstance(rows, list) or len(rows) > MAX_REQUESTS_PER_MESSAGE:
        raise WireError(f"read requests must be a list of at most {MAX_REQUESTS_PER_MESSAGE}")
    return tuple(_read_request(row) for row in rows)


def _read_request(row: object) -> ReadRequest:
    if not isinstance(row, list) or (len(row) < 5 and len(row) != 2):
        raise WireError("a read request must be a tuple of 2 (legacy) or at least 5 positions")
    fields = Fields(TAG_READ_READY, row)
    main = block_ids(row[1], "main block ids")
    if len(row) == 2:
        return ReadRequest(fields.text(0, "request id"), main, main, 0, 0, None)
    return ReadRequest(
        fields.text(0, "request id"),
        main,
        block_ids(row[2], "indexer block ids"),
        fields.unsigned(3, "main start", MAX_BLOCK_ID),
        fields.unsigned(4, "indexer start", MAX_BLOCK_ID),
        fields.token(5) if len(row) > 5 else None,
    )


def block_ids(value: object, what: str) -> BlockIds:
    """A flat list of block ids as int64[n]; raises WireError for anything else."""
    if not isinstance(value, list):
        raise WireError(f"{what} must be a list, got {type(value).__name__}")
    if not value:
        return np.empty(0, np.int64)
    # NumPy would take a boolean for a number, and give every element of a mixed list the width of its longest string.
    if set(map(type, value)) != {int}:
        raise WireError(f"{what} must be whole numbers")
    try:
        array = np.array(value, np.int64)
    except OverflowError as error:
        raise WireError(f"{what} must be 0..{MAX_BLOCK_ID}") from error
    if int(array.min()) < 0 or int(array.max()) > MAX_BLOCK_ID:
        raise WireError(f"{what} must be 0..{MAX_BLOCK_ID}")
    return array


def _further_layers(rows: list[Any]) -> tuple[tuple[int, int], ...]:
    if len(rows) > MAX_JOINT_ACKS:
        raise WireError(f"{TAG_READ_DONE!r}: {len(rows)} further layers, at most {MAX_JOINT_ACKS} are allowed")
    pairs = []
    for row in rows:
        if not isinstance(row, list) or len(row) != 2:
            raise WireError(f"{TAG_READ_DONE!r}: a further layer must be (layer, sequence)")
        pair = Fields(TAG_READ_DONE, row)
        pairs.append((pair.unsigned(0, "layer"), pair.unsigned(1, "sequence")))
    return tuple(pairs)


def _refusals(rows: list[Any]) -> tuple[Refusal, ...]:
    refusals = []
    for row in rows:
        if not isinstance(row, list) or len(row) != 2 or not isinstance(row[1], str):
            raise WireError("a refusal must be (token, reason)")
        refusals.append(Refusal(check_token(row[0]), row[1][:MAX_REASON_CHARS]))
    return tuple(refusals)


@dataclass(slots=True)
class _Map:
    """Typed access to an extension map; unknown keys are ignored so that later versions may add some."""

    tag: bytes
    values: Mapping[object, object] = field(default_factory=dict)

    def unsigned(self, key: str) -> int:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
            raise WireError(f"{self.tag!r}: {key!r} must be a 64-bit unsigned number, got {shown(value)}")
        return value

    def binary(self, key: str) -> bytes:
        value = self.values.get(key)
        if not isinstance(value, bytes) or len(value) > 64:
            raise WireError(f"{self.tag!r}: {key!r} must be at most 64 bytes")
        return value


def _peer_info(values: Mapping[object, object]) -> PeerInfo:
    extension = _Map(TAG_MF_META, values)
    tp_size, tp_rank = extension.unsigned("p_tp"), extension.unsigned("p_rank")
    if tp_rank >= tp_size:
        raise WireError(f"{TAG_MF_META!r}: p_rank {tp_rank} is not below p_tp {tp_size}")
    return PeerInfo(
        extension.unsigned("v"),
        extension.unsigned("p_gen"),
        extension.binary("fp"),
        tp_size,
        tp_rank,
        extension.unsigned("p_to") if "p_to" in values else 0,
        "joint" in values and extension.unsigned("joint") > 0,
    )
