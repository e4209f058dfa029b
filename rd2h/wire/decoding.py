"""Bytes to validated messages. Everything here is hostile until it has passed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

from rd2h.errors import WireError
from rd2h.wire.encoding import READY_TAG_PACKED
from rd2h.wire.messages import (
    LEGACY_ACK,
    MAX_BLOCK_ID,
    MAX_FRAME_BYTES,
    MAX_NAME_CHARS,
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
    TOKEN_BYTES,
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
    ReadyHead,
    Refusal,
    StopSending,
)
from rd2h.wire.unpacking import MALFORMED, at_most, describe, no_extension, shown, unpack

MAX_POSITIONS = 64
"""Positions of ``read_ready_batch``; later versions may append some."""
_MAX_LISTS = MAX_REQUESTS_PER_MESSAGE + 2
_MAX_MAPS = 8
_MAX_HEAD_BYTES = 8 * MAX_NAME_CHARS
_MAX_TAIL_BYTES = 4096
"""Bounds of what is unpacked around known read requests without counting containers."""
_NEEDLE_BYTES = 24
_FIXARRAY = 0x90
_FIXARRAYS = [bytes((_FIXARRAY + count,)) for count in range(16)]
_THREE = _FIXARRAYS[3]
_unpackb = msgpack.unpackb
_READ_DONE_HEAD = b"\x94" + msgpack.packb(TAG_READ_DONE, use_bin_type=True)
_SHORT_BYTES = 64
_DONE_TYPES = [bytes, int, int, list]
_READY_TYPES = [bytes, int, str, type(None), list, int, int, int, int, list]
"""Types of the ten positions of an extended message, with the read requests left out."""


@dataclass(slots=True)
class _Fields:
    """Typed access to the positions of one decoded tuple."""

    tag: bytes
    values: Sequence[Any]

    def at(self, index: int, kind: type, what: str) -> Any:
        if index >= len(self.values):
            raise WireError(f"{self.tag!r}: {what} at position {index} is missing")
        value = self.values[index]
        if isinstance(value, bool) or not isinstance(value, kind):
            raise WireError(f"{self.tag!r}: {what} must be {kind.__name__}, got {type(value).__name__}")
        return value

    def unsigned(self, index: int, what: str, maximum: int = (1 << 64) - 1) -> int:
        value: int = self.at(index, int, what)
        if not 0 <= value <= maximum:
            raise WireError(f"{self.tag!r}: {what} must be 0..{maximum}, got {value}")
        return value

    def text(self, index: int, what: str, maximum: int = MAX_NAME_CHARS) -> str:
        value: str = self.at(index, str, what)
        if len(value) > maximum:
            raise WireError(f"{self.tag!r}: {what} is longer than {maximum} characters")
        return value

    def token(self, index: int) -> bytes:
        return check_token(self.at(index, bytes, "token"))

    def list(self, index: int, what: str) -> list[Any]:
        value: list[Any] = self.at(index, list, what)
        if len(value) > MAX_REQUESTS_PER_MESSAGE:
            raise WireError(f"{self.tag!r}: {what} has more than {MAX_REQUESTS_PER_MESSAGE} entries")
        return value


def check_token(value: object) -> bytes:
    """A child token: 16 bytes."""
    if not isinstance(value, bytes) or len(value) != TOKEN_BYTES:
        raise WireError(f"token must be {TOKEN_BYTES} bytes")
    return value


def _unpack(payload: bytes) -> _Fields:
    if len(payload) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(payload)} bytes exceeds {MAX_FRAME_BYTES}")
    values = unpack(payload, "frame", lists=_MAX_LISTS, maps=_MAX_MAPS, longest_list=MAX_REQUESTS_PER_MESSAGE)
    if not isinstance(values, list) or not values or not isinstance(values[0], bytes):
        raise WireError("frame is not a tuple that begins with a bin tag")
    return _Fields(values[0], values)


def decode_from_prefill(payload: bytes, known_requests: bytes = b"") -> FromPrefill:
    """A message that Decode received; ``known_requests`` as in ``split_ready``. Raises WireError."""
    if READY_TAG_PACKED in payload[:24]:
        return split_ready(payload, known_requests)
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
        return ReadDone(fields.unsigned(1, "layer"), seq, refused)
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


def split_ready(payload: bytes, known_requests: bytes = b"") -> ReadyHead:
    """Decode all of ``read_ready_batch`` but the read requests, which are only delimited. Raises WireError.

    ``known_requests``: the read requests of an earlier message of the same connection. The layers of a chunk repeat
    them, and a message that does is split around them without looking inside.
    """
    if len(payload) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(payload)} bytes exceeds {MAX_FRAME_BYTES}")
    split = _split_around(payload, known_requests) if known_requests else None
    count, values, requests_raw = split or _split_anew(payload)
    if count == 10 and not values[4] and not values[9] and _is_usual(values):
        _, layer_idx, layer_name, _, _, member, ratio, generation, seq, _ = values
        return ReadyHead(layer_idx, layer_name, requests_raw, (), member, ratio, generation, seq, (), True)
    fields = _Fields(TAG_READ_READY, values)
    if values[0] != TAG_READ_READY:
        raise WireError(f"unknown tag {shown(values[0])}")
    done_ids = fields.list(4, "done ids")
    if not all(isinstance(item, str) and len(item) <= MAX_NAME_CHARS for item in done_ids):
        raise WireError(f"{TAG_READ_READY!r}: done ids must be strings of at most {MAX_NAME_CHARS} characters")
    has_tp = count >= 7
    member = fields.unsigned(5, "member", MAX_BLOCK_ID) if has_tp else 0
    ratio = fields.unsigned(6, "ratio", MAX_BLOCK_ID) if has_tp else 1
    if ratio < 1 or member >= ratio:
        raise WireError(f"{TAG_READ_READY!r}: member {member} is not below ratio {ratio}")
    generation = fields.unsigned(7, "generation") if count > 7 else None
    seq = fields.unsigned(8, "sequence") if count > 8 else None
    tokens = tuple([check_token(token) for token in fields.list(9, "done tokens")]) if count > 9 else ()
    if count > 9 and len(tokens) != len(done_ids):
        raise WireError(f"{TAG_READ_READY!r}: {len(tokens)} done tokens for {len(done_ids)} done ids")
    return ReadyHead(
        fields.unsigned(1, "layer", MAX_BLOCK_ID),
        fields.text(2, "layer name"),
        requests_raw,
        tuple(done_ids),
        member,
        ratio,
        generation,
        seq,
        tokens,
        has_tp,
    )


def _is_usual(values: list[Any]) -> bool:
    """Whether ten positions are valid by a few comparisons; what is not gets the full treatment and its error text."""
    return (
        list(map(type, values)) == _READY_TYPES
        and values[0] == TAG_READ_READY
        and 0 <= values[1] <= MAX_BLOCK_ID
        and len(values[2]) <= MAX_NAME_CHARS
        and 0 <= values[5] < values[6] <= MAX_BLOCK_ID
        and values[7] >= 0
        and values[8] >= 0
    )


def _split_around(payload: bytes, known_requests: bytes) -> tuple[int, list[Any], bytes] | None:
    """(positions, values without the read requests, ``known_requests``); None when the message is not of that form.

    msgpack is a prefix code: when exactly three whole values lie before ``known_requests`` (one whole value itself) and
    exactly the remaining ones behind it, then it is the fourth.
    """
    # A short needle: looking for a long one takes longer than unpacking it.
    begin = payload.find(known_requests[:_NEEDLE_BYTES], 0, _MAX_HEAD_BYTES)
    if begin < 0 or not payload.startswith(known_requests, begin):
        return None
    count = payload[0] - _FIXARRAY
    if not 5 <= count <= 10 or len(payload) - begin - len(known_requests) > _MAX_TAIL_BYTES:
        return None
    try:
        values = _unpackb(_THREE + payload[1:begin], ext_hook=no_extension)
        tail = _unpackb(_FIXARRAYS[count - 4] + payload[begin + len(known_requests) :], ext_hook=no_extension)
    except MALFORMED:
        return None
    return count, [*values, None, *tail], known_requests


def _split_anew(payload: bytes) -> tuple[int, list[Any], bytes]:
    unpacker = msgpack.Unpacker(
        None,
        raw=False,
        use_list=True,
        max_buffer_size=MAX_FRAME_BYTES,
        max_array_len=MAX_REQUESTS_PER_MESSAGE,
        ext_hook=no_extension,
        list_hook=at_most(_MAX_LISTS, "lists in frame"),
        object_hook=at_most(_MAX_MAPS, "maps in frame"),
    )
    unpacker.feed(payload)
    try:
        count = unpacker.read_array_header()
        if not 5 <= count <= MAX_POSITIONS:
            raise WireError(f"{TAG_READ_READY!r}: {count} positions, expected 5..{MAX_POSITIONS}")
        values = [unpacker.unpack(), unpacker.unpack(), unpacker.unpack(), None]
        begin = unpacker.tell()
        unpacker.skip()
        end = unpacker.tell()
        values += [unpacker.unpack() for _ in range(min(count, 10) - 4)]
        for _ in range(count - 10):
            unpacker.skip()
        trailing = len(payload) - unpacker.tell()
    except MALFORMED as error:
        raise WireError(f"{TAG_READ_READY!r}: truncated or malformed: {describe(error)}") from error
    if trailing:
        raise WireError(f"{TAG_READ_READY!r}: {trailing} bytes follow the last position")
    return count, values, payload[begin:end]


def decode_read_requests(raw: bytes) -> tuple[ReadRequest, ...]:
    """The read requests that ``split_ready`` delimited. Raises WireError."""
    rows = unpack(raw, "read requests", lists=3 * MAX_REQUESTS_PER_MESSAGE + 1, maps=0)
    if not isinstance(rows, list) or len(rows) > MAX_REQUESTS_PER_MESSAGE:
        raise WireError(f"read requests must be a list of at most {MAX_REQUESTS_PER_MESSAGE}")
    return tuple(_read_request(row) for row in rows)


def _read_request(row: object) -> ReadRequest:
    if not isinstance(row, list) or (len(row) < 5 and len(row) != 2):
        raise WireError("a read request must be a tuple of 2 (legacy) or at least 5 positions")
    fields = _Fields(TAG_READ_READY, row)
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
    )
