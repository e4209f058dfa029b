"""Peers that vanish or stand still while two reads of one connection run, with real processes and bytes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from harness.cache import CacheSpec
from harness.controlled import ReadControl
from harness.pair import DECODE_OPTIONS, Decode, Prefill, Prompts, parts
from harness.plans import Child
from harness.waiting import wait_for
from harness.worker import Worker

from rd2h.prefill.options import PublisherOptions

SPEC = CacheSpec(layers=6, blocks=64)
PEER_TIMEOUT_S = 1.5
READ_S = 0.6
TakeWorker = Callable[[], Worker]


def started(decode: Decode) -> int:
    return decode.worker.call("reads")[0]


def overlapping(take_worker: TakeWorker, *, tp_size: int = 1) -> tuple[Prefill, Decode, Child, Prompts]:
    """A child of which layer 0 has been read slowly, and layers 1 and 2 are being read at the same time."""
    prefill = Prefill.start(
        take_worker(), SPEC, options=PublisherOptions(peer_timeout_s=PEER_TIMEOUT_S), tp_size=tp_size
    )
    options = replace(DECODE_OPTIONS, peer_timeout_s=PEER_TIMEOUT_S, read_threads=8)
    decode = Decode.start(take_worker(), SPEC, trusted=[prefill.generation], options=options)
    prompts = Prompts(SPEC)
    child = prompts.child(4)
    decode.add(child)
    decode.worker.call("control", ReadControl(before_s=0.05))
    prefill.publish(parts(child, decode.address), layers=[0])
    prefill.wait_settled()
    decode.worker.call("control", ReadControl(before_s=READ_S))
    for layer in (1, 2):
        before = started(decode)
        prefill.publish(parts(child, decode.address), layers=[layer])
        wait_for("its read runs", lambda before=before: started(decode) == before + tp_size)
    assert decode.worker.call("counts")[2] == 2 * tp_size, "two reads of each connection run"
    return prefill, decode, child, prompts


def still_works(prefill: Prefill, decode: Decode, prompts: Prompts) -> None:
    """Another child is pulled whole, and nothing is left behind."""
    after = prompts.child(4)
    decode.add(after)
    decode.expect(after)
    prefill.publish(parts(after, decode.address))
    decode.wait_reported(after, "done")
    decode.check()
    decode.check_baseline()


def test_p10_with_two_reads(take_worker: TakeWorker) -> None:
    prefill, decode, child, prompts = overlapping(take_worker)
    decode.worker.stop()
    try:
        prefill.worker.call("overwrite", child.p_main)
    finally:
        decode.worker.resume()
    reason = decode.wait_reported(child, "failed")
    assert "lease" in reason or "lost" in reason or "heard" in reason
    decode.worker.call("control", ReadControl())
    wait_for("no read runs", lambda: decode.worker.call("counts")[2] == 0)
    decode.worker.call("reset")
    still_works(prefill, decode, prompts)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_prefill_dies_under_two_reads(take_worker: TakeWorker, tp_size: int) -> None:
    prefill, decode, child, prompts = overlapping(take_worker, tp_size=tp_size)
    prefill.worker.kill()
    assert decode.wait_reported(child, "failed")
    assert decode.worker.call("counts")[2] == 0, "it is reported when both reads have returned"
    decode.give_away(child, 0x51)
    decode.worker.call("control", ReadControl())
    again = Prefill.start(take_worker(), SPEC, tp_size=tp_size)
    decode.worker.call("trust", [again.generation])
    still_works(again, decode, prompts)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_abort_under_two_reads_gives_the_blocks_back_after_both(take_worker: TakeWorker, tp_size: int) -> None:
    prefill, decode, child, prompts = overlapping(take_worker, tp_size=tp_size)
    decode.worker.call("abort", [child.name])
    assert decode.poll() == []
    prefill.publish(parts(child, decode.address), layers=[3])
    decode.wait_reported(child, "aborted")
    assert decode.worker.call("counts")[2] == 0
    decode.give_away(child, 0x52)
    prefill.publish(parts(child, decode.address), layers=[4, 5])
    prefill.wait_settled()
    decode.worker.call("control", ReadControl())
    still_works(prefill, decode, prompts)
    assert prefill.worker.call("stopped", child.token)


def test_decode_that_dies_under_two_reads_keeps_the_gates_of_both_shut(take_worker: TakeWorker) -> None:
    prefill, decode, child, _ = overlapping(take_worker)
    decode.worker.stop()
    try:
        assert prefill.worker.call("outstanding") == 2
        waited_s = prefill.worker.call("overwrite", child.p_main, [1])
        assert waited_s > PEER_TIMEOUT_S / 4
        assert prefill.worker.call("overwrite", child.p_main, [2]) < PEER_TIMEOUT_S
    finally:
        decode.worker.resume()
    assert prefill.worker.call("alive")
    assert prefill.reason_of(child)
