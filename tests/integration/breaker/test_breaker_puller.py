"""Attacks on Decode's puller: engines that raise, shutdown in odd orders."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from harness.cache import CacheSpec
from harness.controlled import ReadControl
from harness.decode_side import DecodeSide
from harness.pair import DECODE_OPTIONS, Prompts, new_generation, parts
from harness.plans import DecodeAddress, Report
from harness.prefill_side import PrefillSide
from harness.waiting import wait_for

from rd2h.engines import ReadResult

SPEC = CacheSpec(layers=2, blocks=32)


class Pair:
    """Both sides in this process: a test reaches into their parts."""

    def __init__(self) -> None:
        self.p_generation, self.d_generation = new_generation(), new_generation()
        self.prefill = PrefillSide(SPEC, self.p_generation)
        options = replace(DECODE_OPTIONS, generation=self.d_generation, read_threads=1)
        self.decode = DecodeSide(SPEC, options, trusted=[self.p_generation])
        self.address = DecodeAddress(self.decode.base_port(), self.d_generation)
        self.prompts = Prompts(SPEC)
        self.reports: list[Report] = []

    def outcome(self, name: str) -> list[str]:
        self.reports += self.decode.take_finished()
        return [report.outcome for report in self.reports if report.name == name]


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.prefill.close()
    made.decode.close()


def test_an_engine_that_raises_fails_the_request_and_nothing_else(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that never ends in the books would keep its request, and vLLM's blocks, for ever."""
    bad, good = pair.prompts.child(4), pair.prompts.child(4)
    pair.decode.add([bad, good])
    engine = pair.decode._ranks[0].engine

    def raises(*_: object) -> ReadResult:
        raise OverflowError("a defect in the engine")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "batch_transfer_sync_read", raises)
        pair.prefill.publish(parts(bad, pair.address))
        wait_for("the request has failed", lambda: pair.outcome(bad.name), 10)
    assert pair.outcome(bad.name) == ["failed"]
    pair.prefill.publish(parts(good, pair.address))
    wait_for("the other is served", lambda: pair.outcome(good.name), 10)
    assert pair.outcome(good.name) == ["done"]
    assert pair.decode.alive()
    assert pair.decode.counts() == (0, 0, 0)


def test_close_may_come_twice_and_late_calls_do_no_harm(pair: Pair) -> None:
    child = pair.prompts.child(2)
    puller = pair.decode._ranks[0].puller
    puller.close()
    puller.close()
    pair.decode.add([child])
    pair.decode.abort([child.name])
    assert [report.outcome for report in pair.decode.take_finished()] == ["aborted"]


def test_close_waits_for_a_read_and_answers_nothing_after_it(pair: Pair) -> None:
    child = pair.prompts.child(4)
    pair.decode.add([child])
    pair.decode.control(ReadControl(after_s=0.5))
    pair.prefill.publish(parts(child, pair.address))
    wait_for("a read runs", lambda: pair.decode.counts()[2] == 1)
    begin = time.monotonic()
    closer = threading.Thread(target=pair.decode._ranks[0].puller.close)
    closer.start()
    closer.join(10)
    assert not closer.is_alive()
    assert time.monotonic() - begin < 5
    assert pair.decode.reads()[0] == 1
