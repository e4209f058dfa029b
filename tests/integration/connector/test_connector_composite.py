"""The composite keeps the contract of vLLM's MultiConnector, in every order of its members."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from standin_connectors import (
    DecliningStore,
    Greeting,
    LayerStore,
    Note,
    PlainGroups,
    RecordingConnector,
    RecordingStats,
    Tally,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.outputs import KVConnectorOutput

from rd2h.composition.multi_connector import CompositeHandshake, MultiConnector


class Provider(RecordingConnector):
    """A member whose layer buffers are gated."""

    supports_layerwise_buffer_reuse = True

    def wait_for_layer_reuse(self, layer_idx: int) -> None:
        self.note("reuse", layer_idx)

    def on_kv_cache_written(self, layer_name: str) -> None:
        self.note("written", layer_name)


KINDS = {kind.__name__: kind for kind in (RecordingConnector, PlainGroups, LayerStore, DecliningStore, Provider)}


class Blocks:
    def __init__(self, *groups: list[int]) -> None:
        self.groups = groups

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.groups


def request(request_id: str = "r") -> Any:
    return SimpleNamespace(request_id=request_id, kv_transfer_params=None)


@pytest.fixture
def make(
    registry: dict[str, Any], engine_config: Callable[..., Any], cache_config: Callable[..., Any]
) -> Callable[..., tuple[Any, list[Any]]]:
    """``make(role, *kinds)``: the composite and its members, in that order."""
    for name, kind in KINDS.items():
        registry[name] = lambda kind=kind: kind
    RecordingConnector.log.clear()

    def build(role: KVConnectorRole, *kinds: type[Any]) -> tuple[Any, list[Any]]:
        members = [
            {
                "kv_connector": kind.__name__,
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"name": f"{kind.__name__}{i}"},
            }
            for i, kind in enumerate(kinds)
        ]
        config = engine_config(
            {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"connectors": members},
            }
        )
        made = MultiConnector(config, role, cache_config())
        return made, list(made.sub_connectors)

    return build


Make = Callable[..., tuple[Any, list[Any]]]
WORKER, SCHEDULER = KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER


# --- layer hooks ---


@pytest.mark.parametrize("kinds", [(Provider, LayerStore), (LayerStore, Provider)])
def test_store_that_takes_over_asks_before_it_writes(kinds: tuple[type[Any], ...], make: Make) -> None:
    made, members = make(WORKER, *kinds)
    provider = members[kinds.index(Provider)]
    made.wait_for_layer_load("l0")
    made.wait_for_layer_load("l1")
    assert provider.called("load") == []
    assert provider.called("reuse") == [0, 1]
    store = next(member.name for member in members if isinstance(member, LayerStore))
    assert RecordingConnector.log == [
        (store, "load", "l0"),
        (provider.name, "reuse", 0),
        (store, "writes", 0),
        (store, "load", "l1"),
        (provider.name, "reuse", 1),
        (store, "writes", 1),
    ]


@pytest.mark.parametrize("kinds", [(Provider, DecliningStore), (DecliningStore, Provider)])
def test_provider_waits_itself_where_nobody_takes_over(kinds: tuple[type[Any], ...], make: Make) -> None:
    made, members = make(WORKER, *kinds)
    made.wait_for_layer_load("l0")
    made.on_kv_cache_written("l0")
    made.save_kv_layer("l0", None, None)
    first, second = members if kinds[0] is Provider else reversed(members)
    assert RecordingConnector.log == [
        (first.name, "load", "l0"),
        (second.name, "load", "l0"),
        (first.name, "written", "l0"),
        (first.name, "save", "l0"),
        (second.name, "save", "l0"),
    ]


def test_scheduler_half_hands_nothing_over(make: Make) -> None:
    """A store's scheduler half must not believe that its wait was taken care of."""
    _, members = make(SCHEDULER, Provider, LayerStore)
    assert members[1].waiter is None


# --- steps ---


def test_step_metadata_reaches_its_member_before_anything_else(make: Make) -> None:
    scheduler, _ = make(SCHEDULER, Provider, RecordingConnector)
    worker, members = make(WORKER, Provider, RecordingConnector)
    metadata = scheduler.build_connector_meta(SimpleNamespace())
    worker.handle_preemptions(metadata)
    worker.bind_connector_metadata(metadata)
    assert worker.has_connector_metadata()
    worker.start_load_kv(None)
    worker.wait_for_save()
    for member in members:
        assert [name for name, _ in member.calls] == ["preempt", "bind", "start_load", "wait_for_save"]
        assert member.called("preempt") == member.called("bind") == [f"step of {member.name}"]
        assert isinstance(member._get_connector_metadata(), Note)
    worker.clear_connector_metadata()
    assert not worker.has_connector_metadata()
    assert not any(member.has_connector_metadata() for member in members)


def test_registration_and_shutdown_reach_all(make: Make) -> None:
    made, members = make(WORKER, RecordingConnector, Provider)
    made.register_kv_caches({"l0": None})
    made.shutdown()
    assert [member.calls for member in members] == [[("register", ["l0"]), ("shutdown", None)]] * 2


def test_shutdown_reaches_all_although_one_fails(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made, members = make(WORKER, RecordingConnector, Provider)

    def fail() -> None:
        raise OSError("cannot close")

    monkeypatch.setattr(members[0], "shutdown", fail)
    with pytest.raises(OSError, match="cannot close"):
        made.shutdown()
    assert members[1].called("shutdown") == [None]


# --- lookup and allocation ---


def test_first_member_with_tokens_loads_and_who_asks_sees_all_blocks(make: Make) -> None:
    made, (asks, other, chosen, late) = make(
        SCHEDULER, PlainGroups, RecordingConnector, RecordingConnector, RecordingConnector
    )
    chosen.matched, late.matched = (32, True), (64, False)
    assert made.get_num_new_matched_tokens(request(), 0) == (32, True)
    blocks = Blocks([1, 2, 3], [7])
    made.update_state_after_alloc(request(), blocks, 32)
    assert chosen.called("alloc") == asks.called("alloc") == [(([1, 2, 3], [7]), 32)]
    assert other.called("alloc") == late.called("alloc") == [(([1, 2, 3], [7]), 0)]


def test_older_vllm_shows_no_blocks_to_members_without_a_load(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from rd2h import vllm_compat

    monkeypatch.setattr(vllm_compat, "HAS_TRANSFER_RESULTS", False)
    made, (other, asks) = make(SCHEDULER, RecordingConnector, PlainGroups)

    class OldBlocks(Blocks):
        def new_empty(self) -> Blocks:
            return Blocks(*([] for _ in self.groups))

    made.update_state_after_alloc(request(), OldBlocks([1, 2]), 0)
    assert other.called("alloc") == [(([],), 0)]
    assert asks.called("alloc") == [(([1, 2],), 0)]


def test_a_member_still_looking_up_delays_the_request(make: Make) -> None:
    made, (first, second) = make(SCHEDULER, RecordingConnector, RecordingConnector)
    first.matched, second.matched = (16, False), (None, False)
    assert made.get_num_new_matched_tokens(request(), 0) == (None, False)


def test_choice_ends_with_the_request(make: Make) -> None:
    made, (first, second) = make(SCHEDULER, RecordingConnector, RecordingConnector)
    second.matched = (16, False)
    made.get_num_new_matched_tokens(request(), 0)
    made.request_finished_all_groups(request(), ([1],))
    second.matched = (0, False)
    made.get_num_new_matched_tokens(request(), 0)
    made.update_state_after_alloc(request(), Blocks([1]), 5)
    assert [value for _, value in second.called("alloc")] == [0]
    assert [value for _, value in first.called("alloc")] == [0]


# --- ends of requests ---


def test_blocks_are_freed_after_the_last_of_several_saves(make: Make) -> None:
    scheduler, (a, b, c) = make(SCHEDULER, RecordingConnector, Provider, RecordingConnector)
    worker, workers = make(WORKER, RecordingConnector, Provider, RecordingConnector)
    a.answer = b.answer = c.answer = (True, None)
    assert scheduler.request_finished_all_groups(request(), ([1, 2],)) == (True, None)
    worker.bind_connector_metadata(scheduler.build_connector_meta(SimpleNamespace()))
    reported = []
    for member in workers:
        member.results = KVConnectorTransferResults(finished_sending={"r"})
        reported.append(worker.get_transfer_results(set()).finished_sending)
    assert reported == [set(), set(), {"r"}]


def test_one_save_is_reported_at_once(make: Make) -> None:
    scheduler, (a, _) = make(SCHEDULER, RecordingConnector, Provider)
    worker, workers = make(WORKER, RecordingConnector, Provider)
    a.answer = (True, None)
    assert scheduler.request_finished_all_groups(request(), ([1],))[0]
    worker.bind_connector_metadata(scheduler.build_connector_meta(SimpleNamespace()))
    workers[0].results = KVConnectorTransferResults(finished_sending={"r"})
    assert worker.get_transfer_results(set()).finished_sending == {"r"}


@pytest.mark.parametrize("method", ["request_finished", "request_finished_all_groups"])
def test_one_members_parameters_are_returned(method: str, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    made, (a, b, c) = make(SCHEDULER, RecordingConnector, Provider, RecordingConnector)
    blocks: Any = [1] if method == "request_finished" else ([1],)
    b.answer = (False, {"remote_port": 1})
    assert getattr(made, method)(request("r1"), blocks) == (False, {"remote_port": 1})
    c.answer = (False, {"other": 2})
    assert getattr(made, method)(request("r2"), blocks) == (False, {"remote_port": 1})
    assert "Provider and RecordingConnector all return kv_transfer_params" in caplog.text
    assert all(len(member.called("finished")) == 2 for member in (a, b, c))


def test_transfer_results_are_merged(make: Make) -> None:
    made, (a, b) = make(WORKER, RecordingConnector, Provider)
    a.results = KVConnectorTransferResults({"s"}, {"x", "y"}, {"y"})
    b.results = KVConnectorTransferResults(set(), {"z"}, {"z"})
    a.load_errors, b.load_errors = {1, 2}, {3}
    results = made.get_transfer_results(set())
    assert (results.finished_sending, results.finished_recving, results.failed_recving) == (
        {"s"},
        {"x", "y", "z"},
        {"y", "z"},
    )
    assert made.get_block_ids_with_load_errors() == {1, 2, 3}
    assert made.get_finished(set()) == (None, None)


# --- handshake, worker metadata, statistics, events ---


@pytest.mark.parametrize("greets", [(0,), (1,), (0, 1), ()])
def test_every_member_gets_its_own_handshake(greets: tuple[int, ...], make: Make) -> None:
    scheduler, halves = make(SCHEDULER, RecordingConnector, Provider)
    content = {}
    for rank in range(2):
        worker, members = make(WORKER, RecordingConnector, Provider)
        for index in greets:
            members[index].greeting = Greeting(f"rank {rank} member {index}")
        handshake = worker.get_handshake_metadata()
        assert isinstance(handshake, CompositeHandshake) is bool(greets)
        if handshake is not None:
            content[(0, rank)] = handshake
    scheduler.set_xfer_handshake_metadata_pp_aware(content)
    for index, half in enumerate(halves):
        expected = {rank: f"rank {rank} member {index}" for rank in range(2)} if index in greets else {}
        assert half.called("handshake") == [expected]


def test_handshake_survives_the_trip_between_processes(make: Make) -> None:
    import pickle

    worker, members = make(WORKER, RecordingConnector, Provider)
    members[1].greeting = Greeting("hello")
    copy = pickle.loads(pickle.dumps(worker.get_handshake_metadata()))
    assert copy.members[0] is None
    assert copy.members[1].text == "hello"


def test_worker_metadata_is_aggregated_by_member(make: Make) -> None:
    scheduler, halves = make(SCHEDULER, RecordingConnector, Provider)
    reports = []
    for tallies in ((None, Tally(1)), (Tally(5), Tally(2))):
        worker, members = make(WORKER, RecordingConnector, Provider)
        for member, tally in zip(members, tallies, strict=True):
            member.tally = tally
        reports.append(worker.build_connector_worker_meta())
    output = KVConnectorOutput(kv_connector_worker_meta=reports[0].aggregate(reports[1]))
    scheduler.update_connector_output(output)
    assert [half.called("output") for half in halves] == [[Tally(5)], [Tally(3)]]


def test_statistics_by_connector(make: Make) -> None:
    made, (a, b, c) = make(WORKER, RecordingConnector, Provider, RecordingConnector)
    a.stats, b.stats, c.stats = (RecordingStats({"n": n}) for n in (1, 2, 4))
    stats = made.get_kv_connector_stats()
    assert stats.reduce() == {"RecordingConnector": {"n": 5}, "Provider": {"n": 2}}
    again = type(made).build_kv_connector_stats(stats.to_dict())
    assert again.aggregate(stats).reduce() == {"RecordingConnector": {"n": 10}, "Provider": {"n": 4}}


def test_events_of_all_members(make: Make) -> None:
    made, (a, b) = make(SCHEDULER, RecordingConnector, Provider)
    a.events, b.events = ["e1"], ["e2", "e3"]
    assert list(made.take_events()) == ["e1", "e2", "e3"]
    assert list(made.take_events()) == []


@pytest.mark.parametrize(("answers", "expected"), [((None, True), True), ((None, None), True), ((False, True), False)])
def test_reset_of_the_caches(answers: tuple[bool | None, ...], expected: bool, make: Make) -> None:
    made, members = make(SCHEDULER, RecordingConnector, Provider)
    for member, answer in zip(members, answers, strict=True):
        member.reset_answer = answer
    assert made.reset_cache() is expected
    assert all(member.called("reset_cache") for member in members)


def test_every_method_of_vllms_composite_is_ours_too() -> None:
    """Everything that vLLM's composite passes on, ours passes on: nothing falls back to the base class."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector

    passed_on = {name for name in vars(multi_connector.MultiConnector) if not name.startswith("_")}
    assert passed_on
    for name in passed_on:
        ours = getattr(MultiConnector, name)
        assert ours is not getattr(KVConnectorBase_V1, name, None), name
