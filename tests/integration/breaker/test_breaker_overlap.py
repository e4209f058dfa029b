"""Attacks on overlapping and combined reads with real threads, sockets and bytes.

No heartbeat rescues a lost wake-up here: they are hours apart.
"""

import random
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from harness.cache import Block, CacheSpec
from harness.controlled import ReadControl
from harness.decode_side import DecodeSide
from harness.pair import DECODE_OPTIONS, Prompts, new_generation
from harness.plans import Child, DecodeAddress, Part, Report
from harness.prefill_side import PrefillSide
from harness.scripted import ScriptedPrefill
from harness.waiting import stays, wait_for

from rd2h.decode.connection import Connection
from rd2h.decode.options import PullerOptions
from rd2h.errors import EngineError
from rd2h.wire import (
    WIRE_VERSION,
    MfAck,
    PeerInfo,
    ReadDone,
    ReadFailed,
    ReadRequest,
    encode_mf_meta,
    encode_pong,
    encode_read_requests,
    encode_ready,
)

SPEC = CacheSpec(layers=12, blocks=256)
NO_HEARTBEATS = replace(DECODE_OPTIONS, peer_timeout_s=40_000.0)
ANSWER_S = 20.0


class HandPrefill:
    """A connection of a Prefill whose every message is sent by the test; memory and session are a PrefillSide's."""

    def __init__(self, side: PrefillSide, generation: int, address: DecodeAddress, *, joint: bool = True) -> None:
        assert address.generation is not None
        self._decode = address.generation
        self.raw = ScriptedPrefill(address.base_port, generation)
        self.sent: list[tuple[int, int]] = []
        """(layer, sequence) of all ready messages, in order."""
        self.answered: list[tuple[int, int]] = []
        self.failed: list[ReadFailed] = []
        peer = PeerInfo(WIRE_VERSION, generation, b"", 1, 0, joint_acks=joint)
        self.raw.send(encode_mf_meta(side.session(), side.layer_map(), peer))
        ack = self.raw.receive()
        assert isinstance(ack, MfAck)
        assert not ack.error, ack
        self.raw.send(encode_pong(generation, ack.clock_ns))

    def ready(self, layer: int, child: Child, requests: bytes, *, last: bool) -> None:
        """Send one layer."""
        done, tokens = ((child.name,), (child.token,)) if last else ((), ())
        seq = len(self.sent) + 1
        name = f"model.layers.{layer}.self_attn.attn"
        self.raw.send(encode_ready(layer, name, requests, done, 0, 1, (self._decode, seq, tokens)))  # type: ignore[arg-type]
        self.sent.append((layer, seq))

    def collect(self) -> None:
        """Wait until everything has been answered."""
        while len(self.answered) < len(self.sent):
            reply = self.raw.receive(ANSWER_S)
            if isinstance(reply, ReadDone):
                self.answered += [(reply.layer_idx, reply.seq or 0), *reply.also]
            elif isinstance(reply, ReadFailed):
                self.answered.append((reply.layer_idx, reply.seq or 0))
                self.failed.append(reply)


def requests_of(child: Child) -> bytes:
    request = ReadRequest(
        child.name, np.array(child.p_main, np.int64), np.array(child.p_indexer, np.int64), 0, 0, child.token
    )
    return encode_read_requests([request])


@dataclass
class Pair:
    """Both sides in this process."""

    options: PullerOptions = NO_HEARTBEATS
    spec: CacheSpec = SPEC
    p_generation: int = field(default_factory=new_generation)
    d_generation: int = field(default_factory=new_generation)
    reports: dict[str, Report] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prefill = PrefillSide(self.spec, self.p_generation)
        options = replace(self.options, generation=self.d_generation)
        self.decode = DecodeSide(self.spec, options, trusted=[self.p_generation])
        self.address = DecodeAddress(self.decode.base_port(), self.d_generation)
        self.prompts = Prompts(self.spec)
        self._lock = threading.Lock()

    def hand(self, **kwargs: bool) -> HandPrefill:
        return HandPrefill(self.prefill, self.p_generation, self.address, **kwargs)

    def connections(self) -> list[Connection]:
        """As Decode's book has them."""
        return list(self.decode._ranks[0].puller._book.connections.values())

    def report(self, child: Child) -> Report | None:
        with self._lock:
            for report in self.decode.take_finished():
                assert report.name not in self.reports, f"reported twice: {report}"
                self.reports[report.name] = report
            return self.reports.get(child.name)

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_no_message_is_ever_left_lying(pairs: list[Pair], threads: int) -> None:
    """Six connections send in bursts of any size at any time; each message is answered once, in its connection's order.

    Read times go from nothing to many times what makes reads overlap, and destinations come before or after the first
    message. A lost wake-up would last for ever.
    """
    pair = Pair(replace(NO_HEARTBEATS, read_threads=threads))
    pairs.append(pair)
    pair.decode.control(ReadControl(jitter_before_s=0.0005, jitter_after_s=0.0005))
    children = [pair.prompts.child(5) for _ in range(6)]
    for child in children:
        pair.prefill.write([Part(child, pair.address, 0, 5, True)])
    problems: list[Exception] = []
    end = time.monotonic() + 3.0

    def drive(number: int) -> None:
        chance = random.Random(1000 * threads + number)
        mine = children[number]
        try:
            hand = pair.hand(joint=bool(number % 2))
            rounds = 0
            while time.monotonic() < end:
                rounds += 1
                child = replace(mine, name=f"{mine.name}-{rounds}", token=secrets.token_bytes(16))
                early = chance.random() < 0.7
                if early:
                    pair.decode.add([child])
                requests = requests_of(child)
                for layer in range(SPEC.layers):
                    hand.ready(layer, child, requests, last=layer == SPEC.layers - 1)
                    if chance.random() < 0.3:
                        time.sleep(chance.random() * 0.002)
                    if early and chance.random() < 0.1:
                        hand.collect()
                if not early:
                    pair.decode.add([child])
                hand.collect()
                report = wait_for("the report", lambda child=child: pair.report(child), ANSWER_S)
                assert (report.outcome, report.reason) == ("done", "")
                assert pair.decode.missing(child) == []
                pair.decode.clear(child)
            hand.raw.close()
            assert not hand.failed
            assert hand.answered == hand.sent
            assert rounds > 2
        except Exception as problem:  # noqa: BLE001 (raised again below, in the test's own thread)
            problems.append(problem)

    drivers = [threading.Thread(target=drive, args=(number,)) for number in range(len(children))]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join(60)
    assert not problems, problems[0]
    assert pair.decode.counts() == (0, 0, 0)
    assert pair.decode.alive()


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("read_s", [0.0, 0.0003])
def test_a_message_that_comes_while_another_is_answered_is_not_left_lying(
    pairs: list[Pair], threads: int, read_s: float
) -> None:
    """One quiet connection with two messages, then nothing: sending the first answer may swallow the second's edge."""
    pair = Pair(replace(NO_HEARTBEATS, read_threads=threads))
    pairs.append(pair)
    pair.decode.control(ReadControl(before_s=read_s))
    child = pair.prompts.child(2)
    pair.prefill.write([Part(child, pair.address, 0, 2, True)])
    pair.decode.add([child])
    requests = requests_of(child)
    chance = random.Random(threads)
    hand = pair.hand()
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        hand.ready(chance.randrange(SPEC.layers), child, requests, last=False)
        begin, pause_s = time.perf_counter(), chance.random() * (0.0005 + 2 * read_s)
        while time.perf_counter() < begin + pause_s:
            pass
        hand.ready(chance.randrange(SPEC.layers), child, requests, last=False)
        if chance.random() < 0.2:
            hand.ready(chance.randrange(SPEC.layers), child, requests, last=False)
        hand.collect()
    assert hand.answered == hand.sent
    assert not hand.failed
    assert len(hand.sent) > 200
    hand.raw.close()


@pytest.mark.parametrize(("threads", "slow"), [(2, 1), (4, 1), (4, 2), (8, 3), (2, 2), (4, 4), (4, 6)])
def test_slow_connections_never_take_all_threads(pairs: list[Pair], threads: int, slow: int) -> None:
    """Ranks of a Prefill with long reads may be many, and each may use two threads; its neighbours must find one."""
    pair = Pair(replace(NO_HEARTBEATS, read_threads=threads))
    pairs.append(pair)
    engine = pair.decode._ranks[0].engine
    fast_session = pair.prefill.session()
    others = [PrefillSide(SPEC, new_generation()) for _ in range(slow)]
    try:
        pair.decode.trust([pair.p_generation, *(new for new in range(1, slow + 1))])
        engine.default = ReadControl(before_s=0.2)
        engine.controls[fast_session] = ReadControl()
        hands = []
        for number, side in enumerate(others):
            child = pair.prompts.child(4)
            side.write([Part(child, pair.address, 0, 4, True)])
            pair.decode.add([child])
            hand = HandPrefill(side, number + 1, pair.address)
            hand.ready(0, child, requests_of(child), last=False)
            hands.append((hand, child))
        for hand, _ in hands:
            hand.collect()
        engine.default = ReadControl(before_s=3.0)
        for hand, child in hands:
            for layer in range(1, 6):
                # Different block lists, or they would be read together.
                part = replace(child, p_main=child.p_main[:layer], p_indexer=child.p_indexer[:layer])
                hand.ready(layer, child, requests_of(part), last=False)
        many = max(1, min(slow, threads - 1))
        wait_for("the slow ones read", lambda: engine.started - engine.returned >= many)
        fast = pair.hand()
        child = pair.prompts.child(3)
        pair.prefill.write([Part(child, pair.address, 0, 3, True)])
        pair.decode.add([child])
        begin = time.monotonic()
        for layer in range(SPEC.layers):
            fast.ready(layer, child, requests_of(child), last=layer == SPEC.layers - 1)
            fast.collect()
        assert time.monotonic() - begin < 1.5
        assert engine.started - engine.returned >= many, "the slow reads ended too early to prove anything"
        wait_for("done", lambda: pair.report(child))
        fast.raw.close()
        engine.default = ReadControl()
        for hand, _ in hands:
            hand.collect()
            assert hand.answered == hand.sent
            hand.raw.close()
    finally:
        for side in others:
            side.close()


def test_aborts_and_failed_reads_under_overlap_never_write_into_blocks_that_were_given_back(pairs: list[Pair]) -> None:
    """Reads fail while their bytes are still to land; the request is aborted before, between or after the two reads.

    Whenever it is reported, nothing may land in its blocks any more.
    """
    hold_s, late_s = 0.4, 0.15
    pair = Pair(replace(NO_HEARTBEATS, hold_s=hold_s))
    pairs.append(pair)
    chance = random.Random(5)
    engine = pair.decode._ranks[0].engine
    hand = pair.hand()
    (connection,) = pair.connections()
    for attempt in range(12):
        child = pair.prompts.child(4)
        pair.prefill.write([Part(child, pair.address, 0, 4, True)])
        pair.decode.add([child])
        connection.read_s = 1.0
        engine.default = ReadControl(before_s=0.05, fail_code=5, late_s=late_s)
        started = engine.started
        requests = requests_of(child)
        hand.ready(0, child, requests, last=False)
        wait_for("the first read runs", lambda started=started: engine.started > started)
        if attempt % 3 == 0:
            pair.decode.abort([child.name])
        hand.ready(1, child, requests, last=False)
        if attempt % 3 == 1:
            time.sleep(chance.random() * 0.05)
            pair.decode.abort([child.name])
        hand.ready(2, child, requests, last=False)
        wait_for("reported", lambda child=child: pair.report(child), 10)
        pair.decode.own(child.d_main, child.d_indexer, 0x5A)
        cache = pair.decode._ranks[0].cache
        owned = [(layer, 0, Block(block, 0x5A, block)) for layer in range(SPEC.layers) for block in child.d_main]
        stays(
            f"the new owner's bytes (attempt {attempt})",
            lambda cache=cache, owned=owned: all(cache.holds(*place) for place in owned),
            2 * late_s,
        )
        hand.collect()
        pair.decode.clear(child)
        for pool, blocks in (
            (pair.prompts.p_main, child.p_main),
            (pair.prompts.p_indexer, child.p_indexer),
            (pair.prompts.d_main, child.d_main),
            (pair.prompts.d_indexer, child.d_indexer),
        ):
            pool.give(blocks)
    hand.raw.close()
    assert pair.decode.counts() == (0, 0, 0)


def test_an_engine_that_raises_in_one_of_two_reads_fails_the_request_alone(
    pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(NO_HEARTBEATS)
    pairs.append(pair)
    engine = pair.decode._ranks[0].engine
    hand = pair.hand()
    (connection,) = pair.connections()
    connection.read_s = 1.0
    true_read, calls, both = engine.batch_transfer_sync_read, [], threading.Barrier(2)

    def raises(*arguments: object) -> object:
        number = len(calls)
        calls.append(number)
        both.wait(10)  # two run at a time
        if number == 0:
            raise OverflowError("a defect in the engine")
        return true_read(*arguments)  # type: ignore[arg-type]

    child, good = pair.prompts.child(4), pair.prompts.child(4)
    for one in (child, good):
        pair.prefill.write([Part(one, pair.address, 0, 4, True)])
    pair.decode.add([child, good])
    with monkeypatch.context() as patch:
        patch.setattr(engine, "batch_transfer_sync_read", raises)
        hand.ready(0, child, requests_of(child), last=False)
        wait_for("the first read", lambda: calls)
        hand.ready(1, child, requests_of(child), last=False)
        hand.collect()
    assert hand.answered == hand.sent
    assert [failed.seq for failed in hand.failed] == [1]
    report = wait_for("reported", lambda: pair.report(child), 10)
    assert report.outcome == "failed"
    for layer in range(SPEC.layers):
        hand.ready(layer, good, requests_of(good), last=layer == SPEC.layers - 1)
    hand.collect()
    report = wait_for("reported", lambda: pair.report(good), 10)
    assert (report.outcome, report.reason) == ("done", "")
    assert pair.decode.missing(good) == []
    hand.raw.close()


@pytest.mark.parametrize("error", [EngineError("no"), OverflowError("a defect in the engine")])
def test_an_engine_that_raises_while_a_session_opens_costs_that_prefill_only(
    pairs: list[Pair], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    pair = Pair(NO_HEARTBEATS)
    pairs.append(pair)

    def raises(_: str) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(pair.decode._ranks[0].engine.inner, "open_session", raises)
        with ScriptedPrefill(pair.address.base_port) as raw:
            peer = PeerInfo(WIRE_VERSION, pair.p_generation, b"", 1, 0)
            raw.send(encode_mf_meta(pair.prefill.session(), pair.prefill.layer_map(), peer))
            ack = raw.receive()
            assert isinstance(ack, MfAck)
            assert str(error) in ack.error
    assert pair.decode.alive()
    hand = pair.hand()
    hand.raw.close()


@pytest.mark.parametrize("threads", [2, 4])
def test_close_in_the_middle_of_two_reads_leaves_no_read_in_the_books(pairs: list[Pair], threads: int) -> None:
    pair = Pair(replace(NO_HEARTBEATS, read_threads=threads))
    pairs.append(pair)
    engine = pair.decode._ranks[0].engine
    child = pair.prompts.child(4)
    pair.prefill.write([Part(child, pair.address, 0, 4, True)])
    pair.decode.add([child])
    hand = pair.hand()
    (connection,) = pair.connections()
    connection.read_s = 1.0
    engine.default = ReadControl(before_s=0.3)
    for layer in range(6):
        part = replace(child, p_main=child.p_main[: 1 + layer % 4], p_indexer=child.p_indexer[: 1 + layer % 4])
        hand.ready(layer, child, requests_of(part), last=False)
    wait_for("reads run", lambda: engine.started >= 1)
    pair.decode.abort([child.name])
    pair.decode._ranks[0].puller.close()
    assert engine.started == engine.returned
    assert pair.decode.counts()[2] == 0
    report = wait_for("reported", lambda: pair.report(child), 5)
    assert report.outcome == "aborted"
    hand.raw.close()
