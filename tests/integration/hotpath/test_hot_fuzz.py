"""Mutated frames against live sockets on both sides: no thread dies, no foreign byte changes, service goes on."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from harness.cache import CacheSpec
from harness.mutations import mutated
from harness.pair import DECODE_OPTIONS, Decode, Prefill, Prompts, parts
from harness.scripted import ScriptedDecode, ScriptedPrefill
from harness.waiting import wait_for
from harness.worker import Worker

from rd2h.wire import (
    PeerInfo,
    ReadRequest,
    Refusal,
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

SPEC = CacheSpec(layers=3, blocks=48, scale_bytes=16)
TakeWorker = Callable[[], Worker]
FRAMES = pytest.mark.parametrize(
    "frames", [pytest.param(2500, id="short"), pytest.param(100_000, id="long", marks=pytest.mark.slow)]
)
PER_CONNECTION = 100


@FRAMES
@pytest.mark.timeout(1200)
def test_decode_against_mutated_frames(take_worker: TakeWorker, frames: int) -> None:
    prefill = Prefill.start(take_worker(), SPEC)
    options = replace(DECODE_OPTIONS, park_timeout_s=0.05, max_connections=16)
    decode = Decode.start(take_worker(), SPEC, options=options, trusted=[prefill.generation])
    prompts = Prompts(SPEC)
    # A victim in mid-transfer, whose token the attacker does not know; and a child that the attacker may harm, because
    # it knows everything about it. That one's blocks are the only ones whose bytes may change.
    victim, bait = prompts.child(9), prompts.child(5)
    decode.add(victim, bait)
    first, second = parts(victim, decode.address, 4)
    prefill.publish([first])
    prefill.wait_settled()
    chance = random.Random(frames)
    seeds = _prefill_seeds(prefill, decode, bait.token or b"", bait.p_main, bait.p_indexer)
    sent = 0
    while sent < frames:
        with ScriptedPrefill(decode.address.base_port) as raw:
            if chance.random() < 0.7:
                raw.send(seeds[0])  # real metadata first, so that what follows is looked at more closely
            for frame in mutated(seeds, PER_CONNECTION, chance):
                raw.send(frame)
            sent += PER_CONNECTION
            raw.send(encode_ping(1, sent))
            while encode_pong(decode.address.generation or 0, sent) != raw.receive_raw():
                continue  # until all before it has been taken in
        assert decode.worker.call("alive"), f"after {sent} frames"
        decode.poll()
    assert decode.outcomes(victim) == []
    prefill.publish([second])
    decode.wait_reported(victim, "done")
    decode.expect(victim)
    decode.worker.call("abort", [bait.name])
    wait_for("the bait has ended", lambda: decode.outcomes(bait))
    decode.give_away(bait, 0x77)
    decode.check()
    decode.check_baseline()


def _prefill_seeds(
    prefill: Prefill, decode: Decode, token: bytes, p_main: list[int], p_indexer: list[int]
) -> list[bytes]:
    generation = decode.address.generation or 0
    peer = PeerInfo(1, prefill.generation, b"", 1, 0)
    session, layers = prefill.worker.call("session"), prefill.worker.call("layer_map")
    main, indexer = np.array(p_main, np.int64), np.array(p_indexer, np.int64)
    requests = encode_read_requests([ReadRequest("cmpl-bait", main, indexer, 0, 0, token)])
    legacy = encode_read_requests([ReadRequest("cmpl-bait", main, indexer, 0, 0, None)])
    name = "model.layers.1.self_attn.attn"
    return [
        encode_mf_meta(session, layers, peer),
        encode_mf_meta(session, layers, None),
        encode_ready(1, name, requests, (), 0, 1, (generation, 1, ())),
        encode_ready(2, "model.layers.2.self_attn.attn", requests, ("b",), 0, 1, (generation, 2, (token,))),
        encode_ready(1, name, legacy, (), 0, 1),
        encode_pong(prefill.generation, 123),
        encode_ping(generation, 5),
        encode_prefill_failed(generation, [Refusal(token, "no")]),
    ]


@FRAMES
@pytest.mark.timeout(1200)
def test_prefill_against_mutated_replies(take_worker: TakeWorker, frames: int) -> None:
    prefill = Prefill.start(take_worker(), SPEC)
    good = Decode.start(take_worker(), SPEC, trusted=[prefill.generation])
    prompts = Prompts(SPEC)
    held, after, bait = prompts.child(6), prompts.child(6), prompts.child(2)
    good.add(held, after)
    good.expect(held, after)
    good.worker.call("hold")
    prefill.publish(parts(held, good.address))
    chance = random.Random(frames)
    sent = 0
    while sent < frames:
        with ScriptedDecode() as hostile:
            prefill.worker.begin("publish", parts(bait, hostile.address), write=False)
            if chance.random() < 0.8:
                hostile.handshake()
                seq = hostile.ready().seq or 0
            else:
                hostile.receive()
                seq = 1
            seeds = _decode_seeds(prefill, hostile, bait.token or b"", seq)
            if chance.random() < 0.8:
                seeds = seeds[2:]  # a mutated handshake usually ends the connection, and what follows is not read
            for frame in mutated(seeds, PER_CONNECTION, chance):
                hostile.send(frame)
            sent += PER_CONNECTION
            # Given up or not, Prefill has taken everything in that it will.
            hostile.send(encode_ping(1, 1))
            prefill.worker.end()
        assert prefill.worker.call("alive"), f"after {sent} frames"
        # The child of the honest Decode is neither failed nor acknowledged by what another one says.
        assert prefill.reason_of(held) is None
    stats = prefill.worker.call("stats")
    assert stats["frames_malformed"] + stats["acks_ignored"] > frames / 4, stats
    prefill.worker.begin("overwrite", held.p_main)
    assert not prefill.worker.ended()
    good.worker.call("release")
    prefill.worker.end()
    good.wait_reported(held, "done")
    prefill.publish(parts(after, good.address))
    good.wait_reported(after, "done")
    good.check()
    good.check_baseline()


def _decode_seeds(prefill: Prefill, hostile: ScriptedDecode, token: bytes, seq: int) -> list[bytes]:
    return [
        encode_mf_ack(hostile.generation or 0, 55),
        encode_mf_ack(hostile.generation or 0, 55, "no"),
        encode_read_done(0, seq),
        encode_read_done(1, seq + 1, [Refusal(token, "gone")]),
        encode_read_failed(2, "no", seq + 2),
        encode_ping(hostile.generation or 0, 77),
        encode_stop_sending(prefill.generation, [token]),
        b"ACK",
    ]
