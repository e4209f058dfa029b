"""Frames for tests of the codec: valid ones, ways to break them, and what a decoded message must look like."""

import json
import random
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from rd2h.wire import (
    MAX_BLOCK_ID,
    MAX_JOINT_ACKS,
    MAX_NAME_CHARS,
    MAX_REASON_CHARS,
    MAX_REQUESTS_PER_MESSAGE,
    TOKEN_BYTES,
    FromDecode,
    FromPrefill,
    LegacyAck,
    MfAck,
    MfMeta,
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

DATA = Path(__file__).resolve().parents[2] / "data"
U64 = (1 << 64) - 1


def vector_payloads(direction: str) -> list[bytes]:
    """Payloads of all vectors of one direction ("P->D" or "D->P")."""
    return [
        bytes.fromhex(vector["hex"])
        for name in ("wire-vectors.json", "extended-wire-vectors.json")
        for vector in json.loads((DATA / name).read_text(encoding="utf-8"))["vectors"]
        if vector["direction"] == direction
    ]


def nested(depth: int, opener: bytes = b"\x91") -> bytes:
    """A value that is ``depth`` containers deep."""
    return opener * depth + b"\xc0"


# Headers that promise far more than follows: str, bin, array and map of 2^32-1, ext of 2^32-1, str of 16 Mi.
HUGE_HEADERS = [
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\xdb\x00\xff\xff\xff",
    b"\xdd\x00\xff\xff\xff",
    b"\xdc\xff\xff",
    b"\xc1",
]

HOSTILE_VALUES: list[Any] = [
    True,
    False,
    None,
    -1,
    0,
    1,
    255,
    -(1 << 63),
    (1 << 31) - 1,
    1 << 31,
    (1 << 63) - 1,
    1 << 63,
    U64,
    0.0,
    1.0,
    float("nan"),
    float("inf"),
    "",
    "x",
    "x" * 2000,
    "\x00",
    b"",
    b"x",
    bytes(15),
    bytes(16),
    bytes(17),
    bytes(100),
    [],
    [[]],
    [True],
    [1, True],
    [1.0],
    [1, "x"],
    [b"x" * 16],
    [[bytes(16), "reason"]],
    [["id", [1], [2], 0, 0]],
    {},
    {"v": 1},
    {"v": True, "d_gen": 1, "t": 1, "p_gen": 1, "p_tp": 1, "p_rank": 0, "fp": b""},
    {b"v": 1},
    msgpack.ExtType(1, b"1234"),
    msgpack.Timestamp(1, 1),
]


def change_structure(source: random.Random, value: Any) -> Any:
    """Replace, drop, repeat or add something somewhere in an unpacked message."""
    if isinstance(value, list) and value and source.random() < 0.85:
        index = source.randrange(len(value))
        kind = source.randrange(8)
        if kind == 0:
            return value[:index] + value[index + 1 :]
        if kind == 1:
            return [*value[:index], source.choice(HOSTILE_VALUES), *value[index:]]
        if kind == 2:
            return value[: index + 1] * source.randrange(1, 4)
        return [*value[:index], change_structure(source, value[index]), *value[index + 1 :]]
    if isinstance(value, dict) and value and source.random() < 0.85:
        key = source.choice(list(value))
        changed = dict(value)
        if source.random() < 0.2:
            del changed[key]
        else:
            changed[key] = change_structure(source, value[key])
        return changed
    return source.choice(HOSTILE_VALUES)


def change_bytes(source: random.Random, payload: bytes, others: list[bytes]) -> bytes:
    """Truncate, flip, overwrite, splice or inflate a frame."""
    kind = source.randrange(7)
    if not payload:
        return source.randbytes(source.randrange(40))
    at = source.randrange(len(payload))
    if kind == 0:
        return payload[:at]
    if kind == 1:
        return payload[:at] + bytes((payload[at] ^ (1 << source.randrange(8)),)) + payload[at + 1 :]
    if kind == 2:
        return payload[:at] + source.randbytes(source.randrange(1, 6)) + payload[at + source.randrange(6) :]
    if kind == 3:
        other = source.choice(others)
        return payload[:at] + other[source.randrange(len(other)) :]
    if kind == 4:
        return payload[:at] + source.choice(HUGE_HEADERS) + payload[at + source.randrange(2) :]
    if kind == 5:
        opener = source.choice([b"\x91", b"\x92", b"\x81\xa1a", b"\xdc\x00\x01", b"\xdd\x00\xff\xff\xff"])
        return payload[:at] + nested(source.choice([1, 10, 600, 1500]), opener) + payload[at + 1 :]
    return payload + source.randbytes(source.randrange(1, 5))


def mutate(source: random.Random, seeds: list[bytes]) -> bytes:
    """One broken frame out of ``seeds``; a few stay valid."""
    payload = source.choice(seeds)
    if source.random() < 0.5:
        try:
            value = msgpack.unpackb(payload)
        except ValueError:
            value = [payload]
        for _ in range(source.randrange(1, 4)):
            value = change_structure(source, value)
        payload = msgpack.packb(value)
        if source.random() < 0.7:
            return payload
    for _ in range(source.randrange(1, 4)):
        payload = change_bytes(source, payload, seeds)
    return payload


# --- what a decoded message must look like ---


def is_unsigned(value: object, maximum: int = U64) -> bool:
    return type(value) is int and 0 <= value <= maximum


def is_token(value: object) -> bool:
    return type(value) is bytes and len(value) == TOKEN_BYTES


def is_text(value: object, maximum: int = MAX_NAME_CHARS) -> bool:
    return type(value) is str and len(value) <= maximum


def are_refusals(values: object) -> bool:
    return isinstance(values, tuple) and all(
        type(r) is Refusal and is_token(r.token) and is_text(r.reason, MAX_REASON_CHARS) for r in values
    )


def is_sane_request(request: ReadRequest) -> bool:
    """Types and ranges of one decoded read request."""
    return (
        is_text(request.request_id)
        and all(
            blocks.dtype == np.int64
            and blocks.ndim == 1
            and (blocks.size == 0 or 0 <= blocks.min() <= blocks.max() <= MAX_BLOCK_ID)
            for blocks in (request.main_blocks, request.indexer_blocks)
        )
        and is_unsigned(request.main_start, MAX_BLOCK_ID)
        and is_unsigned(request.indexer_start, MAX_BLOCK_ID)
        and (request.token is None or is_token(request.token))
    )


def is_sane(message: FromPrefill | FromDecode) -> bool:
    """Types and ranges of one decoded message."""
    match message:
        case ReadyHead():
            return (
                is_unsigned(message.layer_idx, MAX_BLOCK_ID)
                and is_text(message.layer_name)
                and type(message.requests_raw) is bytes
                and len(message.done_ids) <= MAX_REQUESTS_PER_MESSAGE
                and all(is_text(external) for external in message.done_ids)
                and is_unsigned(message.member, MAX_BLOCK_ID)
                and is_unsigned(message.ratio, MAX_BLOCK_ID)
                and message.member < message.ratio
                and (message.generation is None or is_unsigned(message.generation))
                and (message.seq is None or is_unsigned(message.seq))
                and all(is_token(token) for token in message.done_tokens)
                and len(message.done_tokens) in (0, len(message.done_ids))
            )
        case MfMeta(session=session, encoded_layers=layers, peer=peer):
            return (
                is_text(session)
                and type(layers) is bytes
                and (
                    peer is None
                    or (
                        all(is_unsigned(v) for v in (peer.version, peer.generation, peer.tp_size, peer.tp_rank))
                        and peer.tp_rank < peer.tp_size
                        and type(peer.fingerprint) is bytes
                        and len(peer.fingerprint) <= 64
                    )
                )
            )
        case Pong(generation=generation, clock_ns=clock) | Ping(generation=generation, clock_ns=clock):
            return is_unsigned(generation) and is_unsigned(clock)
        case PrefillFailed(generation=generation, failures=failures):
            return is_unsigned(generation) and are_refusals(failures)
        case ReadDone(layer_idx=layer, seq=seq, refused=refused, also=also):
            joint = len(also) <= MAX_JOINT_ACKS and all(len(pair) == 2 and all(map(is_unsigned, pair)) for pair in also)
            return is_unsigned(layer) and (seq is None or is_unsigned(seq)) and are_refusals(refused) and joint
        case ReadFailed(layer_idx=layer, error=error, seq=seq):
            return is_unsigned(layer) and is_text(error, MAX_REASON_CHARS) and (seq is None or is_unsigned(seq))
        case StopSending(generation=generation, tokens=tokens):
            return is_unsigned(generation) and all(is_token(token) for token in tokens)
        case MfAck(version=version, generation=generation, clock_ns=clock, error=error):
            return all(is_unsigned(v) for v in (version, generation, clock)) and is_text(error, MAX_REASON_CHARS)
        case LegacyAck():
            return True
    return False
