"""Any message that we may send is understood as it was meant, for all values the protocol allows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rd2h.wire import (
    MAX_BLOCK_ID,
    MAX_REASON_CHARS,
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

COMMON = settings(deadline=None, max_examples=150)
u64 = st.integers(0, 2**64 - 1)
u31 = st.integers(0, MAX_BLOCK_ID)
tokens = st.binary(min_size=16, max_size=16)
# Surrogates cannot be encoded; everything else may occur in a name that a client chose.
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
refusals = st.lists(st.builds(Refusal, tokens, names), max_size=4)
ids = st.lists(u31, max_size=30)


@COMMON
@given(names, st.binary(max_size=50), st.none() | st.tuples(u64, u64, st.binary(max_size=64), u64, u64))
def test_mf_meta(session: str, layers: bytes, peer: tuple[int, int, bytes, int, int] | None) -> None:
    info = None
    if peer is not None:
        version, generation, fingerprint, size, rank = peer
        size = max(size, 1)
        info = PeerInfo(version, generation, fingerprint, size, rank % size)
    assert decode_from_prefill(encode_mf_meta(session, layers, info)) == MfMeta(session, layers, info)


@COMMON
@given(u64, u64, names)
def test_small_messages(generation: int, clock: int, error: str) -> None:
    assert decode_from_decode(encode_mf_ack(generation, clock, error)) == MfAck(1, generation, clock, error)
    # Decode's heartbeat to Prefill, and its own health probe at its own socket.
    for decode in (decode_from_decode, decode_from_prefill):
        assert decode(encode_ping(generation, clock)) == Ping(generation, clock)
    assert decode_from_prefill(encode_pong(generation, clock)) == Pong(generation, clock)


@COMMON
@given(u64, st.none() | u64, names, refusals)
def test_replies(layer: int, seq: int | None, error: str, refused: list[Refusal]) -> None:
    expected = () if seq is None else tuple(refused)
    assert decode_from_decode(encode_read_done(layer, seq, refused)) == ReadDone(layer, seq, expected)
    assert decode_from_decode(encode_read_failed(layer, error, seq)) == ReadFailed(layer, error, seq)


@COMMON
@given(u64, u64, refusals, st.lists(st.tuples(u64, u64), max_size=8))
def test_joint_replies(layer: int, seq: int, refused: list[Refusal], also: list[tuple[int, int]]) -> None:
    assert decode_from_decode(encode_read_done(layer, seq, refused, also)) == ReadDone(
        layer, seq, tuple(refused), tuple(also)
    )


@COMMON
@given(u64, refusals, st.lists(tokens, max_size=5))
def test_notices(generation: int, failures: list[Refusal], stopped: list[bytes]) -> None:
    assert decode_from_prefill(encode_prefill_failed(generation, failures)) == PrefillFailed(
        generation, tuple(failures)
    )
    assert decode_from_decode(encode_stop_sending(generation, stopped)) == StopSending(generation, tuple(stopped))


@COMMON
@given(
    st.lists(st.tuples(names, ids, ids, u31, u31, st.none() | tokens), max_size=4),
    u31,
    names,
    st.lists(st.tuples(names, tokens), max_size=3),
    u31,
    st.integers(1, MAX_BLOCK_ID),
    st.none() | st.tuples(u64, u64),
)
def test_ready(
    rows: list[tuple[str, list[int], list[int], int, int, bytes | None]],
    layer: int,
    name: str,
    done: list[tuple[str, bytes]],
    member: int,
    ratio: int,
    generation_and_seq: tuple[int, int] | None,
) -> None:
    member %= ratio
    raw = encode_read_requests(
        [ReadRequest(r[0], np.array(r[1], np.int64), np.array(r[2], np.int64), *r[3:]) for r in rows]
    )
    done_ids = tuple(external for external, _ in done)
    done_tokens = tuple(token for _, token in done)
    extension = None if generation_and_seq is None else (*generation_and_seq, done_tokens)
    head = decode_from_prefill(encode_ready(layer, name, raw, done_ids, member, ratio, extension))
    generation, seq = generation_and_seq or (None, None)
    tokens = done_tokens if extension else ()
    assert head == ReadyHead(layer, name, raw, done_ids, member, ratio, generation, seq, tokens)
    decoded = decode_read_requests(raw)
    assert [
        (r.request_id, r.main_blocks.tolist(), r.indexer_blocks.tolist(), r.main_start, r.indexer_start, r.token)
        for r in decoded
    ] == rows


def test_long_reasons_are_cut_so_that_the_message_is_still_understood() -> None:
    long, token = "x" * 100_000, bytes(16)
    done = decode_from_decode(encode_read_done(1, 1, [Refusal(token, "y")]))
    failed = decode_from_decode(encode_read_failed(1, long, 1))
    refused = decode_from_decode(encode_mf_ack(1, 1, long))
    gone = decode_from_prefill(encode_prefill_failed(1, [Refusal(token, long)]))
    assert isinstance(done, ReadDone)
    assert isinstance(failed, ReadFailed)
    assert isinstance(refused, MfAck)
    assert isinstance(gone, PrefillFailed)
    assert len(failed.error) == len(refused.error) == len(gone.failures[0].reason) == MAX_REASON_CHARS
