"""Peers that say what nobody understands, or that do not belong together (case P6), with real processes and bytes."""

from collections.abc import Callable
from dataclasses import replace

from harness.cache import CacheSpec
from harness.pair import DECODE_OPTIONS, Decode, Prefill, Prompts, connect_by_hand, parts
from harness.scripted import ScriptedDecode
from harness.waiting import wait_for
from harness.worker import Worker

from rd2h.prefill.options import PublisherOptions
from rd2h.wire import (
    encode_mf_ack,
    encode_ping,
    encode_read_done,
    encode_read_requests,
    encode_ready,
)

SPEC = CacheSpec(layers=4, blocks=64)
TakeWorker = Callable[[], Worker]


def test_p6_malformed_replies(take_worker: TakeWorker, scripted: Callable[..., ScriptedDecode]) -> None:
    prefill = Prefill.start(take_worker(), SPEC)
    decode = scripted()
    child = Prompts(SPEC).child(4)
    prefill.worker.begin("publish", parts(child, decode.address), layers=[0])
    decode.handshake()
    prefill.worker.end()
    head = decode.ready()
    garbage = [b"", b"\xc1", b"\x93\xc4\x09read_done\x00", encode_read_done(0, head.seq)[:-1], b"ACKACK", bytes(3000)]
    for payload in garbage:
        decode.send(payload)
    decode.send(encode_read_done(head.layer_idx, None))  # a legacy answer says nothing to an extended Prefill
    # Each call tells what came since the last one.
    counts: list[float] = []
    wait_for(
        "counted",
        lambda: counts.append(prefill.worker.call("stats").get("frames_malformed", 0)) or sum(counts) >= len(garbage),
    )
    assert sum(counts) == len(garbage)
    assert prefill.worker.call("outstanding") == 1
    decode.done(head)
    prefill.wait_settled()
    assert prefill.worker.call("alive")


def test_p6_malformed_messages(take_worker: TakeWorker) -> None:
    prefill = Prefill.start(take_worker(), SPEC)
    decode = Decode.start(take_worker(), SPEC, trusted=[prefill.generation])
    whole = encode_ready(0, "model.layers.0.self_attn.attn", encode_read_requests([]), (), 0, 1, (1, 2, ()))
    with connect_by_hand(prefill, decode) as raw:
        for cut in range(len(whole)):
            raw.send(whole[:cut])
        raw.send(b"\xc1")
        raw.send(b"one", b"two", b"three")
        raw.send(b"", encode_ping(1, 2))
        assert raw.receive_raw()  # the ping behind an empty delimiter is answered
        counted = wait_for("counted", lambda: decode.worker.call("stats").get("frames_malformed", 0))
        assert counted == len(whole) + 2
    child = Prompts(SPEC).child(4)
    decode.add(child)
    decode.expect(child)
    prefill.publish(parts(child, decode.address))
    decode.wait_reported(child, "done")
    decode.check()
    decode.check_baseline()


def test_a_refused_prefill_fails_its_children_at_once(take_worker: TakeWorker) -> None:
    """Decode does not accept the metadata (other block bytes): both sides know, nothing is written."""
    prefill = Prefill.start(take_worker(), SPEC)
    options = replace(DECODE_OPTIONS, fingerprint=b"another layout")
    decode = Decode.start(take_worker(), SPEC, trusted=[prefill.generation], options=options)
    child = Prompts(SPEC).child(4)
    decode.add(child)
    prefill.publish(parts(child, decode.address))
    assert "fingerprint" in decode.wait_reported(child, "failed", 10.0)
    assert "fingerprint" in (prefill.reason_of(child) or "")
    assert prefill.worker.call("wait_all") < 5.0
    decode.check()


def test_block_bytes_that_differ_fail_the_layer(take_worker: TakeWorker) -> None:
    prefill = Prefill.start(take_worker(), replace(SPEC, indexer_bytes=32))
    decode = Decode.start(take_worker(), SPEC, trusted=[prefill.generation])
    child = Prompts(SPEC).child(4)
    decode.add(child)
    prefill.publish(parts(child, decode.address))
    prefill.wait_settled()
    assert "indexer block bytes 32 on Prefill, 64 on Decode" in (prefill.reason_of(child) or "")
    decode.check()


def test_a_handshake_without_end_is_bounded(take_worker: TakeWorker, scripted: Callable[..., ScriptedDecode]) -> None:
    prefill = Prefill.start(take_worker(), SPEC, options=PublisherOptions(handshake_timeout_s=0.5))
    mute = scripted()
    child = Prompts(SPEC).child(4)
    prefill.publish(parts(child, mute.address))
    assert prefill.worker.call("wait_all") < 10.0
    assert "handshaking" in (prefill.reason_of(child) or "")


def test_an_answer_of_another_generation_is_not_talked_to(
    take_worker: TakeWorker, scripted: Callable[..., ScriptedDecode]
) -> None:
    prefill = Prefill.start(take_worker(), SPEC)
    decode = scripted()
    child = Prompts(SPEC).child(4)
    prefill.publish(parts(child, decode.address))
    decode.receive()
    decode.send(encode_mf_ack((decode.generation or 0) + 1, 5))
    assert prefill.worker.call("wait_all") < 10.0
    assert "generation" in (prefill.reason_of(child) or "")
    assert decode.silent(0.2)


def test_a_forgotten_prefill_begins_again(take_worker: TakeWorker) -> None:
    """More connections than Decode keeps push out an idle one, never one that feeds a child."""
    idle, feeding = Prefill.start(take_worker(), SPEC), Prefill.start(take_worker(), SPEC)
    options = replace(DECODE_OPTIONS, max_connections=4)
    trusted = [idle.generation, feeding.generation]
    decode = Decode.start(take_worker(), SPEC, trusted=trusted, options=options)
    prompts = Prompts(SPEC)
    before, fed, lost, after = (prompts.child(3) for _ in range(4))
    decode.add(before, fed, lost, after)
    decode.expect(before, fed, after)
    idle.publish(parts(before, decode.address))
    decode.wait_reported(before, "done")
    feeding.publish(parts(fed, decode.address), layers=[0, 1])
    feeding.wait_settled()
    crowd = [connect_by_hand(feeding, decode) for _ in range(6)]
    idle.publish(parts(lost, decode.address), layers=[0])
    wait_for("Prefill knows", lambda: "no metadata" in (idle.reason_of(lost) or ""))
    assert idle.worker.call("wait_all") < 5.0
    decode.worker.call("abort", [lost.name])
    idle.publish(parts(after, decode.address))
    decode.wait_reported(after, "done")
    feeding.publish(parts(fed, decode.address), layers=[2, 3])
    decode.wait_reported(fed, "done")
    for raw in crowd:
        raw.close()
    decode.check()
