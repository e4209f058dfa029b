"""Nothing a peer sends does more harm than a WireError: no other exception, no huge memory, no long computation."""

import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable

import msgpack
import pytest
from core_frames import (
    HOSTILE_VALUES,
    HUGE_HEADERS,
    is_sane,
    is_sane_request,
    mutate,
    nested,
    vector_payloads,
)

from rd2h.errors import WireError
from rd2h.wire import (
    MAX_FRAME_BYTES,
    MAX_REQUESTS_PER_MESSAGE,
    FromDecode,
    FromPrefill,
    ReadyHead,
    decode_from_decode,
    decode_from_prefill,
    decode_read_requests,
    encode_read_requests,
)

TOKEN = bytes(16)
READY_TAG = b"\xc4\x10read_ready_batch"
FRAMES_PER_DIRECTION = 12_000
MAX_FRAME_CPU_S = 0.5


def ready(*positions: object) -> bytes:
    return msgpack.packb((b"read_ready_batch", *positions))


def feed(decode: Callable[[bytes], FromPrefill | FromDecode], payload: bytes) -> str:
    """Decode wholly, as the receiving side would; returns what happened."""
    try:
        message = decode(payload)
        assert is_sane(message), message
        if isinstance(message, ReadyHead):
            assert message.requests_raw in payload
            requests = decode_read_requests(message.requests_raw)
            assert all(is_sane_request(request) for request in requests), requests
    except WireError as error:
        return "refused" if len(str(error)) < 5000 else "refused at length"
    return type(message).__name__


@pytest.mark.parametrize(
    ("decode", "direction"), [(decode_from_prefill, "P->D"), (decode_from_decode, "D->P")], ids=["at-D", "at-P"]
)
def test_mutated_frames(decode: Callable[[bytes], FromPrefill | FromDecode], direction: str) -> None:
    seeds = vector_payloads(direction)
    # A frame of the other direction, or of no direction at all, may come as well.
    seeds += random.Random(7).sample(vector_payloads("D->P" if direction == "P->D" else "P->D"), 4)
    source = random.Random(20240229)
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    tracemalloc.start()
    try:
        for number in range(FRAMES_PER_DIRECTION):
            payload = mutate(source, seeds)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            begin = time.thread_time()
            outcomes[feed(decode, payload)] += 1
            took = time.thread_time() - begin
            if took > MAX_FRAME_CPU_S:  # the frame's own time, or that of the garbage collector, which came by
                begin = time.thread_time()
                feed(decode, payload)
                took = time.thread_time() - begin
            slowest = max(slowest, took)
            # Arrays are allocated by their promised length, but only up to that of the frame limit, and never touched.
            assert tracemalloc.get_traced_memory()[1] - before < 200 << 20, (number, payload[:100])
    finally:
        tracemalloc.stop()
    assert slowest < MAX_FRAME_CPU_S
    # Both kinds occur, so the mutations are neither harmless nor hopeless.
    assert outcomes["refused"] > FRAMES_PER_DIRECTION // 3
    assert sum(outcomes.values()) - outcomes["refused"] > FRAMES_PER_DIRECTION // 100
    assert len(outcomes) >= 5
    assert "refused at length" not in outcomes


def test_mutated_read_requests() -> None:
    requests = decode_read_requests(msgpack.packb([("a", [1, 2], [3], 0, 0, TOKEN), ("b", [], [], 5, 6, TOKEN)]))
    seeds = [encode_read_requests(requests), msgpack.packb([("a", [1, 2, 3])])]
    source = random.Random(1)
    accepted = 0
    for _ in range(6000):
        try:
            decoded = decode_read_requests(mutate(source, seeds))
        except WireError:
            continue
        assert all(is_sane_request(request) for request in decoded)
        accepted += 1
    assert 30 < accepted < 5900


@pytest.mark.parametrize("position", range(1, 10))
def test_wrong_type_at_every_position_of_a_ready_message(position: int) -> None:
    good = [b"read_ready_batch", 0, "layer", [["a", [1], [2], 0, 0, TOKEN]], ["a"], 0, 1, 5, 6, [TOKEN]]
    assert feed(decode_from_prefill, msgpack.packb(good)) == "ReadyHead"
    allowed = {
        1: (int,),
        2: (str,),
        3: (list,),
        4: (list,),
        5: (int,),
        6: (int,),
        7: (int,),
        8: (int,),
        9: (list,),
    }[position]
    refused = 0
    for value in HOSTILE_VALUES:
        changed = [*good[:position], value, *good[position + 1 :]]
        outcome = feed(decode_from_prefill, msgpack.packb(changed))
        if type(value) not in allowed:
            assert outcome == "refused", value
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    "also", [None, {}, 1, [1], [[1]], [[1, 2, 3]], [[1, -1]], [[-1, 1]], [[True, 1]], [["1", 1]], [[1, 2]] * 65]
)
def test_malformed_further_layers_of_an_answer(also: object) -> None:
    assert feed(decode_from_decode, msgpack.packb((b"read_done", 1, 2, [], [[1, 2]] * 64))) == "ReadDone"
    with pytest.raises(WireError):
        decode_from_decode(msgpack.packb((b"read_done", 1, 2, [], also)))


@pytest.mark.parametrize("flag", [True, False])
def test_a_boolean_is_not_a_number(flag: bool) -> None:
    for payload in (
        msgpack.packb((b"ping", flag, 1)),
        msgpack.packb((b"ping", 1, flag)),
        msgpack.packb((b"read_done", flag)),
        msgpack.packb((b"read_done", 1, flag)),
        msgpack.packb((b"read_failed", 1, "x", flag)),
        msgpack.packb((b"mf_ack", {"v": flag, "d_gen": 1, "t": 1})),
        msgpack.packb((b"mf_ack", {"v": 1, "d_gen": flag, "t": 1})),
    ):
        with pytest.raises(WireError):
            decode_from_decode(payload)
    for payload in (
        msgpack.packb((b"pong", flag, 1)),
        ready(flag, "x", [], []),
        ready(0, "x", [], [], flag, 1),
        ready(0, "x", [], [], 0, True),
        ready(0, "x", [], [], 0, 1, flag, 1, []),
        msgpack.packb((b"mf_meta", "s", b"", {"v": 1, "p_gen": 1, "fp": b"", "p_tp": True, "p_rank": 0})),
    ):
        with pytest.raises(WireError):
            decode_from_prefill(payload)
    for ids in ([flag], [1, flag], [flag, 1], [5] * 1000 + [flag]):
        for row in (("a", ids), ("a", ids, [], 0, 0), ("a", [], ids, 0, 0)):
            with pytest.raises(WireError, match="block ids"):
                decode_read_requests(msgpack.packb([row]))
    for starts in ((flag, 0), (0, flag)):
        with pytest.raises(WireError, match="start"):
            decode_read_requests(msgpack.packb([("a", [1], [1], *starts)]))


@pytest.mark.parametrize(
    "ids", [[-1], [1 << 31], [1 << 63], [(1 << 64) - 1], [1.0], [1, None], ["1"], [[1]], [b"1"], "1", 1, None]
)
def test_block_ids_are_whole_numbers_of_31_bits(ids: object) -> None:
    with pytest.raises(WireError, match="block ids"):
        decode_read_requests(msgpack.packb([("a", ids)]))


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_a_read_request_has_two_or_at_least_five_positions(count: int) -> None:
    """A row of three or four positions is no version of the protocol; to guess at it would read wrong blocks."""
    row = ("a", [1], [2], 3, 4)[:count]
    with pytest.raises(WireError, match="2 \\(legacy\\) or at least 5"):
        decode_read_requests(msgpack.packb([row]))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc0",
        b"\x90",
        b"\xc1",
        b"ACK ",
        msgpack.packb("mf_meta"),
        msgpack.packb(("mf_meta", "tag is text", b"")),
        msgpack.packb((b"unknown", 1)),
        msgpack.packb({b"mf_meta": 1}),
        ready(),
        ready(0, "x", []),
        ready(0, "x", [], [], 1, 1),
        ready(0, "x", [], [], 0, 0),
        ready(0, "x", [], [], 2, 2),
        ready(0, "x", [], ["a"], 0, 1, 1, 1, []),
        ready(0, "x", [], [], 0, 1, 1, 1, [TOKEN]),
        ready(0, "x", [], ["a"], 0, 1, 1, 1, [TOKEN[:15]]),
        ready(0, "x", [], ["a" * 1025], 0, 1),
        ready(0, "x" * 1025, [], [], 0, 1),
        ready(1 << 31, "x", [], [], 0, 1),
        ready(0, "x", [], [], 0, 1, 1, 1, [], *([None] * 60)),
        ready(0, "x", [], [], 0, 1) + b"\x00",
        ready(0, "x", [], [], 0, 1, 1, 1, []) + ready(0, "x", [], [], 0, 1),
        ready(0, "x", [], [], 0, 1)[:-1],
        b"\x9f" + ready(0, "x", [], [], 0, 1, 1, 1, [])[1:],
        msgpack.packb((b"mf_meta", "s", b"", {})),
        msgpack.packb((b"mf_meta", "s", b"", {"v": 1, "p_gen": 1, "fp": b"", "p_tp": 2, "p_rank": 2})),
        msgpack.packb((b"mf_meta", "s", b"", {"v": 1, "p_gen": 1, "fp": b"", "p_tp": 0, "p_rank": 0})),
        msgpack.packb((b"mf_meta", "s", b"", {"v": 1, "p_gen": 1, "fp": bytes(65), "p_tp": 1, "p_rank": 0})),
        msgpack.packb((b"mf_meta", "s" * 1025, b"")),
        msgpack.packb((b"mf_meta", "s", "text")),
        msgpack.packb((b"mf_meta", "s", b"", None)),
        msgpack.packb((b"prefill_failed", 1, [(TOKEN,)])),
        msgpack.packb((b"prefill_failed", 1, [(TOKEN, 1)])),
        msgpack.packb((b"prefill_failed", 1, [("x" * 16, "text token")])),
        msgpack.packb((b"prefill_failed", -1, [])),
    ],
)
def test_malformed_at_decode(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode_from_prefill(payload)


def test_other_lengths_of_a_ready_message_are_read_as_far_as_they_go() -> None:
    assert decode_from_prefill(ready(0, "x", [], [], "no member without a ratio")) == decode_from_prefill(
        ready(0, "x", [], [])
    )
    head = decode_from_prefill(ready(0, "x", [], [], 0, 1, 9))
    assert isinstance(head, ReadyHead)
    assert (head.generation, head.seq) == (9, None)


@pytest.mark.parametrize("header", HUGE_HEADERS)
@pytest.mark.parametrize("depth", [0, 1, 5, 1000])
def test_promised_lengths_are_not_believed(header: bytes, depth: int) -> None:
    for prefix in (b"", READY_TAG, READY_TAG + b"\x00\xa1x", READY_TAG + b"\x00\xa1x\x90"):
        frame = b"\x9a" + prefix + b"\x91" * depth + header * 3
        assert feed(decode_from_prefill, frame) == "refused"
        assert feed(decode_from_decode, frame) == "refused"
    with pytest.raises(WireError):
        decode_read_requests(b"\x91" * depth + header)


@pytest.mark.parametrize("opener", [b"\x91", b"\x92", b"\x81\xa1a", b"\xdd\x00\x00\x00\x01"])
@pytest.mark.parametrize("depth", [30, 900, 1000, 1100, 100_000])
def test_deep_nesting(opener: bytes, depth: int) -> None:
    """Also where an error message would show the value."""
    deep = nested(depth, opener)
    frames = [
        deep,
        b"\x92" + READY_TAG + deep,
        b"\x97\x92" + READY_TAG + deep + bytes(6),
        b"\x95" + READY_TAG + b"\x00\xa1x" + deep + b"\x90",
        b"\x95" + READY_TAG + b"\x00" + deep + b"\x90\x90",
        b"\x92\xc4\x06mf_ack\x83\xa1v" + deep + b"\xa5d_gen\x01\xa1t\x01",
        b"\x94\xc4\x07mf_meta\xa0\xc4\x00\x81\xa4p_tp" + deep,
        b"\x93\xc4\x0eprefill_failed\x01\x91" + deep,
        b"\x92\xc4\x04ping" + deep,
    ]
    for frame in frames:
        assert feed(decode_from_prefill, frame) == "refused"
        assert feed(decode_from_decode, frame) == "refused"
    with pytest.raises(WireError):
        decode_read_requests(b"\x91\x92\xa1a" + deep)


def too_many(item: object) -> list[object]:
    return [item] * (MAX_REQUESTS_PER_MESSAGE + 1)


@pytest.mark.parametrize(
    ("decode", "payload"),
    [
        (decode_from_prefill, ready(0, "x", [], too_many("a"))),
        (decode_from_prefill, msgpack.packb((b"prefill_failed", 1, too_many((TOKEN, ""))))),
        (decode_from_decode, msgpack.packb((b"stop_sending", 1, too_many(TOKEN)))),
        (decode_from_decode, msgpack.packb((b"read_done", 1, 1, too_many((TOKEN, ""))))),
        (decode_read_requests, msgpack.packb(too_many(("a", [])))),
    ],
)
def test_lists_are_bounded(decode: Callable[[bytes], object], payload: bytes) -> None:
    with pytest.raises(WireError, match=r"more than|at most|exceeds max_array_len"):
        decode(payload)


def test_as_many_requests_as_allowed_pass() -> None:
    most = [("a", [1], [2], 0, 0, TOKEN)] * MAX_REQUESTS_PER_MESSAGE
    assert len(decode_read_requests(msgpack.packb(most))) == MAX_REQUESTS_PER_MESSAGE
    refused = [(TOKEN, "r")] * MAX_REQUESTS_PER_MESSAGE
    assert feed(decode_from_decode, msgpack.packb((b"read_done", 1, 1, refused))) == "ReadDone"


@pytest.mark.parametrize("decode", [decode_from_prefill, decode_from_decode])
def test_a_frame_above_the_limit_is_not_parsed(decode: Callable[[bytes], object]) -> None:
    body = bytes(MAX_FRAME_BYTES)
    for payload in (msgpack.packb((b"mf_meta", "s", body)), b"\x95" + READY_TAG + body):
        with pytest.raises(WireError, match=f"exceeds {MAX_FRAME_BYTES}"):
            decode(payload)


FILLERS = {
    "empty-list": b"\x90",
    "empty-map": b"\x80",
    "zero": b"\x00",
    "empty-str": b"\xa0",
    "bool": b"\xc3",
    "empty-bin": b"\xc4\x00",
    "str": b"\xa2ab",
    "number": b"\xcd\x10\x00",
    "ext": b"\xd4\x01\x00",
    "timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "lists-in-lists": b"\x91\x91\x91\x91\x90",
    "maps-in-lists": b"\x91\x81\xa0\x91\x80",
}


def stuffed(filler: bytes, size: int) -> list[tuple[Callable[[bytes], object], bytes]]:
    """Frames of about ``size`` bytes, full of one small thing, at each place where a long list could stand."""
    many = (size - 64) // len(filler)
    body = b"\xdd" + many.to_bytes(4, "big") + filler * many
    return [
        (decode_from_prefill, b"\x95" + READY_TAG + b"\x00\xa1x\x90" + body),
        (decode_from_prefill, b"\x93\xc4\x0eprefill_failed\x01" + body),
        (decode_from_decode, b"\x93\xc4\x0cstop_sending\x01" + body),
        (decode_read_requests, b"\x91\x92\xa1a" + body),
    ]


@pytest.mark.parametrize("filler", FILLERS.values(), ids=FILLERS)
def test_memory_grows_no_faster_than_thirty_times_the_frame(filler: bytes) -> None:
    size = 1 << 20
    for decode, payload in stuffed(filler, size):
        tracemalloc.start()
        try:
            try:
                decode(payload)
            except WireError:
                pass
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 30 * size, (decode, payload[:30])


@pytest.mark.parametrize("kind", ["empty-list", "lists-in-lists", "zero", "str", "ext"])
def test_the_largest_frames_take_a_moment(kind: str) -> None:
    for decode, payload in stuffed(FILLERS[kind], MAX_FRAME_BYTES):
        assert len(payload) <= MAX_FRAME_BYTES
        begin = time.thread_time()
        try:
            decode(payload)
        except WireError:
            pass
        assert time.thread_time() - begin < 3.0, (decode, payload[:30])


def test_one_long_string_among_many_ids_does_not_widen_the_list() -> None:
    ids = [1] * 100_000 + ["x" * 1_000_000]
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="whole numbers"):
            decode_read_requests(msgpack.packb([("a", ids)]))
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
