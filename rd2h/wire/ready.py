"""The message of the hot path, ``read_ready_batch``, split into its positions; read requests are only delimited.

The layers of a chunk repeat its read requests, the chunks of a connection repeat the names of the layers, and most
messages end in the same bytes but for their number. ``ReadySplitter`` remembers what it has validated of a connection
and recognises it by comparing bytes. msgpack is a prefix code: whole values that are followed by whole values are
those values wherever they stand, so what is recognised means what it meant when it was validated.
"""

from typing import Any

import msgpack

from rd2h.errors import WireError
from rd2h.wire.fields import Fields, check_token
from rd2h.wire.messages import (
    MAX_BLOCK_ID,
    MAX_FRAME_BYTES,
    MAX_JOINT_ACKS,
    MAX_NAME_CHARS,
    MAX_REQUESTS_PER_MESSAGE,
    TAG_READ_READY,
    ReadyHead,
)
from rd2h.wire.unpacking import MALFORMED, at_most, describe, no_extension, shown

MAX_POSITIONS = 64
"""Positions of ``read_ready_batch``; later versions may append some."""
MAX_LISTS = MAX_REQUESTS_PER_MESSAGE + MAX_JOINT_ACKS + 3
"""Those of the largest ``read_done``: the whole, its refusals and further layers, and each of these."""
MAX_MAPS = 8
MAX_KNOWN_LAYERS = 256
"""Layer names that a splitter remembers; others, and very long ones, are decoded each time."""
_MAX_HEAD_BYTES = 512
_NEEDLE_BYTES = 24
_EMPTY_LIST = 0x90
_TEN = b"\x9a"
_unpackb = msgpack.unpackb


class ReadySplitter:
    """Splits the ready messages of one connection, in the order in which they come. Not thread-safe.

    Remembers one chunk's read requests, ``MAX_KNOWN_LAYERS`` layers and one ending.
    """

    __slots__ = ("_ending", "_layers", "_needle", "_requests", "_tail")

    def __init__(self) -> None:
        self._requests = b""
        self._needle = b""
        self._layers: dict[bytes, tuple[int, str]] = {}
        """(layer, name) by the bytes before the read requests of a message of ten positions."""
        self._ending = b""
        """Bytes between read requests and sequence: no done ids, member, ratio, generation."""
        self._tail = (0, 1, 0)
        """Member, ratio, generation as in ``_ending``."""

    def split(self, payload: bytes) -> ReadyHead:
        """All of the message but the read requests. Raises WireError."""
        if len(payload) > MAX_FRAME_BYTES:
            raise WireError(f"frame of {len(payload)} bytes exceeds {MAX_FRAME_BYTES}")
        return self.recognise(payload) or self._split_anew(payload)

    def recognise(self, payload: bytes) -> ReadyHead | None:
        """A message of which only the sequence is new; None when it is not of this form."""
        requests = self._requests
        # A short needle: looking for a long one takes longer than decoding.
        begin = payload.find(self._needle, 0, _MAX_HEAD_BYTES)
        layer = self._layers.get(payload[:begin]) if begin > 0 else None
        ending = self._ending
        if layer is None or not ending or not payload.startswith(requests, begin):
            return None
        end = begin + len(requests)
        number = end + len(ending)
        if not payload.startswith(ending, end) or payload[-1] != _EMPTY_LIST or len(payload) > number + 10:
            return None
        try:
            seq = _unpackb(payload[number:-1])
        except MALFORMED:
            return None
        if type(seq) is not int or seq < 0:
            return None
        return ReadyHead(layer[0], layer[1], requests, (), *self._tail, seq, ())

    def _split_anew(self, payload: bytes) -> ReadyHead:
        count, values, begin, end = _positions(payload)
        requests = payload[begin:end]
        if requests == self._requests:
            requests = self._requests  # one object, which later comparisons find quickly
        head = _validated(count, values, requests)
        self._requests, self._needle = requests, requests[:_NEEDLE_BYTES]
        if payload.startswith(_TEN) and begin <= _MAX_HEAD_BYTES - _NEEDLE_BYTES:
            if len(self._layers) < MAX_KNOWN_LAYERS:
                self._layers[payload[:begin]] = (head.layer_idx, head.layer_name)
            if not head.done_ids and not head.done_tokens and head.generation is not None:
                ending = msgpack.packb(((), head.member, head.ratio, head.generation))[1:]
                if payload.startswith(ending, end):
                    self._ending, self._tail = ending, (head.member, head.ratio, head.generation)
        return head


def split_ready(payload: bytes) -> ReadyHead:
    """A message by itself. Raises WireError."""
    return ReadySplitter().split(payload)


def _positions(payload: bytes) -> tuple[int, list[Any], int, int]:
    """(positions, their values without the read requests, where those begin and end)."""
    unpacker = msgpack.Unpacker(
        None,
        raw=False,
        use_list=True,
        max_buffer_size=MAX_FRAME_BYTES,
        max_array_len=MAX_REQUESTS_PER_MESSAGE,
        ext_hook=no_extension,
        list_hook=at_most(MAX_LISTS, "lists in frame"),
        object_hook=at_most(MAX_MAPS, "maps in frame"),
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
    return count, values, begin, end


def _validated(count: int, values: list[Any], requests: bytes) -> ReadyHead:
    fields = Fields(TAG_READ_READY, values)
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
        requests,
        tuple(done_ids),
        member,
        ratio,
        generation,
        seq,
        tokens,
    )
