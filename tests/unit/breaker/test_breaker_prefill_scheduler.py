"""Prefill's scheduler half: failures that come when the request itself is over."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "connector"))

from connector_standins import CONTRACT, GROUPS, RecordingControl, blocks, child_params, dispatch, scheduled

from rd2h.prefill import scheduler as scheduler_module
from rd2h.prefill.admission import AdmissionRules
from rd2h.prefill.scheduler import PrefillScheduler
from rd2h.steps import ChildFailure


def make(control: RecordingControl) -> PrefillScheduler:
    rules = AdmissionRules(1, CONTRACT.fingerprint(), require_registered=True, legacy_hosts=frozenset())
    return PrefillScheduler(GROUPS, CONTRACT, rules, control)


def computed(half: PrefillScheduler, number: int) -> ChildFailure:
    """A request is computed and over; then its only child's Decode could not be reached."""
    request_id = f"cmpl-x-{number}-bbbbbbbb"
    half.track(request_id, dispatch(child_params(token=number)), 16)
    step = half.step([scheduled(request_id, 0, 16, blocks(1), fresh=True)], [])
    half.finished(request_id, {"do_remote_decode": True})
    return ChildFailure(step.publications[0].child, "Decode 10.0.0.2:20050: no answer while connecting")


def test_a_failure_after_the_end_of_the_request_reaches_the_meta_service_once() -> None:
    """R5: a short prompt is over long before a connection times out; its Decode must not wait for its idle time."""
    control = RecordingControl()
    half = make(control)
    failure = computed(half, 1)
    half.worker_failures([failure])
    half.worker_failures([failure])
    assert control.failures == [("rv", (failure.child.request_id,), failure.reason)]


def test_ended_children_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_ENDED_CHILDREN", 2)
    control = RecordingControl()
    half = make(control)
    failures = [computed(half, number) for number in range(1, 6)]
    half.worker_failures(failures)
    assert len(control.failures) == 2
