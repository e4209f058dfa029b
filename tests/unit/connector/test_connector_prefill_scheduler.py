"""Prefill's scheduler half: what becomes readable in each step, for whom, and who learns of failures."""

from typing import Any

import pytest
from connector_standins import (
    BLOCK,
    CONTRACT,
    DENSE,
    GENERATION,
    GROUPS,
    RecordingControl,
    blocks,
    child_params,
    dispatch,
    scheduled,
    token_of,
)

from rd2h.control import DecodeAddress, Registered
from rd2h.groups import CacheGroups
from rd2h.layout import Contract
from rd2h.prefill.admission import AdmissionRules
from rd2h.prefill.scheduler import PrefillScheduler
from rd2h.steps import ChildFailure, Publication

P = "cmpl-x-0-bbbbbbbb"


def make(
    control: RecordingControl | None = None,
    *,
    contract: Contract = CONTRACT,
    groups: CacheGroups = GROUPS,
    tp_size: int = 1,
    require_registered: bool = True,
    legacy_hosts: frozenset[str] = frozenset(),
) -> PrefillScheduler:
    rules = AdmissionRules(tp_size, contract.fingerprint(), require_registered, legacy_hosts)
    return PrefillScheduler(groups, contract, rules, control)


def told(publication: Publication) -> tuple[str, int, list[int], list[int], bool]:
    return (
        publication.child.request_id,
        publication.start_block,
        list(publication.main_blocks),
        list(publication.indexer_blocks),
        publication.final,
    )


# --- ranges ---


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 31, 32, 33, 48])
def test_one_chunk_tells_every_block_rounded_up(prompt: int) -> None:
    half = make(RecordingControl())
    half.track(P, dispatch(child_params()), prompt)
    count = -(-prompt // BLOCK)
    main, indexer = blocks(count)
    step = half.step([scheduled(P, 0, prompt, (main, indexer), fresh=True)], [])
    (publication,) = step.publications
    assert told(publication) == ("cmpl-x-0-aaaaaaaa", 0, main, indexer, True)


def test_chunks_tell_whole_blocks_and_the_rest_at_the_end() -> None:
    half = make(RecordingControl())
    half.track(P, dispatch(child_params()), 100)
    main, indexer = blocks(7)
    seen = []
    for computed, now, new, fresh in [
        (0, 40, slice(0, 3), True),
        (40, 40, slice(3, 5), False),
        (80, 20, slice(5, 7), False),
    ]:
        step = half.step([scheduled(P, computed, now, (main[new], indexer[new]), fresh=fresh)], [])
        (publication,) = step.publications
        seen.append(told(publication)[1:])
    assert seen == [
        (0, main[0:2], indexer[0:2], False),
        (2, main[2:5], indexer[2:5], False),
        (5, main[5:7], indexer[5:7], True),
    ]
    # Decoding steps of the same request tell nothing more.
    assert half.step([scheduled(P, 100, 1)], []).publications == []


def test_a_chunk_within_a_block_tells_nothing_yet() -> None:
    half = make(RecordingControl())
    half.track(P, dispatch(child_params()), 40)
    main, indexer = blocks(3)
    assert half.step([scheduled(P, 0, 10, (main[:1], indexer[:1]), fresh=True)], []).publications == []
    (publication,) = half.step([scheduled(P, 10, 30, (main[1:], indexer[1:]))], []).publications
    assert told(publication)[1:] == (0, main, indexer, True)


def test_whole_prompt_in_prefills_prefix_cache_is_told_whole() -> None:
    """L13: vLLM computes only the last block anew; the blocks it found are published all the same."""
    half = make(RecordingControl())
    half.track(P, dispatch(child_params()), 64)
    main, indexer = blocks(4)
    (publication,) = half.step([scheduled(P, 48, 16, (main, indexer), fresh=True)], []).publications
    assert told(publication)[1:] == (0, main, indexer, True)


def test_blocks_cached_on_decode_are_not_told() -> None:
    half = make(RecordingControl())
    half.track(P, dispatch(child_params(remote_cached_tokens=32)), 100)
    main, indexer = blocks(7)
    first = half.step([scheduled(P, 0, 60, (main[:4], indexer[:4]), fresh=True)], [])
    assert [told(p)[1:] for p in first.publications] == [(2, main[2:3], indexer[2:3], False)]
    last = half.step([scheduled(P, 60, 40, (main[4:], indexer[4:]))], [])
    assert [told(p)[1:] for p in last.publications] == [(3, main[3:7], indexer[3:7], True)]


def test_prefix_hits_on_both_sides() -> None:
    """Prefill found 48 tokens, Decode has 16: blocks 1.. come, whoever computed them."""
    half = make(RecordingControl())
    half.track(P, dispatch(child_params(remote_cached_tokens=16)), 70)
    main, indexer = blocks(5)
    (publication,) = half.step([scheduled(P, 48, 22, (main, indexer), fresh=True)], []).publications
    assert told(publication)[1:] == (1, main[1:], indexer[1:], True)


def test_children_of_one_prompt_have_their_own_ranges() -> None:
    half = make(RecordingControl())
    a = child_params("0_cmpl-x-0-aaaaaaaa", 1, remote_cached_tokens=0, choice_index=0)
    b = child_params("1_cmpl-x-0-aaaaaaaa", 2, remote_cached_tokens=64, choice_index=1)
    half.track(P, dispatch(a, b), 80)
    main, indexer = blocks(5)
    step = half.step([scheduled(P, 0, 80, (main, indexer), fresh=True)], [])
    assert [told(p) for p in step.publications] == [
        ("0_cmpl-x-0-aaaaaaaa", 0, main, indexer, True),
        ("1_cmpl-x-0-aaaaaaaa", 4, main[4:], indexer[4:], True),
    ]


def test_a_child_that_has_everything_is_still_told_the_end() -> None:
    half = make(RecordingControl())
    half.track(P, dispatch(child_params(remote_cached_tokens=4096)), 32)
    main, indexer = blocks(2)
    (publication,) = half.step([scheduled(P, 0, 32, (main, indexer), fresh=True)], []).publications
    assert told(publication)[2:] == ([], [], True)


def test_group_order_does_not_matter() -> None:
    half = make(RecordingControl(), groups=CacheGroups(main=1, indexer=0, block_size_tokens=BLOCK))
    half.track(P, dispatch(child_params()), 20)
    main, indexer = blocks(2)
    (publication,) = half.step([scheduled(P, 0, 20, (indexer, main), fresh=True)], []).publications
    assert told(publication)[2:4] == (main, indexer)


def test_dense_model_tells_no_indexer() -> None:
    half = make(RecordingControl(), contract=DENSE, groups=CacheGroups(0, 0, BLOCK))
    half.track(P, dispatch(child_params()), 20)
    main, _ = blocks(2)
    (publication,) = half.step([scheduled(P, 0, 20, (main,), fresh=True)], []).publications
    assert told(publication)[2:4] == (main, [])


# --- preemption ---


def test_preempted_at_the_last_token_and_resumed_in_two_chunks() -> None:
    """L12: the blocks told last are those of the resumed life; nothing is told twice."""
    half = make(RecordingControl())
    half.track(P, dispatch(child_params()), 64)
    old_main, old_indexer = blocks(4, 100)
    step = half.step([scheduled(P, 0, 63, (old_main, old_indexer), fresh=True)], [])
    assert [told(p)[1:] for p in step.publications] == [(0, old_main[:3], old_indexer[:3], False)]
    # Preempted: another request gets its blocks. vLLM asks again for the connector's view when it resumes.
    half.track(P, dispatch(child_params()), 64)
    main, indexer = blocks(4, 500)
    step = half.step([scheduled(P, 0, 40, (main[:3], indexer[:3]), fresh=True)], [])
    assert step.publications == []
    assert step.writes.main == set(main[:3])
    step = half.step([scheduled(P, 40, 24, (main[3:], indexer[3:]))], [])
    assert [told(p)[1:] for p in step.publications] == [(3, main[3:], indexer[3:], True)]


def test_resumed_from_its_own_prefix_cache() -> None:
    half = make(RecordingControl())
    half.track(P, dispatch(child_params()), 64)
    main, indexer = blocks(4)
    half.step([scheduled(P, 0, 48, (main[:3], indexer[:3]), fresh=True)], [])
    again = [*main[:3], 900], [*indexer[:3], 1900]
    step = half.step([scheduled(P, 48, 16, again, fresh=True)], [])
    assert [told(p)[1:] for p in step.publications] == [(3, [900], [1900], True)]
    assert step.writes.main == {900}


# --- what a step overwrites ---


def test_writes_are_the_blocks_of_the_tokens_computed_now() -> None:
    half = make()
    main, indexer = blocks(7)
    step = half.step([scheduled("a", 40, 30, (main, indexer), fresh=True)], [])
    assert step.writes.main == set(main[2:5])
    assert step.writes.indexer == set(indexer[2:5])
    step = half.step([scheduled("a", 70, 1)], [])
    assert step.writes.main == {main[4]}


def test_same_id_again_in_the_step_after_the_first_ended() -> None:
    """With vLLM's random suffix off an id may come back while its end is still being told."""
    half = make()
    half.step([scheduled("a", 0, 16, blocks(1, 100), fresh=True)], [])
    step = half.step([scheduled("a", 0, 16, blocks(1, 300), fresh=True)], ["a"])
    assert step.writes.main == {300}


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
    half = make(RecordingControl())
    children = [child_params(f"c{i}", i, prompt_index=i) for i in range(3)]
    half.track(request_id, dispatch(*children, x_request_id=x), 16)
    step = half.step([scheduled(request_id, 0, 16, blocks(1), fresh=True)], [])
    assert [p.child.request_id for p in step.publications] == ["c1"]


def test_single_prompt_needs_no_id() -> None:
    half = make(RecordingControl())
    half.track("whatever", dispatch(child_params()), 16)
    assert len(half.step([scheduled("whatever", 0, 16, blocks(1), fresh=True)], []).publications) == 1


def test_request_that_cannot_be_placed_publishes_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    half = make(RecordingControl())
    half.track("cmpl-other-0", dispatch(child_params("c0", 0), child_params("c1", 1, prompt_index=1)), 16)
    step = half.step([scheduled("cmpl-other-0", 0, 16, blocks(1), fresh=True)], [])
    assert (step.publications, step.failures) == ([], [])
    assert "cmpl-other-0" in caplog.text


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
def test_malformed_value_publishes_to_nobody_and_raises_nothing(key: str, value: object) -> None:
    half = make(RecordingControl())
    params = {**dispatch(child_params()), key: value}
    half.track(P, params, 16)
    step = half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], [])
    assert (step.publications, step.failures) == ([], [])
    half.finished(P, params)
    assert half.step([], [P]).failures == []


@pytest.mark.parametrize("batch", [[], {}, "x", 7, {"a": 7}, {"a": None}, {"a": []}, {"a": {}}])
def test_malformed_batch_publishes_to_nobody(batch: object) -> None:
    half = make(RecordingControl())
    params = {**dispatch(child_params()), "batch_kv_transfer_params": batch}
    half.track(P, params, 16)
    half.finished(P, params)
    assert half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], []).publications == []


@pytest.mark.parametrize("key", ["x_request_id", "rendezvous_id"])
@pytest.mark.parametrize("value", [None, 7, [], {"a": 1}])
def test_odd_ids_of_the_dispatch_do_not_matter_to_a_single_prompt(key: str, value: object) -> None:
    control = RecordingControl()
    half = make(control)
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
    half = make(control)
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
    half = make(None)
    half.track(P, dispatch(child_params()), 16)
    step = half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], [])
    assert (step.publications, step.failures) == ([], [])


def test_foreign_meta_service_in_the_parameters_is_ignored() -> None:
    half = make(RecordingControl())
    half.track(P, dispatch(child_params(), metaserver="grpc://192.0.2.1:1"), 16)
    assert len(half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], []).publications) == 1


# --- admission ---


def refused(half: PrefillScheduler, control: RecordingControl, params: dict[str, Any], prompt: int = 16) -> str:
    half.track(P, params, prompt)
    step = half.step([scheduled(P, 0, prompt, blocks(1), fresh=True)], [])
    assert step.publications == []
    (failure,) = step.failures
    (report,) = control.failures
    assert report == ("rv", (failure.child.request_id,), failure.reason)
    return failure.reason


def test_different_layout_is_refused_before_any_block() -> None:
    control = RecordingControl()
    assert "layout fingerprint differs" in refused(
        make(control), control, dispatch(child_params(layout_fingerprint="00"))
    )


def test_different_prompt_is_refused() -> None:
    control = RecordingControl()
    reason = refused(make(control), control, dispatch(child_params(prompt_tokens=17)))
    assert "16 tokens on Prefill and 17 on Decode" in reason


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (2, 4), (3, 2)])
def test_tensor_parallel_sizes_that_do_not_pair_are_refused(p_tp: int, d_tp: int) -> None:
    control = RecordingControl()
    reason = refused(make(control, tp_size=p_tp), control, dispatch(child_params(remote_tp_size=d_tp)))
    assert str(p_tp) in reason
    assert str(d_tp) in reason


def test_legacy_decode_only_from_listed_hosts() -> None:
    legacy = child_params(token=1, generation=None, remote_host="10.0.0.9")
    del legacy["token"]
    assert make(RecordingControl(), legacy_hosts=frozenset({"10.0.0.9"})).step([], []).publications == []
    for hosts, publications in ((frozenset[str](), 0), (frozenset({"10.0.0.9"}), 1)):
        half = make(RecordingControl(), legacy_hosts=hosts)
        half.track(P, dispatch(legacy), 16)
        step = half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], [])
        assert len(step.publications) == publications


def test_one_bad_child_does_not_harm_its_siblings() -> None:
    control = RecordingControl()
    half = make(control)
    good = child_params("good", 1)
    half.track(P, dispatch(good, child_params("bad", 2, layout_fingerprint="00")), 16)
    step = half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], [])
    assert [p.child.request_id for p in step.publications] == ["good"]
    assert [f.child.request_id for f in step.failures] == ["bad"]


# --- ends ---


def test_ended_before_it_was_scheduled() -> None:
    control = RecordingControl()
    half = make(control)
    half.finished(P, dispatch(child_params("a", 1), child_params("b", 2)))
    step = half.step([], [P])
    assert [(f.child.request_id, f.reason) for f in step.failures] == [
        (child, "Prefill ended the request before it was computed") for child in ("a", "b")
    ]
    assert control.failures == [("rv", ("a", "b"), "Prefill ended the request before it was computed")]


def test_aborted_in_the_middle() -> None:
    control = RecordingControl()
    half = make(control)
    half.track(P, dispatch(child_params()), 64)
    half.step([scheduled(P, 0, 32, blocks(2), fresh=True)], [])
    half.finished(P, dispatch(child_params()))
    step = half.step([], [P])
    assert [f.reason for f in step.failures] == ["Prefill ended the request before all KV was computed"]
    assert len(control.failures) == 1
    assert half.step([], []).failures == []


def test_finished_after_the_end_was_told_fails_nobody() -> None:
    control = RecordingControl()
    half = make(control)
    half.track(P, dispatch(child_params()), 16)
    half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], [])
    half.finished(P, dispatch(child_params()))
    assert half.step([], [P]).failures == []
    assert control.failures == []


def test_ordinary_request_is_nobodys_business() -> None:
    control = RecordingControl()
    half = make(control)
    half.finished("r", {})
    half.finished("r", {"do_remote_prefill": True})
    assert half.step([], []).failures == []
    assert control.failures == []


def test_a_refused_child_is_reported_once() -> None:
    """Its request ends later like any other; the first reason stays the only one."""
    control = RecordingControl()
    half = make(control)
    params = dispatch(child_params(prompt_tokens=99))
    refused(half, control, params)
    half.track(P, params, 16)  # resumed after a preemption
    half.finished(P, params)
    assert half.step([], [P]).failures == []
    assert len(control.failures) == 1


def test_worker_failures_stop_the_child_and_nobody_else() -> None:
    control = RecordingControl()
    half = make(control)
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
    half = make(RecordingControl(), legacy_hosts=frozenset({"10.0.0.9"}))
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
    half = make(control)
    half.track(P, dispatch(child_params()), 32)
    main, indexer = blocks(2)
    half.step([scheduled(P, 0, 16, (main[:1], indexer[:1]), fresh=True)], [])
    control.now_registered = Registered(frozenset(), frozenset({DecodeAddress(1, "other", 1)}))
    assert len(half.step([scheduled(P, 16, 16, (main[1:], indexer[1:]))], []).publications) == 1


def test_tokens_are_what_decode_issued() -> None:
    half = make(RecordingControl())
    half.track(P, dispatch(child_params(token=0xABC)), 16)
    (publication,) = half.step([scheduled(P, 0, 16, blocks(1), fresh=True)], []).publications
    assert publication.child.token == bytes.fromhex(token_of(0xABC))
