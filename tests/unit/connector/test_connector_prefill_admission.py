"""Prefill's scheduler half: for whom a request computes, and who is refused."""

from typing import Any

import pytest
from connector_standins import (
    GENERATION,
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

# --- ids ---


@pytest.mark.parametrize(
    ("x", "request_id"),
    [
        ("x", "cmpl-x-1-12345678"),
        ("x", "cmpl-x-1"),
        ("a.*b(", "cmpl-a.*b(-1-12345678"),
        ("用户-1", "cmpl-用户-1-1-abcdef01"),
        ("cmpl-x-0", "cmpl-cmpl-x-0-1-abcdef01"),
        ("a-0", "cmpl-a-0-1"),
        ("x" * 400, f"cmpl-{'x' * 400}-1"),
    ],
)
def test_prompt_of_a_list_is_found_by_the_id_that_the_proxy_chose(x: str, request_id: str) -> None:
    half = prefill_half(RecordingControl())
    children = [child_params(f"c{i}", i, prompt_index=i) for i in range(3)]
    half.track(request_id, dispatch(*children, x_request_id=x), 16)
    step = half.step([scheduled(request_id, 0, 16, blocks(1), fresh=True)], [])
    assert [p.child.request_id for p in step.publications] == ["c1"]


def test_single_prompt_needs_no_id() -> None:
    half = prefill_half(RecordingControl())
    half.track("whatever", dispatch(child_params()), 16)
    assert len(half.step([scheduled("whatever", 0, 16, blocks(1), fresh=True)], []).publications) == 1


UNPLACED = [("cmpl-other-0", "does not come from x_request_id"), ("cmpl-x-7-bbbbbbbb", "has prompt_index 7")]


@pytest.mark.parametrize(("request_id", "why"), UNPLACED)
@pytest.mark.parametrize("end", ["scheduled", "never scheduled"])
def test_request_that_cannot_be_placed_fails_its_dispatch(request_id: str, why: str, end: str) -> None:
    """Nobody else would tell Decode: it would wait until its idle time is over."""
    control = RecordingControl()
    half = prefill_half(control)
    params = dispatch(child_params("c0", 0), child_params("c1", 1, prompt_index=1, remote_host="192.0.2.1"))
    if end == "scheduled":
        half.track(request_id, params, 16)
    else:
        half.finished(request_id, params)
    step = half.step([scheduled(request_id, 0, 16, blocks(1), fresh=True)], [])
    assert step.publications == []
    # The address of c1 is not one that anything may be sent to; the meta service tells it.
    assert [failure.child.request_id for failure in step.failures] == ["c0"]
    ((rendezvous_id, children, reason),) = control.failures
    assert (rendezvous_id, children) == ("rv", ("c0", "c1"))
    assert why in reason
    assert reason == step.failures[0].reason
    if end == "scheduled":
        half.finished(request_id, params)
        assert half.step([], [request_id]).failures == []
        assert len(control.failures) == 1


# --- malformed and foreign parameters ---


MALFORMED: list[tuple[str, object]] = [
    *[("request_id", value) for value in (7, "", None, "x" * 513, ["a"])],
    *[("remote_engine_id", value) for value in (7, "", "x" * 257)],
    *[("remote_host", value) for value in (7, "", "x" * 257, ["h"])],
    *[("remote_port", value) for value in ("20050", 0, -1, 65536, True, 1.5, [1], 1 << 80)],
    *[("remote_tp_size", value) for value in (0, -1, "1", True, 1.0, 1 << 20)],
    *[("remote_pcp_size", value) for value in (2, 0, "1")],
    *[("remote_dcp_size", value) for value in (2, None, [])][:1],
    *[("remote_cached_tokens", value) for value in (-1, "0", 1 << 40, True)],
    *[("prompt_index", value) for value in (-1, "0", 1 << 20)],
    *[("prompt_tokens", value) for value in (-1, "3", 1 << 40)],
    *[("token", value) for value in ("", "zz", "AB" * 16, "0" * 31, 7, "0" * 33, "0" * 32 + "\n")],
    *[("generation", value) for value in (0, -1, "7", True, 1 << 64)],
    *[("layout_fingerprint", value) for value in ("xyz", "abc", 7, "00" * 65)],
]


@pytest.mark.parametrize(("key", "value"), MALFORMED)
@pytest.mark.parametrize("end", ["scheduled", "never scheduled"])
def test_malformed_value_publishes_to_nobody_and_tells_whom_it_can(key: str, value: object, end: str) -> None:
    control = RecordingControl()
    half = prefill_half(control)
    params = {**dispatch(child_params()), key: value}
    if end == "scheduled":
        half.track(P, params, 16)
    half.finished(P, params)
    step = half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], [P])
    assert step.publications == []
    ((rendezvous_id, children, reason),) = control.failures
    # Without its id it cannot be told from others of the rendezvous, so none of these gets anything.
    assert (rendezvous_id, children) == ("rv", () if key == "request_id" else ("cmpl-x-0-aaaaaaaa",))
    assert key in reason
    unreachable = key in ("remote_host", "remote_port", "remote_tp_size", "token", "generation")
    assert [failure.child.token for failure in step.failures] == ([] if unreachable else [bytes.fromhex(token_of(1))])


def test_a_broken_child_at_a_foreign_address_is_told_nothing_directly() -> None:
    control = RecordingControl()
    half = prefill_half(control)
    half.track(P, dispatch(child_params(prompt_index=-1, remote_host="192.0.2.1")), 16)
    assert half.step([], []).failures == []
    assert [children for _, children, _ in control.failures] == [("cmpl-x-0-aaaaaaaa",)]


def test_a_broken_child_of_a_batch_fails_alone() -> None:
    control = RecordingControl()
    half = prefill_half(control)
    half.track(P, dispatch(child_params("good", 1), child_params("bad", 2, remote_cached_tokens=-1)), 16)
    step = half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], [])
    assert [publication.child.request_id for publication in step.publications] == ["good"]
    assert [failure.child.token for failure in step.failures] == [bytes.fromhex(token_of(2))]
    assert [children for _, children, _ in control.failures] == [("bad",)]


@pytest.mark.parametrize(
    ("batch", "children"),
    [
        *((batch, ()) for batch in ([], {}, "x", 7)),
        *((batch, ("a",)) for batch in ({"a": 7}, {"a": None}, {"a": []}, {"a": {}})),
    ],
)
def test_malformed_batch_publishes_to_nobody(batch: object, children: tuple[str, ...]) -> None:
    control = RecordingControl()
    half = prefill_half(control)
    params = {**dispatch(child_params()), "batch_kv_transfer_params": batch}
    half.track(P, params, 16)
    half.finished(P, params)
    assert half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], []).publications == []
    assert [failed for _, failed, _ in control.failures] == [children]


def test_no_report_names_more_children_than_the_meta_service_takes() -> None:
    control = RecordingControl()
    half = prefill_half(control)
    half.finished(P, dispatch(*(child_params(f"c{i}", i) for i in range(5000))))
    assert [len(children) for _, children, _ in control.failures] == [4096, 904]


@pytest.mark.parametrize("key", ["x_request_id", "rendezvous_id"])
@pytest.mark.parametrize("value", [None, 7, [], {"a": 1}])
def test_odd_ids_of_the_dispatch_do_not_matter_to_a_single_prompt(key: str, value: object) -> None:
    control = RecordingControl()
    half = prefill_half(control)
    half.track(P, {**dispatch(child_params()), key: value}, 16)
    assert len(half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], []).publications) == 1


FOREIGN: list[dict[str, Any]] = [
    {"remote_host": "192.0.2.1"},
    {"remote_port": 20051},
    {"generation": GENERATION + 1},
]


@pytest.mark.parametrize("changes", FOREIGN)
@pytest.mark.parametrize("end", ["scheduled", "never scheduled"])
def test_foreign_address_is_never_told_anything(changes: dict[str, Any], end: str) -> None:
    """R7: no block, and no notice of a failure either: that would be a connection too."""
    control = RecordingControl()
    half = prefill_half(control)
    params = dispatch(child_params(**changes))
    if end == "scheduled":
        half.track(P, params, 16)
        step = half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], [])
        assert (step.publications, step.failures) == ([], [])
        assert control.failures[0][:2] == ("rv", ("cmpl-x-0-aaaaaaaa",))
        assert "is registered at" in control.failures[0][2]
    half.finished(P, params)
    assert half.step([], [P]).failures == []


def test_without_meta_service_nothing_can_be_verified() -> None:
    half = prefill_half(None)
    half.track(P, dispatch(child_params()), 16)
    step = half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], [])
    assert (step.publications, step.failures) == ([], [])


def test_foreign_meta_service_in_the_parameters_is_ignored() -> None:
    half = prefill_half(RecordingControl())
    half.track(P, dispatch(child_params(), metaserver="grpc://192.0.2.1:1"), 16)
    assert len(half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], []).publications) == 1


# --- admission ---


def test_different_layout_is_refused_before_any_block() -> None:
    control = RecordingControl()
    assert "layout fingerprint differs" in refused(
        prefill_half(control), control, dispatch(child_params(layout_fingerprint="00"))
    )


def test_different_prompt_is_refused() -> None:
    control = RecordingControl()
    reason = refused(prefill_half(control), control, dispatch(child_params(prompt_tokens=17)))
    assert "16 tokens on Prefill and 17 on Decode" in reason


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (2, 4), (3, 2)])
def test_tensor_parallel_sizes_that_do_not_pair_are_refused(p_tp: int, d_tp: int) -> None:
    control = RecordingControl()
    reason = refused(prefill_half(control, tp_size=p_tp), control, dispatch(child_params(remote_tp_size=d_tp)))
    assert str(p_tp) in reason
    assert str(d_tp) in reason


def test_legacy_decode_only_from_listed_hosts() -> None:
    legacy = child_params(token=1, generation=None, remote_host="10.0.0.9")
    del legacy["token"]
    assert prefill_half(RecordingControl(), legacy_hosts=frozenset({"10.0.0.9"})).step([], []).publications == []
    for hosts, publications in ((frozenset[str](), 0), (frozenset({"10.0.0.9"}), 1)):
        half = prefill_half(RecordingControl(), legacy_hosts=hosts)
        half.track(P, dispatch(legacy), 16)
        step = half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], [])
        assert len(step.publications) == publications


def test_one_bad_child_does_not_harm_its_siblings() -> None:
    control = RecordingControl()
    half = prefill_half(control)
    good = child_params("good", 1)
    half.track(P, dispatch(good, child_params("bad", 2, layout_fingerprint="00")), 16)
    step = half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], [])
    assert [p.child.request_id for p in step.publications] == ["good"]
    assert [f.child.request_id for f in step.failures] == ["bad"]
