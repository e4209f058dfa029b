"""Exact bytes: every vector decodes to the message it stands for and is encoded to the same bytes."""

import ast
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import msgpack
import numpy as np
import pytest

from rd2h.layout import CacheLayout, decode_layer_map, encode_layer_map
from rd2h.wire import (
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
    decode_from_decode,
    decode_from_prefill,
    decode_read_requests,
    encode_mf_ack,
    encode_mf_meta,
    encode_ping,
    encode_pong,
    encode_prefill_failed,
    encode_read_done,
    encode_read_failed,
    encode_read_requests,
    encode_ready,
    encode_stop_sending,
)

DATA = Path(__file__).resolve().parents[2] / "data"
VECTORS = {
    vector["name"]: vector
    for name in ("wire-vectors.json", "extended-wire-vectors.json")
    for vector in json.loads((DATA / name).read_text(encoding="utf-8"))["vectors"]
}
GEN_D, GEN_P = 0xD5A1_0000_0000_0001, 0xFFFF_FFFF_FFFF_FFFE
T0, T1 = bytes(range(16)), bytes(range(240, 256))
FINGERPRINT = hashlib.sha256(b"layout").digest()
LAYER = "model.layers.{}.self_attn.attn".format


def payload(name: str) -> bytes:
    return bytes.fromhex(VECTORS[name]["hex"])


def request(
    request_id: str, main: list[int], indexer: list[int], starts: tuple[int, int], token: bytes | None = None
) -> ReadRequest:
    return ReadRequest(request_id, np.array(main, np.int64), np.array(indexer, np.int64), *starts, token)


def same_request(left: ReadRequest, right: ReadRequest) -> bool:
    return (
        (left.request_id, left.main_start, left.indexer_start, left.token)
        == (right.request_id, right.main_start, right.indexer_start, right.token)
        and left.main_blocks.dtype == left.indexer_blocks.dtype == np.int64
        and left.main_blocks.tolist() == right.main_blocks.tolist()
        and left.indexer_blocks.tolist() == right.indexer_blocks.tolist()
    )


LAYER_MAP: bytes = msgpack.unpackb(bytes.fromhex(VECTORS["mf_meta"]["hex"]))[2]

# name -> (message, how it is encoded)
OTHERS: dict[str, tuple[FromPrefill | FromDecode, Callable[[], bytes]]] = {
    "mf_meta": (
        MfMeta("10.0.0.1:17001", LAYER_MAP, None),
        lambda: encode_mf_meta("10.0.0.1:17001", LAYER_MAP, None),
    ),
    "mf_meta_extended": (
        MfMeta("10.0.0.1:17001", b"\x80", PeerInfo(1, GEN_P, FINGERPRINT, 8, 5)),
        lambda: encode_mf_meta("10.0.0.1:17001", b"\x80", PeerInfo(1, GEN_P, FINGERPRINT, 8, 5)),
    ),
    "mf_meta_peer_timeout": (
        MfMeta("10.0.0.1:17001", b"\x80", PeerInfo(1, GEN_P, FINGERPRINT, 8, 5, peer_timeout_ms=20_000)),
        lambda: encode_mf_meta("10.0.0.1:17001", b"\x80", PeerInfo(1, GEN_P, FINGERPRINT, 8, 5, 20_000)),
    ),
    "mf_meta_joint": (
        MfMeta("10.0.0.1:17001", b"\x80", PeerInfo(1, GEN_P, FINGERPRINT, 8, 5, 20_000, joint_acks=True)),
        lambda: encode_mf_meta("10.0.0.1:17001", b"\x80", PeerInfo(1, GEN_P, FINGERPRINT, 8, 5, 20_000, True)),
    ),
    "ack": (LegacyAck(), lambda: b"ACK"),
    "mf_ack": (MfAck(1, GEN_D, 1234567890123456789), lambda: encode_mf_ack(GEN_D, 1234567890123456789)),
    "mf_ack_refused": (
        MfAck(1, GEN_D, 0, "layout fingerprint differs"),
        lambda: encode_mf_ack(GEN_D, 0, "layout fingerprint differs"),
    ),
    "read_done": (ReadDone(17, None), lambda: encode_read_done(17, None)),
    "read_done_extended": (ReadDone(17, 300), lambda: encode_read_done(17, 300)),
    "read_done_joint": (
        ReadDone(17, 300, (), ((18, 301), (19, 302))),
        lambda: encode_read_done(17, 300, (), [(18, 301), (19, 302)]),
    ),
    "read_done_refused": (
        ReadDone(17, 301, (Refusal(T0, "aborted"), Refusal(T1, "no such request is waiting here"))),
        lambda: encode_read_done(17, 301, [Refusal(T0, "aborted"), Refusal(T1, "no such request is waiting here")]),
    ),
    "read_failed": (
        ReadFailed(17, "memfabric batch read failed, ret=-1", None),
        lambda: encode_read_failed(17, "memfabric batch read failed, ret=-1", None),
    ),
    "read_failed_extended": (
        ReadFailed(17, "memfabric batch read failed, ret=-1", 302),
        lambda: encode_read_failed(17, "memfabric batch read failed, ret=-1", 302),
    ),
    "prefill_failed": (
        PrefillFailed(GEN_D, (Refusal(T0, "preempted at the last token"),)),
        lambda: encode_prefill_failed(GEN_D, [Refusal(T0, "preempted at the last token")]),
    ),
    "prefill_failed_none": (PrefillFailed(0, ()), lambda: encode_prefill_failed(0, [])),
    "stop_sending": (StopSending(GEN_P, (T0, T1)), lambda: encode_stop_sending(GEN_P, [T0, T1])),
    "ping": (Ping(GEN_D, 1234567890123456789), lambda: encode_ping(GEN_D, 1234567890123456789)),
    "pong": (Pong(GEN_P, 1234567890123456789), lambda: encode_pong(GEN_P, 1234567890123456789)),
}

# name -> (read requests, the rest of the message as keywords of ReadyHead)
READY: dict[str, tuple[list[ReadRequest], dict[str, object]]] = {
    "read_ready_batch": (
        [
            request("cmpl-1b9d6bcd-0", [3, 4, 5, 9], [3, 4, 5, 9], (0, 0)),
            request("cmpl-1b9d6bcd-1", [70000, 255, 256], [1, 2, 3], (128, 128)),
        ],
        {"layer_idx": 0, "layer_name": LAYER(0), "done_ids": ("cmpl-1b9d6bcd-0",), "member": 1, "ratio": 2},
    ),
    "read_ready_batch_main_only": (
        [request("chatcmpl-77", [7], [], (2, 0))],
        {"layer_idx": 1, "layer_name": LAYER(1)},
    ),
    "read_ready_batch_done_only": ([], {"layer_idx": 60, "layer_name": LAYER(60), "done_ids": ("chatcmpl-77",)}),
    "read_ready_batch_extended": (
        [
            request("cmpl-1b9d6bcd-0", [3, 4, 5, 9], [3, 4], (0, 2), T0),
            request("cmpl-1b9d6bcd-1", [70000, 255, 2**31 - 1], [], (128, 0), T1),
        ],
        {
            "layer_idx": 0,
            "layer_name": LAYER(0),
            "done_ids": ("cmpl-1b9d6bcd-0",),
            "member": 1,
            "ratio": 2,
            "generation": GEN_D,
            "seq": 2**32,
            "done_tokens": (T0,),
        },
    ),
    "read_ready_batch_extended_done_only": (
        [],
        {
            "layer_idx": 60,
            "layer_name": LAYER(60),
            "done_ids": ("chatcmpl-77", "chatcmpl-78"),
            "generation": GEN_D,
            "seq": 7,
            "done_tokens": (T0, T1),
        },
    ),
    "read_ready_batch_extended_empty_member": (
        [request("chatcmpl-77", [], [], (0, 0), T0)],
        {"layer_idx": 3, "layer_name": "mtp.0.self_attn.attn", "member": 3, "ratio": 4, "generation": GEN_D, "seq": 8},
    ),
}
READY_DEFAULTS: dict[str, object] = {
    "done_ids": (),
    "member": 0,
    "ratio": 1,
    "generation": None,
    "seq": None,
    "done_tokens": (),
}


def ready_head(requests_raw: bytes, fields: dict[str, object]) -> ReadyHead:
    return ReadyHead(requests_raw=requests_raw, **{**READY_DEFAULTS, **fields})  # type: ignore[arg-type]


def test_no_vector_is_left_out() -> None:
    assert set(VECTORS) == set(OTHERS) | set(READY) | {"read_ready_batch_legacy_5"}


@pytest.mark.parametrize("name", sorted(set(VECTORS) - {"ack"}))
def test_the_vector_itself_says_what_its_bytes_say(name: str) -> None:
    assert msgpack.packb(ast.literal_eval(VECTORS[name]["value"]), use_bin_type=True) == payload(name)


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_message(name: str) -> None:
    message, encode = OTHERS[name]
    decode = decode_from_prefill if VECTORS[name]["direction"] == "P->D" else decode_from_decode
    assert decode(payload(name)) == message
    assert encode() == payload(name)


@pytest.mark.parametrize("name", sorted(READY))
def test_ready_message(name: str) -> None:
    requests, fields = READY[name]
    requests_raw = encode_read_requests(requests)
    head = ready_head(requests_raw, fields)
    assert decode_from_prefill(payload(name)) == head
    decoded = decode_read_requests(requests_raw)
    assert len(decoded) == len(requests)
    assert all(same_request(left, right) for left, right in zip(decoded, requests, strict=True))
    extension = None if head.generation is None or head.seq is None else (head.generation, head.seq, head.done_tokens)
    encoded = encode_ready(
        head.layer_idx, head.layer_name, requests_raw, head.done_ids, head.member, head.ratio, extension
    )
    assert encoded == payload(name)


def test_ready_message_of_five_positions() -> None:
    head = decode_from_prefill(payload("read_ready_batch_legacy_5"))
    assert isinstance(head, ReadyHead)
    assert head == ready_head(head.requests_raw, {"layer_idx": 0, "layer_name": LAYER(0)})
    (only,) = decode_read_requests(head.requests_raw)
    assert same_request(only, request("chatcmpl-77", [1, 2, 3], [1, 2, 3], (0, 0)))


def test_requests_for_a_legacy_decode_carry_no_token() -> None:
    raw = encode_read_requests([request("a", [1], [2], (0, 0), T0)], legacy_ids=True)
    assert msgpack.unpackb(raw) == [["a", [1], [2], 0, 0]]


def test_later_versions_may_append() -> None:
    """What an extended peer of a later version appends is skipped, whatever it is."""
    for name in ("read_ready_batch_extended", "ping", "pong", "stop_sending", "prefill_failed", "mf_meta_extended"):
        decode = decode_from_prefill if VECTORS[name]["direction"] == "P->D" else decode_from_decode
        values = msgpack.unpackb(payload(name))
        later = msgpack.packb([*values, {"new": [1, None, True]}, -1])
        left, right = decode(later), decode(payload(name))
        assert left == right
    with_key = msgpack.unpackb(payload("mf_ack"))
    with_key[1]["new"] = [None]
    assert decode_from_decode(msgpack.packb(with_key)) == decode_from_decode(payload("mf_ack"))


def test_layer_map_of_the_vector() -> None:
    layers = decode_layer_map(LAYER_MAP)
    first, second = (layers[LAYER(index)] for index in (0, 1))
    assert [tensor.block_bytes for tensor in first.tensors] == [0x20000, 0x4000, 0x4000]
    assert [tensor.base_addr for tensor in first.main] == [0x7F544A44C000, 0x7F5485DF8A00]
    assert first.indexer is not None
    assert first.indexer.base_addr == 0x7F54C17A5400
    assert first.scale is None
    # block_len is multiplied by block_size_scale, which is 2 in the second layer
    assert [tensor.block_bytes for tensor in second.main] == [0x20000, 0x4000]
    assert second.indexer is second.scale is None


def test_layer_map_is_encoded_like_the_vector() -> None:
    layers = decode_layer_map(LAYER_MAP)
    first = layers[LAYER(0)]
    expected = msgpack.unpackb(LAYER_MAP)
    assert encode_layer_map(CacheLayout((first,))) == msgpack.packb({LAYER(0): expected[LAYER(0)]})
