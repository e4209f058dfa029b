"""Attacks on what is remembered of a connection's messages, and on joint acknowledgements at their limits."""

import tracemalloc

import msgpack
import pytest
from core_pull import PEER, PREFILL, Pull

from rd2h.decode.router import Received
from rd2h.decode.steps import Answer
from rd2h.errors import WireError
from rd2h.layout import encode_layer_map
from rd2h.wire import (
    MAX_JOINT_ACKS,
    MAX_REQUESTS_PER_MESSAGE,
    TOKEN_BYTES,
    PeerInfo,
    ReadDone,
    ReadFailed,
    ReadySplitter,
    Refusal,
    decode_from_decode,
    encode_mf_meta,
    encode_read_done,
    encode_read_requests,
    encode_ready,
)

TAG = b"read_ready_batch"
TOKEN = bytes(TOKEN_BYTES)


def frame(*positions: object) -> bytes:
    return msgpack.packb((TAG, *positions))


def test_a_frame_that_lacks_positions_is_malformed_though_all_it_has_is_known() -> None:
    """A connection may begin with a message that ends something: its layer is known then, the usual ending is not."""
    splitter = ReadySplitter()
    splitter.split(frame(3, "layer", [], ["done"], 0, 1, 7, 5, [TOKEN]))
    short = b"\x9a" + frame(3, "layer", [], 6, [])[1:]
    with pytest.raises(WireError):
        splitter.split(short)


@pytest.mark.parametrize("layer", [0, 0x90, 0x9090, 16])
@pytest.mark.parametrize("name", ["layer", "\x10", "\x10\x00\x01\x07\x05\x10", "é" * 20])
def test_read_requests_whose_bytes_stand_everywhere(layer: int, name: str) -> None:
    """The shortest read requests are one byte, which may occur in the layer's number and name as well."""
    splitter = ReadySplitter()
    payloads = [frame(layer, name, [], [], 0, 1, 7, seq, []) for seq in (0x90, 0x10, 1, 0x9090, 0x90909090)]
    for payload in payloads * 2:
        assert splitter.split(payload) == ReadySplitter().split(payload)


def test_trailing_and_doubled_endings_are_malformed() -> None:
    splitter = ReadySplitter()
    usual = frame(3, "layer", [], [], 0, 1, 7, 5, [])
    splitter.split(usual)
    for wrong in (usual + b"\x90", usual[:-1] + b"\x05\x90", usual[:-2] + b"\x90", usual[:-1], usual[:-1] + b"\xc0"):
        with pytest.raises(WireError):
            splitter.split(wrong)
        assert splitter.split(usual).seq == 5


def test_the_most_refusals_and_the_most_layers_fit_into_one_answer() -> None:
    refusals = [Refusal(TOKEN, "")] * MAX_REQUESTS_PER_MESSAGE
    also = tuple((layer, layer) for layer in range(MAX_JOINT_ACKS))
    answer = decode_from_decode(encode_read_done(0, 0, refusals, also))
    assert isinstance(answer, ReadDone)
    assert (len(answer.refused), answer.also) == (MAX_REQUESTS_PER_MESSAGE, also)


def test_nothing_is_remembered_of_a_connection_whose_metadata_was_refused() -> None:
    """Anybody can connect, by the thousand; only what a Prefill in good standing sends is worth memory."""
    pull = Pull()
    stranger = b"stranger"
    meta = encode_mf_meta("session", encode_layer_map(pull.source), PeerInfo(0, PREFILL, b"", 1, 0))
    connection, _ = pull.book.accept(Received(stranger, meta, "127.0.0.1"), 0.0, 0)
    assert connection is not None
    while (step := pull.book.next_step(connection, 0.0, 1)) is not None:
        assert isinstance(step, Answer)
        assert step.open_session is None
    size = 1 << 20
    tracemalloc.start()
    try:
        for seq in range(1, 6):
            requests = msgpack.packb([["x", [seq] * size, [], 0, 0, bytes([seq]) * TOKEN_BYTES]])
            payload = encode_ready(0, "l.0", requests, (), 0, 1, (7, seq, ()))
            pull.book.accept(Received(stranger, payload), 0.0, 1)
            (reply,) = pull.replies(pull.book.next_step(connection, 0.0, 1))
            assert isinstance(reply, ReadFailed)
            assert pull.book.next_step(connection, 0.0, 1) is None
        del requests, payload
        assert tracemalloc.get_traced_memory()[0] < size / 2
    finally:
        tracemalloc.stop()


def test_what_is_remembered_of_one_connection_is_bounded() -> None:
    """Names of layers, real or not, and read requests of the last message."""
    splitter = ReadySplitter()
    requests = encode_read_requests([])
    tracemalloc.start()
    try:
        for number in range(5000):
            splitter.split(encode_ready(number, f"{number:0480d}", requests, (), 0, 1, (7, number, ())))
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


def test_bytes_of_one_connection_are_not_recognised_on_another() -> None:
    """Each has a splitter of its own: what one validated says nothing about another."""
    pull = Pull()
    pull.ready(0)
    task = pull.read()
    pull.finish(task)
    other, _ = pull.book.accept(
        Received(b"other", encode_mf_meta("s", encode_layer_map(pull.source), PeerInfo(1, PREFILL, b"", 1, 0)), "h"),
        0.0,
        0,
    )
    assert other is not None
    assert other.splitter is not pull.connection.splitter
    assert other.splitter.recognise(frame(0, "l.0", [], [], 0, 1, 7, 5, [])) is None
    assert pull.book.connections[PEER] is pull.connection
