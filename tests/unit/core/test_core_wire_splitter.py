"""What a splitter remembers of a connection makes ready messages cheap and never changes what they mean."""

import random

import msgpack
import pytest
from core_frames import mutate, vector_payloads

from rd2h.errors import WireError
from rd2h.wire import ReadyHead, ReadySplitter, decode_from_prefill, split_ready

TOKEN = bytes(16)
READY_TAG = b"\xc4\x10read_ready_batch"


def usual(layer: int, seq: object, requests: list[object], name: str = "layer", generation: int = 5) -> bytes:
    """The message of a layer that ends nothing."""
    return msgpack.packb([b"read_ready_batch", layer, name, requests, [], 0, 1, generation, seq, []])


def test_what_a_splitter_remembers_changes_nothing_but_the_speed() -> None:
    """One splitter is fed everything, good and bad; each message means what it means by itself."""
    seeds = [payload for payload in vector_payloads("P->D") if READY_TAG in payload[:24]]
    chunks: list[list[object]] = [[["a", [1, 2], [1, 2], 0, 0, TOKEN]], [], [["b", list(range(300)), [7], 1, 1, TOKEN]]]
    seeds += [usual(layer, seq, requests) for requests in chunks for layer in (0, 1, 60) for seq in (0, 200, 1 << 40)]
    source = random.Random(11)
    splitter = ReadySplitter()
    good = bad = recognised = 0

    def outcome(payload: bytes, splitter: ReadySplitter) -> ReadyHead | None:
        try:
            return splitter.split(payload)
        except WireError:
            return None

    for number in range(6000):
        payload = seeds[number % len(seeds)] if number % 3 == 0 else mutate(source, seeds)
        expected = outcome(payload, ReadySplitter())
        recognised += payload != b"" and splitter.recognise(payload) is not None
        assert outcome(payload, splitter) == expected, payload
        good, bad = good + (expected is not None), bad + (expected is None)
    assert good > 1000
    assert bad > 1000
    assert recognised > 200


def test_a_splitter_recognises_the_other_layers_of_a_chunk_and_the_layers_of_other_chunks() -> None:
    splitter = ReadySplitter()
    first: list[object] = [["a", [1, 2], [1, 2], 0, 0, TOKEN]]
    for layer in range(3):
        splitter.split(usual(layer, layer, first, f"layer {layer}"))
    second: list[object] = [["b", [3], [3], 0, 0, TOKEN]]
    assert splitter.recognise(usual(0, 3, second, "layer 0")) is None
    splitter.split(usual(0, 3, second, "layer 0"))
    for layer, seq in ((1, 4), (2, 70000)):
        head = splitter.recognise(usual(layer, seq, second, f"layer {layer}"))
        assert head is not None
        assert (head.layer_idx, head.layer_name, head.seq) == (layer, f"layer {layer}", seq)
    assert splitter.recognise(usual(1, 4, second, "layer 1", generation=6)) is None
    assert splitter.split(usual(1, 4, second, "layer 1", generation=6)).generation == 6


@pytest.mark.parametrize("seq", [None, True, -1, 1.5, "7", b"7", [], {}, [1], 1 << 64, msgpack.Timestamp(1)])
def test_a_recognised_message_needs_a_valid_sequence(seq: object) -> None:
    splitter = ReadySplitter()
    splitter.split(usual(0, 1, []))
    assert splitter.recognise(usual(0, 2, [])) is not None
    frame = usual(0, 0, [])
    packed = b"\xcf" + bytes(9) if seq == 1 << 64 else msgpack.packb(seq)
    frame = frame[:-2] + packed + frame[-1:]
    with pytest.raises(WireError):
        splitter.split(frame)


@pytest.mark.parametrize("payload", [b"", b"\x90", b"\x97", READY_TAG, b"\x97" + READY_TAG])
def test_short_frames(payload: bytes) -> None:
    warm = ReadySplitter()
    warm.split(usual(0, 1, []))
    for decode in (split_ready, decode_from_prefill, warm.split):
        with pytest.raises(WireError):
            decode(payload)


def test_known_read_requests_elsewhere_in_the_message() -> None:
    """Their bytes may occur in a name, in the done ids or twice; only the fourth position counts."""
    for name, raw, done in (
        ("\x01\x02\x03", b"\x03", []),
        ("\x90", b"\x90", []),
        ("x", b"\x90", []),
        ("x", b"\x91\x92\xa1a\x90", ["a", "\x10"]),
        ("a" * 200, b"\xa1a", ["a"]),
    ):
        frame = b"\x97" + READY_TAG + b"\x00" + msgpack.packb(name) + raw + msgpack.packb(done) + b"\x00\x01"
        expected = decode_from_prefill(frame)
        assert isinstance(expected, ReadyHead)
        assert expected.requests_raw == raw
        splitter = ReadySplitter()
        for _ in range(2):
            assert decode_from_prefill(frame, splitter) == expected


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, b"read_ready_batcH"),
        (1, -1),
        (1, 1 << 31),
        (2, "x" * 1025),
        (5, -1),
        (5, 1),
        (5, 2),
        (6, 0),
        (6, 1 << 31),
        (7, -1),
        (8, -1),
        (9, [TOKEN]),
    ],
)
def test_out_of_range_in_the_most_usual_message(position: int, value: object) -> None:
    """The message of a layer that ends nothing is validated by a shorter way; it must be no laxer."""
    good = [b"read_ready_batch", 0, "layer", [], [], 0, 1, 5, 6, []]
    splitter = ReadySplitter()
    assert splitter.split(msgpack.packb(good)).seq == 6
    frame = msgpack.packb([*good[:position], value, *good[position + 1 :]])
    for split in (split_ready, splitter.split):
        with pytest.raises(WireError):
            split(frame)
