"""Prefill's scheduler half: requests that end, children that fail, and who learns of it."""

from connector_standins import (
    P,
    RecordingControl,
    blocks,
    child_params,
    dispatch,
    prefill_half,
    refused,
    scheduled,
    token_of,
)

from rd2h.control import DecodeAddress, Registered
from rd2h.steps import ChildFailure


def test_ended_before_it_was_scheduled() -> None:
    control = RecordingControl()
    half = prefill_half(control)
    half.finished(P, dispatch(child_params("a", 1), child_params("b", 2)))
    step = half.step([], [P])
    assert [(f.child.request_id, f.reason) for f in step.failures] == [
        (child, "Prefill ended the request before it was computed") for child in ("a", "b")
    ]
    assert control.failures == [("rv", ("a", "b"), "Prefill ended the request before it was computed")]


def test_aborted_in_the_middle() -> None:
    control = RecordingControl()
    half = prefill_half(control)
    half.track(P, dispatch(child_params()), 64)
    half.step([scheduled(P, 0, 32, blocks(2), fresh=True)], [])
    half.finished(P, dispatch(child_params()))
    step = half.step([], [P])
    assert [f.reason for f in step.failures] == ["Prefill ended the request before all KV was computed"]
    assert len(control.failures) == 1
    assert half.step([], []).failures == []


def test_finished_after_the_end_was_told_fails_nobody() -> None:
    control = RecordingControl()
    half = prefill_half(control)
    half.track(P, dispatch(child_params()), 16)
    half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], [])
    half.finished(P, dispatch(child_params()))
    assert half.step([], [P]).failures == []
    assert control.failures == []


def test_ended_as_an_error_fails_children_that_were_told_everything() -> None:
    """A store beside us could not load a prefix: what was published in that step is not the prompt's KV."""
    control = RecordingControl()
    half = prefill_half(control)
    half.track(P, dispatch(child_params()), 16)
    half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], [])
    half.finished(P, dispatch(child_params()), error=True)
    assert [f.reason for f in half.step([], [P]).failures] == ["Prefill ended the request as an error"]
    assert [children for _, children, _ in control.failures] == [("cmpl-x-0-aaaaaaaa",)]


def test_ordinary_request_is_nobodys_business() -> None:
    control = RecordingControl()
    half = prefill_half(control)
    half.finished("r", {})
    half.finished("r", {"do_remote_prefill": True})
    assert half.step([], []).failures == []
    assert control.failures == []


def test_a_refused_child_is_reported_once() -> None:
    """Its request ends later like any other; the first reason stays the only one."""
    control = RecordingControl()
    half = prefill_half(control)
    params = dispatch(child_params(prompt_tokens=99))
    refused(half, control, params)
    half.track(P, params, 16)  # resumed after a preemption
    half.finished(P, params)
    assert half.step([], [P]).failures == []
    assert len(control.failures) == 1


def test_worker_failures_stop_the_child_and_nobody_else() -> None:
    control = RecordingControl()
    half = prefill_half(control)
    half.track(P, dispatch(child_params("a", 1), child_params("b", 2), child_params("c", 3)), 64)
    main, indexer = blocks(4)
    step = half.step([scheduled(P, 0, 32, (main[:2], indexer[:2]), fresh=True)], [])
    by_id = {p.child.request_id: p.child for p in step.publications}
    half.worker_failures([ChildFailure(by_id["a"], "peer lost"), ChildFailure(by_id["b"], "refused")])
    assert control.failures == [("rv", ("a",), "peer lost"), ("rv", ("b",), "refused")]
    step = half.step([scheduled(P, 32, 32, (main[2:], indexer[2:]))], [])
    assert [p.child.request_id for p in step.publications] == ["c"]


def test_a_legacy_childs_failure_leaves_other_legacy_children_alone() -> None:
    """Legacy children have no token, so a token does not tell them apart."""
    half = prefill_half(RecordingControl(), legacy_hosts=frozenset({"10.0.0.9"}))
    for name in ("cmpl-a-0", "cmpl-b-0"):
        legacy = child_params(name, generation=None, remote_host="10.0.0.9")
        del legacy["token"]
        half.track(f"{name}-aaaaaaaa", dispatch(legacy), 64)
    table = blocks(2)
    step = half.step([scheduled(f"{n}-aaaaaaaa", 0, 32, table, fresh=True) for n in ("cmpl-a-0", "cmpl-b-0")], [])
    failed = next(p.child for p in step.publications if p.child.request_id == "cmpl-a-0")
    half.worker_failures([ChildFailure(failed, "no such rank")])
    step = half.step([scheduled(f"{n}-aaaaaaaa", 32, 32, blocks(2, 300)) for n in ("cmpl-a-0", "cmpl-b-0")], [])
    assert [p.child.request_id for p in step.publications] == ["cmpl-b-0"]


def test_a_decode_that_leaves_the_registry_keeps_what_was_admitted() -> None:
    """Admission is at the start; what happens to the peer later is the publisher's business."""
    control = RecordingControl()
    half = prefill_half(control)
    half.track(P, dispatch(child_params()), 32)
    main, indexer = blocks(2)
    half.step([scheduled(P, 0, 16, (main[:1], indexer[:1]), fresh=True)], [])
    control.now_registered = Registered(frozenset(), frozenset({DecodeAddress(1, "other", 1)}))
    assert len(half.step([scheduled(P, 16, 16, (main[1:], indexer[1:]))], []).publications) == 1


def test_tokens_are_what_decode_issued() -> None:
    half = prefill_half(RecordingControl())
    half.track(P, dispatch(child_params(token=0xABC)), 16)
    (publication,) = half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], []).publications
    assert publication.child.token == bytes.fromhex(token_of(0xABC))
