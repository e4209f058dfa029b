"""The connector's scheduler halves with vLLM's own configuration: whatever a client sends, only its request suffers."""

import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from rd2h import vllm_compat
from rd2h.connector import SfaRemoteD2HConnector, StepMetadata, WorkerReport
from rd2h.demo.ports import free_port
from rd2h.errors import ConfigError, StateError
from rd2h.steps import DecodeStep, PrefillStep

ODD: list[Any] = [None, {}, [], "do_remote_prefill", 7, True, ["do_remote_prefill"], ("do_remote_decode",)]
NOT_TRUE: list[Any] = [None, False, 0, 1, "true", "false", [], {"a": 1}]


class Blocks:
    def get_block_ids(self) -> tuple[list[int], ...]:
        return ([1, 2],)


def request(params: Any, request_id: str = "cmpl-x-0-aaaaaaaa") -> Any:
    return SimpleNamespace(request_id=request_id, kv_transfer_params=params, num_prompt_tokens=20)


def output(scheduled: list[tuple[str, int, int]] = (), finished: set[str] = frozenset()) -> Any:  # type: ignore[assignment]
    news = [
        SimpleNamespace(
            req_id=request_id,
            num_computed_tokens=computed,
            block_ids=([1, 2],),
            prompt_token_ids=[0] * 20,
            prompt_embeds=None,
        )
        for request_id, computed, _ in scheduled
    ]
    cached = SimpleNamespace(req_ids=[], resumed_req_ids=set(), num_computed_tokens=[], new_block_ids=[])
    return SimpleNamespace(
        scheduled_new_reqs=news,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={request_id: count for request_id, _, count in scheduled},
        finished_req_ids=finished,
    )


@pytest.fixture
def make(
    registry: dict[str, Any],
    engine_config: Callable[..., Any],
    cache_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[str], tuple[SfaRemoteD2HConnector, SfaRemoteD2HConnector]]]:
    """Both halves of one engine, registered, without a meta service."""
    import torch

    monkeypatch.setattr(vllm_compat, "tp_rank", lambda: 0)
    monkeypatch.setattr(vllm_compat, "broadcast_from_rank0", lambda value: value)
    made: list[Any] = []

    def build(role: str) -> tuple[SfaRemoteD2HConnector, SfaRemoteD2HConnector]:
        transfer = {
            "kv_connector": "SfaRemoteD2HConnector",
            "kv_role": role,
            "kv_port": free_port(),
            "kv_connector_extra_config": {"transfer_backend": "host", "advertise_host": "127.0.0.1"},
        }
        config = engine_config(transfer)
        scheduler: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache_config())
        worker: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache_config())
        made.extend((scheduler, worker))
        worker.register_kv_caches({f"model.layers.{i}.self_attn.attn": torch.zeros(8, 16, 576) for i in range(3)})
        handshake = pickle.loads(pickle.dumps(worker.get_handshake_metadata()))
        scheduler.set_xfer_handshake_metadata({0: handshake})
        return scheduler, worker

    yield build
    for half in made:
        half.shutdown()


Make = Callable[[str], tuple[SfaRemoteD2HConnector, SfaRemoteD2HConnector]]


def step_of(half: SfaRemoteD2HConnector, scheduler_output: Any) -> Any:
    metadata = pickle.loads(pickle.dumps(half.build_connector_meta(scheduler_output)))
    assert isinstance(metadata, StepMetadata)
    return metadata.step


def test_odd_parameters_are_an_ordinary_request(make: Make) -> None:
    for role in ("kv_producer", "kv_consumer"):
        scheduler, _ = make(role)
        for params in ODD:
            odd = request(params)
            assert scheduler.get_num_new_matched_tokens(odd, 0) == (0, False)
            scheduler.update_state_after_alloc(odd, Blocks(), 0)  # type: ignore[arg-type]
            assert scheduler.request_finished(odd, []) == (False, None)
            assert scheduler.request_finished_all_groups(odd, ([1],)) == (False, None)
            assert odd.kv_transfer_params == params
        step = step_of(scheduler, output())
        if role == "kv_producer":
            assert isinstance(step, PrefillStep)
            assert (step.publications, step.failures) == ([], [])
        else:
            assert isinstance(step, DecodeStep)
            assert (step.pulls, step.aborts, step.refused) == ([], [], [])


@pytest.mark.parametrize("value", NOT_TRUE)
def test_only_true_asks_for_a_transfer(value: Any, make: Make) -> None:
    scheduler, _ = make("kv_consumer")
    asked = request({"do_remote_prefill": value, "rendezvous_id": "r", "x_request_id": "x"})
    assert scheduler.get_num_new_matched_tokens(asked, 0) == (0, False)
    scheduler.update_state_after_alloc(asked, Blocks(), 20)  # type: ignore[arg-type]
    assert step_of(scheduler, output()).refused == []


def test_refused_request_is_reported_once_in_both_sets(make: Make) -> None:
    """No meta service: the request fails with its reason, the engine goes on."""
    scheduler, worker = make("kv_consumer")
    refused = request({"do_remote_prefill": True, "rendezvous_id": "r", "x_request_id": "x"})
    assert scheduler.get_num_new_matched_tokens(refused, 0) == (20, True)
    scheduler.update_state_after_alloc(refused, Blocks(), 20)  # type: ignore[arg-type]
    # Called again with what is left after the load.
    scheduler.update_state_after_alloc(refused, Blocks(), 0)  # type: ignore[arg-type]
    worker.bind_connector_metadata(scheduler.build_connector_meta(output()))
    results = worker.get_transfer_results(set())
    assert results.finished_recving == results.failed_recving == {"cmpl-x-0-aaaaaaaa"}
    again = worker.get_transfer_results(set())
    assert again.finished_recving == again.failed_recving == set()
    scheduler.update_connector_output(
        KVConnectorOutput(finished_recving=results.finished_recving, failed_recving=results.failed_recving)
    )
    assert worker.get_block_ids_with_load_errors() == set()


def test_choices_that_share_their_parameters_are_pulled_each(make: Make) -> None:
    """An engine in the server's process gives every choice the same object."""
    scheduler, _ = make("kv_consumer")
    params = {"do_remote_prefill": True, "rendezvous_id": "r", "x_request_id": "x"}
    choices = [request(params, f"{k}_cmpl-x-0-aaaaaaaa") for k in range(3)]
    for choice in choices:
        assert scheduler.get_num_new_matched_tokens(choice, 0) == (20, True)
        scheduler.update_state_after_alloc(choice, Blocks(), 20)  # type: ignore[arg-type]
        assert scheduler.get_num_new_matched_tokens(choice, 0) == (0, False)
    assert len(step_of(scheduler, output()).refused) == 3
    assert params["do_remote_prefill"] is True


def test_older_vllm_learns_of_failed_requests_by_their_blocks(make: Make) -> None:
    scheduler, worker = make("kv_consumer")
    refused = request({"do_remote_prefill": True, "rendezvous_id": "r", "x_request_id": "x"})
    scheduler.update_state_after_alloc(refused, Blocks(), 20)  # type: ignore[arg-type]
    worker.bind_connector_metadata(scheduler.build_connector_meta(output()))
    assert worker.get_finished(set()) == (None, {"cmpl-x-0-aaaaaaaa"})
    assert worker.get_block_ids_with_load_errors() == {1, 2}
    assert worker.get_block_ids_with_load_errors() == set()


def test_prefill_step_travels_to_its_worker(make: Make) -> None:
    scheduler, worker = make("kv_producer")
    ordinary = request(None, "r")
    scheduler.update_state_after_alloc(ordinary, Blocks(), 0)  # type: ignore[arg-type]
    metadata = scheduler.build_connector_meta(output([("r", 0, 20)]))
    step = pickle.loads(pickle.dumps(metadata)).step
    assert (set(step.writes.main), step.publications) == ({1, 2}, [])
    worker.handle_preemptions(metadata)
    worker.bind_connector_metadata(metadata)
    for name in ("model.layers.0.self_attn.attn", "", "model.layers.0.self_attn.indexer.k_cache"):
        worker.on_kv_cache_written(name)
        worker.save_kv_layer(name, None, None)  # type: ignore[arg-type]
    worker.wait_for_save()
    worker.clear_connector_metadata()
    assert worker.get_finished(set()) == (None, None)
    results = worker.get_transfer_results(set())
    assert results.finished_recving == results.failed_recving == results.finished_sending == set()


def test_reports_of_ranks_are_joined() -> None:
    one = WorkerReport([], reasons={"a": "first", "b": "x"})
    joined = one.aggregate(WorkerReport([], "the publisher thread is dead", {"a": "second"}))
    assert isinstance(joined, WorkerReport)
    assert joined.reasons == {"a": "first", "b": "x"}
    assert joined.unhealthy == "the publisher thread is dead"


def test_a_step_before_registration_says_what_is_missing(
    registry: dict[str, Any], engine_config: Callable[..., Any], cache_config: Callable[..., Any]
) -> None:
    for role in ("kv_producer", "kv_consumer"):
        transfer = {
            "kv_connector": "SfaRemoteD2HConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"transfer_backend": "host", "advertise_host": "127.0.0.1"},
        }
        half: Any = KVConnectorFactory.create_connector(
            engine_config(transfer), KVConnectorRole.SCHEDULER, cache_config()
        )
        with pytest.raises(StateError, match="workers have not registered their KV caches yet"):
            half.build_connector_meta(output())
        with pytest.raises(ConfigError, match="0 of 1 workers registered"):
            half.set_xfer_handshake_metadata({})
