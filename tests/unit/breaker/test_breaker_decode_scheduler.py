"""Decode's scheduler half against the order in which vLLM really calls it."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "connector"))

from connector_standins import CONTRACT, GROUPS, RecordingControl, blocks

from rd2h.decode.scheduler import DecodeScheduler
from rd2h.timeline import Timeline

R = "cmpl-x-0-aaaaaaaa"


def params(**changes: Any) -> dict[str, Any]:
    return {"do_remote_prefill": True, "rendezvous_id": "rv", "x_request_id": "x", **changes}


def pulling(control: RecordingControl) -> DecodeScheduler:
    half = DecodeScheduler(GROUPS, CONTRACT, control, Timeline("D", None))
    half.allocated(R, params(), blocks(2), 32, 32)
    half.step([])
    return half


def test_a_failed_request_is_withdrawn_as_failed_with_its_reason() -> None:
    """vLLM (policy "fail") ends the request as an error first and hands the workers' report on after that."""
    control = RecordingControl()
    half = pulling(control)
    half.finished(R, params(do_remote_prefill=False), error=True)
    half.note_reasons({R: "reading 'l0': connection refused"})
    half.received([R], [R])
    assert control.withdrawn == [(R, "failed", "reading 'l0': connection refused")]
    assert half.pulling == 0


def test_an_error_from_elsewhere_still_fences_the_request() -> None:
    """The workers have not ended it: they must, or vLLM waits for ever."""
    control = RecordingControl()
    half = pulling(control)
    half.finished(R, params(do_remote_prefill=False), error=True)
    assert half.step([]).aborts == [R]
    half.received([R], [])
    ((_, outcome, _),) = control.withdrawn
    assert outcome == "failed"


def test_the_fence_of_an_ended_request_does_not_meet_a_new_one_of_the_same_id() -> None:
    """L6: the workers would end the new request as aborted, and vLLM would decode from blocks that nobody filled."""
    control = RecordingControl()
    half = pulling(control)
    half.finished(R, params(do_remote_prefill=False))
    half.received([R], [])
    half.allocated(R, params(), blocks(2), 32, 32)
    step = half.step([])
    assert [pull.request_id for pull in step.pulls] == [R]
    assert step.aborts == []
    half.finished(R, params(do_remote_prefill=False))
    assert half.step([]).aborts == [R]
