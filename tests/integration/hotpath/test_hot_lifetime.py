"""Lifetime of blocks and requests on Decode (cases L1 to L13), with real processes, bytes and canaries."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from harness.cache import CacheSpec
from harness.controlled import ReadControl
from harness.pair import DECODE_OPTIONS, Decode, Prefill, Prompts, parts
from harness.waiting import stays, wait_for
from harness.worker import Worker

SPEC = CacheSpec(layers=4, blocks=48, scale_bytes=16)
OTHER_OWNER = 0x77


@pytest.fixture
def pair(take_worker: Callable[[], Worker]) -> tuple[Prefill, Decode, Prompts]:
    prefill = Prefill.start(take_worker(), SPEC)
    decode = Decode.start(take_worker(), SPEC, trusted=[prefill.generation])
    return prefill, decode, Prompts(SPEC)


def test_one_request_in_chunks(pair: tuple[Prefill, Decode, Prompts]) -> None:
    prefill, decode, prompts = pair
    child = prompts.child(11)
    decode.add(child)
    decode.expect(child)
    for part in parts(child, decode.address, 4, 5):
        prefill.publish([part])
    decode.wait_reported(child, "done")
    decode.check()
    prefill.wait_settled()
    decode.check_baseline()
    assert prefill.worker.call("failures") == {}


@pytest.mark.parametrize("last_layer_arrives", [True, False])
def test_l1_abort_while_waiting(pair: tuple[Prefill, Decode, Prompts], last_layer_arrives: bool) -> None:
    prefill, decode, prompts = pair
    child = prompts.child(6)
    decode.add(child)
    (part,) = parts(child, decode.address)
    prefill.publish([part], layers=[0, 1])
    prefill.wait_settled()
    decode.worker.call("abort", [child.name])
    decode.wait_reported(child, "aborted")
    decode.give_away(child, OTHER_OWNER)
    wait_for("Prefill stops", lambda: prefill.worker.call("stopped", child.token))
    if last_layer_arrives:
        prefill.publish([part], layers=[2, 3])
        prefill.wait_settled()
    stays("one report", lambda: decode.outcomes(child) == ["aborted"], 0.2)
    decode.check()
    decode.check_baseline()


def test_l2_healthy_and_aborted_in_one_message(pair: tuple[Prefill, Decode, Prompts]) -> None:
    prefill, decode, prompts = pair
    healthy, aborted, later = prompts.child(5), prompts.child(7), prompts.child(3)
    decode.add(healthy, aborted)
    decode.worker.call("abort", [aborted.name])
    decode.wait_reported(aborted, "aborted")
    decode.expect(healthy, later)
    prefill.publish([*parts(healthy, decode.address), *parts(aborted, decode.address)])
    decode.wait_reported(healthy, "done")
    prefill.wait_settled()
    assert prefill.reason_of(aborted)
    assert prefill.reason_of(healthy) is None
    decode.add(later)
    prefill.publish(parts(later, decode.address))
    decode.wait_reported(later, "done")
    decode.check()
    decode.check_baseline()


def test_l3_no_byte_into_blocks_of_a_new_owner(pair: tuple[Prefill, Decode, Prompts]) -> None:
    prefill, decode, prompts = pair
    child = prompts.child(6)
    decode.add(child)
    (part,) = parts(child, decode.address)
    prefill.publish([part], layers=[0, 1])
    prefill.wait_settled()
    decode.worker.call("control", ReadControl(fail_code=5))
    prefill.publish([part], layers=[2])
    assert "made to fail" in decode.wait_reported(child, "failed")
    decode.worker.call("control", ReadControl())
    decode.worker.call("reset")
    prefill.publish([part], layers=[3])
    prefill.wait_settled()
    decode.check()
    stays("one report", lambda: decode.outcomes(child) == ["failed"], 0.2)
    decode.check_baseline()


def test_l4_blocks_are_free_only_after_the_read_returned(pair: tuple[Prefill, Decode, Prompts]) -> None:
    prefill, decode, prompts = pair
    child = prompts.child(6)
    decode.add(child)
    decode.worker.call("hold")
    prefill.publish(parts(child, decode.address), layers=[0])
    wait_for("a read runs", lambda: decode.worker.call("reads")[0] == 1)
    decode.worker.call("abort", [child.name])
    stays("no report while the read runs", lambda: decode.outcomes(child) == [], 0.5)
    decode.worker.call("release")
    decode.wait_reported(child, "aborted")
    assert decode.worker.call("reads") == (1, 1)
    decode.worker.call("reset")
    prefill.publish(parts(child, decode.address), layers=[1, 2, 3])
    prefill.wait_settled()
    decode.check()
    decode.check_baseline()


def test_l5_blocks_are_held_while_bytes_may_still_land(take_worker: Callable[[], Worker]) -> None:
    prefill = Prefill.start(take_worker(), SPEC)
    decode = Decode.start(
        take_worker(), SPEC, trusted=[prefill.generation], options=replace(DECODE_OPTIONS, hold_s=1.5)
    )
    child = Prompts(SPEC).child(6)
    decode.add(child)
    decode.worker.call("control", ReadControl(fail_code=5, late_s=0.7))
    prefill.publish(parts(child, decode.address), layers=[0])
    prefill.wait_settled()
    assert prefill.reason_of(child)
    stays("no report during the hold", lambda: decode.outcomes(child) == [], 0.8)
    decode.wait_reported(child, "failed")
    decode.worker.call("reset")  # vLLM gives the blocks to somebody else
    stays("nothing lands any more", lambda: decode.worker.call("differences", decode.expected) == [], 0.8)
    decode.check_baseline()


@pytest.mark.parametrize("concurrent", [False, True])
def test_l6_same_external_id_twice(pair: tuple[Prefill, Decode, Prompts], concurrent: bool) -> None:
    prefill, decode, prompts = pair
    first = prompts.child(4, name="cmpl-x-0-aaaaaaaa", external_id="cmpl-x-0")
    second = prompts.child(4, name="cmpl-x-0-bbbbbbbb", external_id="cmpl-x-0")
    decode.expect(second)
    decode.add(first)
    if concurrent:
        decode.add(second)
        prefill.publish([*parts(first, decode.address), *parts(second, decode.address)], layers=[0, 1])
    else:
        prefill.publish(parts(first, decode.address), layers=[0, 1])
    prefill.wait_settled()
    decode.worker.call("abort", [first.name])
    decode.wait_reported(first, "aborted")
    decode.give_away(first, OTHER_OWNER)
    if concurrent:
        prefill.publish([*parts(first, decode.address), *parts(second, decode.address)], layers=[2, 3])
    else:
        decode.add(second)
        prefill.publish(parts(second, decode.address))
    decode.wait_reported(second, "done")
    prefill.wait_settled()
    assert decode.outcomes(first) == ["aborted"]
    assert decode.outcomes(second) == ["done"]
    decode.check()
    decode.check_baseline()


@pytest.mark.parametrize("lost", ["a layer", "a chunk"])
def test_l7_done_is_no_proof(pair: tuple[Prefill, Decode, Prompts], lost: str) -> None:
    prefill, decode, prompts = pair
    child = prompts.child(9)
    decode.add(child)
    first, second = parts(child, decode.address, 4)
    if lost == "a layer":
        prefill.publish([first], skip=[2])
    prefill.publish([second])
    reason = decode.wait_reported(child, "failed")
    assert "did not deliver" in reason or "never arrived" in reason
    prefill.wait_settled()
    assert decode.outcomes(child) == ["failed"]
    decode.check_baseline()


def test_l8_failed_then_done_is_one_report(pair: tuple[Prefill, Decode, Prompts]) -> None:
    prefill, decode, prompts = pair
    child = prompts.child(5)
    decode.add(child)
    decode.worker.call("control", ReadControl(fail_code=5))
    prefill.publish(parts(child, decode.address), layers=[0])
    prefill.wait_settled()
    decode.worker.call("control", ReadControl())
    prefill.publish(parts(child, decode.address), layers=[1, 2, 3])
    prefill.wait_settled()
    decode.wait_reported(child, "failed")
    stays("one report", lambda: decode.outcomes(child) == ["failed"], 0.4)
    decode.check_baseline()


def test_l9_parked_then_served(pair: tuple[Prefill, Decode, Prompts]) -> None:
    prefill, decode, prompts = pair
    child = prompts.child(5)
    decode.expect(child)
    prefill.publish(parts(child, decode.address))
    wait_for("parked", lambda: decode.worker.call("counts")[1] == 1)
    assert prefill.worker.call("outstanding") == SPEC.layers
    decode.add(child)
    decode.wait_reported(child, "done")
    decode.check()
    decode.check_baseline()


def test_l9_parked_then_refused(take_worker: Callable[[], Worker]) -> None:
    prefill = Prefill.start(take_worker(), SPEC)
    options = replace(DECODE_OPTIONS, park_timeout_s=0.3)
    decode = Decode.start(take_worker(), SPEC, trusted=[prefill.generation], options=options)
    child = Prompts(SPEC).child(5)
    prefill.publish(parts(child, decode.address))
    prefill.wait_settled()
    assert "not known in time" in (prefill.reason_of(child) or "") or "no such request" in (
        prefill.reason_of(child) or ""
    )
    decode.add(child)  # too late: a part of it has been refused, so it must not be served in part
    decode.wait_reported(child, "failed")
    decode.check()
    decode.check_baseline()


def test_l10_cached_prefix_is_never_rewritten(pair: tuple[Prefill, Decode, Prompts]) -> None:
    prefill, decode, prompts = pair
    first, second = prompts.child(6), prompts.child(8, start=3)
    decode.add(first)
    decode.expect(first, second)
    prefill.publish(parts(first, decode.address))
    decode.wait_reported(first, "done")
    # The second shares the first three blocks of the first on Decode; Prefill computed them with other words.
    decode.add(second)
    prefill.publish(parts(second, decode.address, 5)[:1])
    prefill.publish(parts(second, decode.address, 5)[1:])
    decode.wait_reported(second, "done")
    decode.check()
    decode.check_baseline()


def test_l10_blocks_before_the_destination_are_refused(pair: tuple[Prefill, Decode, Prompts]) -> None:
    prefill, decode, prompts = pair
    child = prompts.child(8, start=3)
    decode.add(child)
    (part,) = parts(child, decode.address)
    prefill.publish([replace(part, start=1)])
    prefill.wait_settled()
    assert "outside destination" in (prefill.reason_of(child) or "")
    decode.check()


def test_l11_a_contributor_dies(take_worker: Callable[[], Worker]) -> None:
    first = Prefill.start(take_worker(), SPEC, tp_size=2)
    options = replace(DECODE_OPTIONS, idle_timeout_s=1.0)
    decode = Decode.start(take_worker(), SPEC, trusted=[first.generation], options=options)
    child = Prompts(SPEC).child(6)
    decode.add(child)
    first.publish(parts(child, decode.address), ranks=[0])  # rank 1 never says a word
    first.wait_settled()
    assert "no KV arrived" in decode.wait_reported(child, "failed", 20.0)
    decode.check_baseline()


def test_l12_resumed_in_other_blocks(pair: tuple[Prefill, Decode, Prompts]) -> None:
    prefill, decode, prompts = pair
    child = prompts.child(8)
    decode.add(child)
    decode.expect(child)
    first, second = parts(child, decode.address, 4)
    prefill.publish([first])
    # Preempted at the last token: the blocks are freed and overwritten, the request comes back in others.
    prefill.worker.call("overwrite", child.p_main)
    moved = replace(child, p_main=prompts.p_main.take(8), p_indexer=prompts.p_indexer.take(8))
    prefill.publish([replace(first, child=moved)])
    prefill.publish([replace(second, child=moved)])
    decode.wait_reported(child, "done")
    decode.check()
    decode.check_baseline()


def test_l13_all_cached_on_prefill(pair: tuple[Prefill, Decode, Prompts]) -> None:
    prefill, decode, prompts = pair
    child = prompts.child(7)
    decode.add(child)
    decode.expect(child)
    (part,) = parts(child, decode.address)
    prefill.worker.call("write", [part])  # computed long ago by another request
    prefill.publish([part], write=False)
    decode.wait_reported(child, "done")
    stats = decode.worker.call("stats")
    assert stats["bytes_read"] == 7 * sum(SPEC.tensor_bytes) * SPEC.layers
    decode.check()


def test_prefill_failure_reaches_decode(pair: tuple[Prefill, Decode, Prompts]) -> None:
    prefill, decode, prompts = pair
    child = prompts.child(4)
    decode.add(child)
    (part,) = parts(child, decode.address)
    prefill.worker.call("fail_child", part, "out of memory")
    assert "out of memory" in decode.wait_reported(child, "failed")
    decode.check()
    decode.check_baseline()
