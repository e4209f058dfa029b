"""Decode's worker half: what a step hands to the puller, and that every request is reported once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rd2h.children import ChildSpec, Finished, Outcome
from rd2h.decode.worker import DecodeWorker
from rd2h.steps import DecodeStep, Pull, Refused


@dataclass
class RecordingPuller:
    """Calls in their order; ``finished`` is set by the test."""

    calls: list[tuple[str, Any]] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    alive: bool = True

    def trust(self, generations: frozenset[int]) -> None:
        self.calls.append(("trust", generations))

    def add(self, specs: Sequence[ChildSpec]) -> None:
        self.calls.append(("add", list(specs)))

    def abort(self, request_ids: Sequence[str]) -> None:
        self.calls.append(("abort", list(request_ids)))

    def fail(self, token: bytes, reason: str) -> None:
        self.calls.append(("fail", (token, reason)))

    def take_finished(self) -> list[Finished]:
        finished, self.finished = self.finished, []
        return finished


def make() -> tuple[DecodeWorker, RecordingPuller]:
    puller = RecordingPuller()
    double: Any = puller
    return DecodeWorker(double), puller


def pull(request_id: str, token: bytes = b"t" * 16) -> Pull:
    return Pull(token, request_id, "external", [5, 6], [15, 16], 2)


def ended(request_id: str, outcome: Outcome, reason: str = "") -> Finished:
    return Finished(request_id, b"t" * 16, outcome, reason)


def test_a_step_is_handed_on_in_the_order_that_loses_nothing() -> None:
    """Trust before destinations, destinations before fences and failures that may concern them."""
    worker, puller = make()
    worker.begin(DecodeStep([pull("a")], ["a"], [(b"t" * 16, "late")], [], frozenset({7})))
    assert [name for name, _ in puller.calls] == ["trust", "add", "abort", "fail"]
    (spec,) = puller.calls[1][1]
    assert (spec.request_id, spec.external_id, spec.main_start, spec.indexer_start) == ("a", "external", 2, 2)
    assert (spec.main_blocks.tolist(), spec.indexer_blocks.tolist()) == ([5, 6], [15, 16])
    worker.begin(DecodeStep())
    assert len(puller.calls) == 4


def test_every_end_is_reported_once_in_the_sets_that_vllm_expects(caplog: pytest.LogCaptureFixture) -> None:
    worker, puller = make()
    puller.finished = [ended("d", Outcome.DONE), ended("f", Outcome.FAILED, "peer lost"), ended("a", Outcome.ABORTED)]
    worker.begin(DecodeStep(refused=[Refused("r", "no meta_service", [9])]))
    results = worker.results()
    assert (results.received, results.failed) == ({"d", "f", "a", "r"}, {"f", "r"})
    assert "request f failed: peer lost" in caplog.text
    assert worker.take_reasons() == {"f": "peer lost"}
    again = worker.results()
    assert (again.received, again.failed, worker.take_reasons()) == (set(), set(), {})


def test_older_vllm_learns_of_failures_by_blocks_and_of_aborts_not() -> None:
    worker, puller = make()
    worker.begin(DecodeStep([pull("f"), pull("a", b"u" * 16)], refused=[Refused("r", "x", [9])]))
    puller.finished = [ended("f", Outcome.FAILED, "x"), ended("a", Outcome.ABORTED)]
    assert worker.results_with_invalid_blocks() == {"f", "a", "r"}
    assert worker.take_invalid_blocks() == {5, 6, 9}
    assert worker.take_invalid_blocks() == set()
