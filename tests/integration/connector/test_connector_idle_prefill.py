"""A Prefill engine that has nothing more to do still hears of failures that only its publisher sees."""

import pickle
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_decode import GENERATION, ScriptedDecode, wait_until
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from rd2h import assembly, vllm_compat
from rd2h.connector import SfaRemoteD2HConnector, WorkerReport
from rd2h.control import DecodeAddress, Registered

REQUEST = "cmpl-x-0-bbbbbbbb"
CHILD = "cmpl-x-0-aaaaaaaa"
LAYERS = [f"model.layers.{index}.self_attn.attn" for index in range(3)]


class Control:
    """Vouches for every Decode on this machine and notes which children are reported failed."""

    def __init__(self, port: int) -> None:
        self.failed: list[tuple[str, ...]] = []
        self.reasons: list[str] = []
        self._registered = Registered(frozenset(), frozenset({DecodeAddress(GENERATION, "127.0.0.1", port)}))

    def registered(self) -> Registered:
        return self._registered

    def report_failure(self, rendezvous_id: str, request_ids: list[str], reason: str) -> None:
        self.failed.append(tuple(request_ids))
        self.reasons.append(reason)

    def stop(self) -> None:
        pass


class Engine:
    """Steps both halves of a Prefill connector as vLLM does, a report lost when it says nothing."""

    def __init__(self, scheduler: SfaRemoteD2HConnector, worker: SfaRemoteD2HConnector) -> None:
        self.scheduler, self.worker, self.steps = scheduler, worker, 0

    def step(self, news: list[Any] = (), finished: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        self.steps += 1
        cached = SimpleNamespace(req_ids=[], resumed_req_ids=set(), num_computed_tokens=[], new_block_ids=[])
        scheduled: Any = SimpleNamespace(
            scheduled_new_reqs=news,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={new.req_id: 20 for new in news},
            finished_req_ids=finished,
        )
        metadata = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(scheduled)))
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        for name in LAYERS if news else ():
            self.worker.save_kv_layer(name, None, None)  # type: ignore[arg-type]
        self.worker.wait_for_save()
        report = pickle.loads(pickle.dumps(self.worker.build_connector_worker_meta()))
        self.worker.clear_connector_metadata()
        output = KVConnectorOutput(kv_connector_worker_meta=report)
        if not output.is_empty():
            self.scheduler.update_connector_output(output)

    def prefill(self, port: int) -> None:
        """One request, computed in one step and ended in the next."""
        params = {
            "do_remote_decode": True,
            "request_id": CHILD,
            "remote_engine_id": "d",
            "remote_host": "127.0.0.1",
            "remote_port": port,
            "remote_tp_size": 1,
            "token": "ab" * 16,
            "generation": GENERATION,
            "rendezvous_id": "rv",
            "x_request_id": "x",
        }
        request: Any = SimpleNamespace(request_id=REQUEST, kv_transfer_params=params, num_prompt_tokens=20)
        blocks: Any = SimpleNamespace(get_block_ids=lambda: ([1, 2],))
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        self.scheduler.update_state_after_alloc(request, blocks, 0)
        new = SimpleNamespace(
            req_id=REQUEST, num_computed_tokens=0, block_ids=([1, 2],), prompt_token_ids=[0] * 20, prompt_embeds=None
        )
        self.step([new])
        self.scheduler.request_finished(request, [])
        self.step(finished={REQUEST})

    def run_until_idle(self) -> None:
        """What vLLM's core does without requests: it steps while there is pending work."""
        deadline = time.monotonic() + 20
        while self.scheduler.has_pending_push_work():
            assert time.monotonic() < deadline
            self.step()
            time.sleep(0.001)


@pytest.fixture
def make(
    registry: dict[str, Any],
    engine_config: Callable[..., Any],
    cache_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[Control], Engine]]:
    import torch

    monkeypatch.setattr(vllm_compat, "tp_rank", lambda: 0)
    monkeypatch.setattr(vllm_compat, "broadcast_from_rank0", lambda value: value)
    made: list[Any] = []

    def build(control: Control) -> Engine:
        extra = {
            "transfer_backend": "host",
            "advertise_host": "127.0.0.1",
            "connect_timeout_s": 0.4,
            "handshake_timeout_s": 0.4,
        }
        transfer = {"kv_connector": "SfaRemoteD2HConnector", "kv_role": "kv_producer"}
        config = engine_config({**transfer, "kv_connector_extra_config": extra})
        monkeypatch.setattr(assembly, "_control", lambda *_: control)
        scheduler: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache_config())
        worker: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache_config())
        made.extend((scheduler, worker))
        worker.register_kv_caches({name: torch.zeros(8, 16, 576) for name in LAYERS})
        scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
        return Engine(scheduler, worker)

    yield build
    for half in made:
        half.shutdown()


Make = Callable[[Control], Engine]


def test_a_decode_that_never_shakes_hands_is_reported_by_an_idle_engine(make: Make) -> None:
    """Nobody else could tell: Decode was never reached, and the engine has no other reason to step."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        control = Control(port)
        engine = make(control)
        engine.prefill(port)
        assert control.failed == []
        engine.run_until_idle()
    assert control.failed == [(CHILD,)]
    assert "no answer while" in control.reasons[0]


def test_a_decode_that_cannot_be_connected_to_is_reported_by_an_idle_engine(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    control = Control(port)
    engine = make(control)
    engine.prefill(port)
    engine.run_until_idle()
    assert control.failed == [(CHILD,)]


def test_an_engine_whose_decode_has_answered_may_rest(make: Make) -> None:
    """From then on Decode knows itself what becomes of its children, however long it reads: no step is spent on it."""
    with ScriptedDecode() as decode:
        control = Control(decode.port)
        engine = make(control)
        engine.prefill(decode.port)
        wait_until(lambda: decode.held == [0, 1, 2], "all layers are being read")
        engine.run_until_idle()
        steps = engine.steps
        assert not engine.scheduler.has_pending_push_work()
        decode.release_all()
        engine.prefill(decode.port)
        assert not engine.scheduler.has_pending_push_work()
        assert engine.steps == steps + 2
        decode.release_all()
    assert control.failed == []


def test_an_engine_that_published_nothing_may_rest(make: Make) -> None:
    engine = make(Control(1))
    engine.step()
    assert not engine.scheduler.has_pending_push_work()


def test_one_rank_that_still_tries_keeps_the_engine_stepping() -> None:
    tries, is_done = WorkerReport([], contacting=True), WorkerReport([])
    for joined in (tries.aggregate(is_done), WorkerReport([]).aggregate(WorkerReport([], contacting=True))):
        assert isinstance(joined, WorkerReport)
        assert joined.contacting
    assert not WorkerReport([]).aggregate(WorkerReport([])).contacting  # type: ignore[attr-defined]
