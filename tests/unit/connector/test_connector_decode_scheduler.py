"""Decode's scheduler half: adverts, destinations, aborts and ends, whatever the order of events."""

from typing import Any

import pytest
from connector_standins import BLOCK, CONTRACT, DENSE, GROUPS, RecordingControl, blocks, scheduled

from rd2h.control import Notice, Registered
from rd2h.decode.scheduler import DecodeScheduler
from rd2h.groups import CacheGroups
from rd2h.steps import Pull
from rd2h.timeline import Timeline

R = "cmpl-x-0-aaaaaaaa"


def make(control: RecordingControl | None, **changes: Any) -> DecodeScheduler:
    values = {"groups": GROUPS, "contract": CONTRACT, **changes}
    return DecodeScheduler(values["groups"], values["contract"], control, Timeline("D", None))


def params(**changes: Any) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "metaserver": "grpc://meta:1",
        "rendezvous_id": "rv",
        "x_request_id": "x",
        **changes,
    }


def ranges(pull: Pull) -> tuple[int, list[int], list[int]]:
    return pull.start_block, list(pull.main_blocks), list(pull.indexer_blocks)


# --- adverts and destinations ---


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 33, 48])
def test_nothing_cached_everything_is_pulled(prompt: int) -> None:
    control = RecordingControl()
    half = make(control)
    assert half.remaining_tokens(prompt, 0) == prompt
    main, indexer = blocks(-(-prompt // BLOCK))
    given = params()
    half.allocated(R, given, (main, indexer), prompt, prompt)
    (advert,) = control.adverts
    assert (advert.rendezvous_id, advert.request_id, advert.cached_tokens, advert.prompt_tokens) == ("rv", R, 0, prompt)
    assert given["do_remote_prefill"] is False
    step = half.step([])
    (pull,) = step.pulls
    assert ranges(pull) == (0, main, indexer)
    assert (pull.token, pull.request_id, pull.external_id) == (advert.token, R, "cmpl-x-0")
    assert half.step([]).pulls == []


def test_shared_prefix_blocks_are_not_pulled() -> None:
    """L10: blocks that Decode already has, perhaps shared with other requests, are no destination."""
    control = RecordingControl()
    half = make(control)
    main, indexer = blocks(5)
    assert half.remaining_tokens(70, 32) == 38
    half.allocated(R, params(), (main, indexer), 70, 38)
    assert control.adverts[0].cached_tokens == 32
    assert ranges(half.step([]).pulls[0]) == (2, main[2:], indexer[2:])


def test_blocks_beyond_the_prompt_are_no_destination() -> None:
    """vLLM may allocate look-ahead blocks for speculation."""
    half = make(RecordingControl())
    main, indexer = blocks(6)
    half.allocated(R, params(), (main, indexer), 40, 40)
    assert ranges(half.step([]).pulls[0]) == (0, main[:3], indexer[:3])


def test_group_order_and_dense_models() -> None:
    main, indexer = blocks(2)
    half = make(RecordingControl(), groups=CacheGroups(1, 0, BLOCK))
    half.allocated(R, params(), (indexer, main), 20, 20)
    assert ranges(half.step([]).pulls[0]) == (0, main, indexer)
    half = make(RecordingControl(), groups=CacheGroups(0, 0, BLOCK), contract=DENSE)
    half.allocated(R, params(), (main,), 20, 20)
    assert ranges(half.step([]).pulls[0]) == (0, main, [])


def test_tokens_are_random_and_never_the_same() -> None:
    control = RecordingControl()
    half = make(control)
    for i in range(50):
        half.allocated(f"cmpl-x-{i}-aaaaaaaa", params(), blocks(1), 16, 16)
    tokens = {advert.token for advert in control.adverts}
    assert len(tokens) == 50
    assert {len(token) for token in tokens} == {16}


@pytest.mark.parametrize(
    ("request_id", "x", "place"),
    [
        ("cmpl-x-0-aaaaaaaa", "x", (0, 0)),
        ("cmpl-x-4", "x", (4, 0)),
        ("3_cmpl-x-4-aaaaaaaa", "x", (4, 3)),
        ("12_cmpl-x-10-aaaaaaaa", "x", (10, 12)),
        ("chatcmpl-x-aaaaaaaa", "x", (0, 0)),
        ("chatcmpl-x", "x", (0, 0)),
        ("1_chatcmpl-x-aaaaaaaa", "x", (0, 1)),
        ("1_chatcmpl-x", "x", (0, 1)),
        ("cmpl-0_cmpl-x-1-0-aaaaaaaa", "0_cmpl-x-1", (0, 0)),
        ("cmpl-cmpl-x-3-aaaaaaaa", "cmpl-x", (3, 0)),
        ("chatcmpl-a-deadbeef", "a-deadbeef", (0, 0)),
        ("cmpl-日本 \t'\"\\-7", "日本 \t'\"\\", (7, 0)),
        ("cmpl-.*[-0-aaaaaaaa", ".*[", (0, 0)),
    ],
)
def test_children_know_their_place(request_id: str, x: str, place: tuple[int, int]) -> None:
    control = RecordingControl()
    half = make(control)
    half.allocated(request_id, params(x_request_id=x), blocks(1), 16, 16)
    assert [(a.prompt_index, a.choice_index) for a in control.adverts] == [place]


# --- refusals ---


REFUSED: list[dict[str, Any]] = [
    {"rendezvous_id": None},
    {"rendezvous_id": ""},
    {"rendezvous_id": 7},
    {"rendezvous_id": "x" * 129},
    {"x_request_id": None},
    {"x_request_id": "y"},
    {"x_request_id": ""},
    {"x_request_id": ["x"]},
    {"x_request_id": "x" * 513},
]


@pytest.mark.parametrize("changes", REFUSED)
def test_malformed_parameters_fail_that_request_alone(changes: dict[str, Any]) -> None:
    control = RecordingControl()
    half = make(control)
    given = params(**changes)
    half.allocated(R, given, blocks(1), 16, 16)
    half.allocated("cmpl-x-1-bbbbbbbb", params(), blocks(1), 16, 16)
    step = half.step([])
    assert [(refused.request_id, refused.main_blocks) for refused in step.refused] == [(R, [100])]
    assert [pull.request_id for pull in step.pulls] == ["cmpl-x-1-bbbbbbbb"]
    assert given["do_remote_prefill"] is False
    half.received([R], [R])
    assert half.pulling == 1
    assert half.stats.take() == {"children_failed/not_advertised": 1}
    assert half.step([]).refused == []
    assert control.withdrawn == []


@pytest.mark.parametrize("metaserver", ["grpc://192.0.2.1:1", "http://192.0.2.1", None, 7, {"a": 1}])
def test_meta_service_of_the_parameters_is_never_looked_at(metaserver: object) -> None:
    """R7: adverts go to the configured service, whatever a client wrote."""
    control = RecordingControl()
    half = make(control)
    half.allocated(R, params(metaserver=metaserver, remote_host="192.0.2.1", remote_port=1), blocks(1), 16, 16)
    assert len(control.adverts) == 1


def test_no_meta_service_and_a_full_queue_refuse() -> None:
    half = make(None)
    half.allocated(R, params(), blocks(1), 16, 16)
    (refused,) = half.step([]).refused
    assert refused.reason == "no meta_service is configured on this Decode engine"
    control = RecordingControl(full=True)
    half = make(control)
    half.allocated(R, params(), blocks(1), 16, 16)
    step = half.step([])
    assert step.pulls == []
    assert "1024 adverts are open" in step.refused[0].reason


# --- ends ---


def pulling(control: RecordingControl) -> DecodeScheduler:
    half = make(control)
    half.allocated(R, params(), blocks(2), 20, 20)
    half.step([])
    return half


def test_done() -> None:
    control = RecordingControl()
    half = pulling(control)
    half.received([R], [])
    assert control.withdrawn == [(R, "done", "")]
    assert half.pulling == 0
    half.finished(R, params(do_remote_prefill=False))
    assert half.step([]).aborts == []
    assert len(control.withdrawn) == 1


def test_failed() -> None:
    control = RecordingControl()
    half = pulling(control)
    half.received([R], [R])
    assert control.withdrawn == [(R, "failed", "Decode could not receive its KV")]
    half.finished(R, params(do_remote_prefill=False))
    assert half.step([]).aborts == []


def test_a_workers_reason_reaches_the_meta_service() -> None:
    """It may come with an earlier step than the report, which waits for every rank."""
    control = RecordingControl()
    half = pulling(control)
    half.note_reasons({R: "reading 'l0': connection refused", "unknown": "x"})
    half.received([], [])
    half.received([R], [R])
    assert control.withdrawn == [(R, "failed", "reading 'l0': connection refused")]


@pytest.mark.parametrize("failed", [[], [R]])
def test_aborted_while_pulling(failed: list[str]) -> None:
    """L1: fenced in the next step, and forgotten when the workers report it."""
    control = RecordingControl()
    half = pulling(control)
    half.finished(R, params(do_remote_prefill=False))
    half.finished(R, params(do_remote_prefill=False))
    assert control.withdrawn == [(R, "aborted", "aborted by its client")]
    assert half.step([]).aborts == [R]
    assert half.step([]).aborts == []
    assert half.pulling == 1
    half.received([R], failed)
    assert half.pulling == 0
    assert len(control.withdrawn) == 1


def test_aborted_in_the_step_of_its_advert() -> None:
    """The destination and the fence reach the worker together, in this order."""
    control = RecordingControl()
    half = make(control)
    half.allocated(R, params(), blocks(1), 16, 16)
    half.finished(R, params(do_remote_prefill=False))
    step = half.step([])
    assert [pull.request_id for pull in step.pulls] == step.aborts == [R]


def test_refused_and_aborted_is_reported_once() -> None:
    half = make(None)
    half.allocated(R, params(), blocks(1), 16, 16)
    half.finished(R, params(do_remote_prefill=False))
    step = half.step([])
    assert [refused.request_id for refused in step.refused] == [R]
    assert step.aborts == []
    half.received([R], [R])
    assert half.pulling == 0


def test_aborted_before_it_was_scheduled() -> None:
    """R4: the waiter learns of it although nothing was ever advertised."""
    control = RecordingControl()
    half = make(control)
    half.finished("1_cmpl-x-2-aaaaaaaa", params())
    assert control.withdrawn == [("1_cmpl-x-2-aaaaaaaa", "aborted", "ended before it was scheduled")]
    assert control.adverts == []
    assert half.step([]).aborts == []


@pytest.mark.parametrize("changes", REFUSED)
def test_aborted_before_it_was_scheduled_with_malformed_parameters(changes: dict[str, Any]) -> None:
    control = RecordingControl()
    half = make(control)
    half.finished(R, params(**changes))
    assert control.withdrawn == []


def test_bare_id_that_frees_a_prefill_is_nobodys_business() -> None:
    """When a request fails early the server submits an aborted one with a bare id."""
    control = RecordingControl()
    half = make(control)
    half.finished("3f6b", params())
    assert control.withdrawn == []


# --- notices and registry ---


def test_notice_fails_the_child_it_names() -> None:
    control = RecordingControl()
    half = pulling(control)
    control.notices = [Notice("rv", R, "Prefill answered 503"), Notice("rv", "unknown", "x")]
    assert half.step([]).failures == [(control.adverts[0].token, "Prefill answered 503")]
    assert half.step([]).failures == []


def test_notice_of_another_rendezvous_does_not_touch_a_reused_id() -> None:
    """L6: the first request of that id is over; what still comes for it must leave the second alone."""
    control = RecordingControl()
    half = pulling(control)
    half.received([R], [])
    half.allocated(R, params(rendezvous_id="rv-2"), blocks(1, 500), 16, 16)
    half.step([])
    control.notices = [Notice("rv", R, "too late")]
    assert half.step([]).failures == []
    control.notices = [Notice("rv-2", R, "in time")]
    assert half.step([]).failures == [(control.adverts[1].token, "in time")]


def test_notice_for_an_aborting_child_is_late() -> None:
    control = RecordingControl()
    half = pulling(control)
    half.finished(R, params(do_remote_prefill=False))
    control.notices = [Notice("rv", R, "x")]
    assert half.step([]).failures == []


def test_registry_is_handed_on_when_it_changes() -> None:
    control = RecordingControl(now_registered=Registered(frozenset({1, 2})))
    half = make(control)
    assert half.step([]).prefill_generations == {1, 2}
    assert half.step([]).prefill_generations is None
    control.now_registered = Registered(frozenset({2}))
    assert half.step([]).prefill_generations == {2}
    control.now_registered = Registered(frozenset())
    assert half.step([]).prefill_generations == set()


# --- counting ---


def test_prompt_tokens_computed_here() -> None:
    half = make(RecordingControl())
    half.step([scheduled("a", 63, 1, prompt=64), scheduled("b", 0, 20, prompt=50)])
    half.step([scheduled("a", 64, 1), scheduled("b", 20, 20)])
    half.step([scheduled("a", 65, 1), scheduled("b", 40, 12)])
    half.step([scheduled("b", 52, 1)])
    assert half.stats.take() == {"prompt_tokens_computed": 1 + 50}
    half.step([scheduled("c", 0, 4, prompt=50)])
    half.finished("c", {})
    half.step([scheduled("c", 4, 4)])
    assert half.stats.take() == {"prompt_tokens_computed": 4}
