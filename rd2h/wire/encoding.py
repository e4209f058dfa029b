"""Messages to bytes."""

from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from rd2h.wire.messages import (
    MAX_REASON_CHARS,
    TAG_MF_ACK,
    TAG_MF_META,
    TAG_PING,
    TAG_PONG,
    TAG_PREFILL_FAILED,
    TAG_READ_DONE,
    TAG_READ_FAILED,
    TAG_READ_READY,
    TAG_STOP_SENDING,
    WIRE_VERSION,
    PeerInfo,
    ReadRequest,
    Refusal,
)

# One packer for all threads: a call never gives up the interpreter lock, for messages hold no foreign objects.
_pack: Callable[[object], bytes] = msgpack.Packer(use_bin_type=True).pack


READY_TAG_PACKED = _pack(TAG_READ_READY)


def encode_mf_meta(session: str, encoded_layers: bytes, peer: PeerInfo | None) -> bytes:
    """``mf_meta``; with ``peer`` None the three legacy positions."""
    if peer is None:
        return _pack((TAG_MF_META, session, encoded_layers))
    extension = {
        "v": peer.version,
        "p_gen": peer.generation,
        "fp": peer.fingerprint,
        "p_tp": peer.tp_size,
        "p_rank": peer.tp_rank,
    }
    if peer.peer_timeout_ms:
        extension["p_to"] = peer.peer_timeout_ms
    if peer.joint_acks:
        extension["joint"] = 1
    return _pack((TAG_MF_META, session, encoded_layers, extension))


def encode_mf_ack(generation: int, clock_ns: int, error: str = "") -> bytes:
    """Answer to an extended ``mf_meta``; with ``error`` Decode refuses to read from this Prefill."""
    extension: dict[str, Any] = {"v": WIRE_VERSION, "d_gen": generation, "t": clock_ns}
    if error:
        extension["err"] = error[:MAX_REASON_CHARS]
    return _pack((TAG_MF_ACK, extension))


def encode_read_requests(requests: Sequence[ReadRequest], *, legacy_ids: bool = False) -> bytes:
    """The ``read_reqs`` position, encoded once for a chunk and spliced into every layer's message.

    ``legacy_ids`` leaves out the tokens, for a Decode that does not know them.
    """
    rows: list[tuple[Any, ...]] = []
    for request in requests:
        row = (
            request.request_id,
            request.main_blocks.tolist(),
            request.indexer_blocks.tolist(),
            request.main_start,
            request.indexer_start,
        )
        rows.append(row if legacy_ids or request.token is None else (*row, request.token))
    return _pack(rows)


def encode_ready(
    layer_idx: int,
    layer_name: str,
    requests_raw: bytes,
    done_ids: Sequence[str],
    member: int,
    ratio: int,
    extension: tuple[int, int, Sequence[bytes]] | None = None,
) -> bytes:
    """``read_ready_batch`` around already encoded read requests; ``extension`` = (Decode generation, seq, tokens)."""
    # Packed as two tuples whose one-byte headers make room for the header of the whole.
    head = _pack((TAG_READ_READY, layer_idx, layer_name))[1:]
    if extension is None:
        return b"".join((b"\x97", head, requests_raw, _pack((done_ids, member, ratio))[1:]))
    generation, seq, tokens = extension
    tail = _pack((done_ids, member, ratio, generation, seq, tokens))[1:]
    return b"".join((b"\x9a", head, requests_raw, tail))


def encode_read_done(
    layer_idx: int, seq: int | None, refused: Sequence[Refusal] = (), also: Sequence[tuple[int, int]] = ()
) -> bytes:
    """``read_done``; ``seq`` None gives the two legacy positions. ``also`` only for a Prefill with ``joint_acks``."""
    if seq is None:
        return _pack((TAG_READ_DONE, layer_idx))
    refusals = [(r.token, r.reason) for r in refused]
    return _pack((TAG_READ_DONE, layer_idx, seq, refusals, also) if also else (TAG_READ_DONE, layer_idx, seq, refusals))


def encode_read_failed(layer_idx: int, error: str, seq: int | None) -> bytes:
    """``read_failed``; ``seq`` None gives the three legacy positions."""
    error = error[:MAX_REASON_CHARS]
    if seq is None:
        return _pack((TAG_READ_FAILED, layer_idx, error))
    return _pack((TAG_READ_FAILED, layer_idx, error, seq))


def encode_prefill_failed(generation: int, failures: Sequence[Refusal]) -> bytes:
    """``prefill_failed`` to the Decode of ``generation``."""
    return _pack((TAG_PREFILL_FAILED, generation, [(f.token, f.reason[:MAX_REASON_CHARS]) for f in failures]))


def encode_stop_sending(generation: int, tokens: Sequence[bytes]) -> bytes:
    """``stop_sending`` to the Prefill of ``generation``."""
    return _pack((TAG_STOP_SENDING, generation, list(tokens)))


def encode_ping(generation: int, clock_ns: int) -> bytes:
    """Decode's heartbeat."""
    return _pack((TAG_PING, generation, clock_ns))


def encode_pong(generation: int, clock_ns: int) -> bytes:
    """Prefill's echo."""
    return _pack((TAG_PONG, generation, clock_ns))
