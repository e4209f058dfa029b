"""Our connector beside a layer-wise store: a shared buffer is not written before Decode has read it.

In our composite and in one with the platform's phases, in both configuration orders, over a real publisher and socket.
"""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from platform_composite import PlatformComposite
from scripted_decode import GENERATION, ScriptedDecode, wait_until
from standin_connectors import DecliningStore, LayerStore, RecordingConnector
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from rd2h import vllm_compat
from rd2h.connector import SfaRemoteD2HConnector, StepMetadata
from rd2h.gates import Writes
from rd2h.params import parse_remote_decodes
from rd2h.prefill.loads import LOAD_FAILED
from rd2h.steps import PrefillStep, Publication

LAYERS, BLOCKS = 4, 8
NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]


class Blocks:
    def __init__(self, *groups: list[int]) -> None:
        self.groups = groups

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.groups

    def new_empty(self) -> "Blocks":
        return Blocks(*([] for _ in self.groups))


def shared_caches() -> dict[str, torch.Tensor]:
    """Layers 0 and 2, and 1 and 3, lie in the same buffer."""
    buffers = [torch.zeros(BLOCKS, 16, 576) for _ in range(2)]
    return {name: buffers[i % 2] for i, name in enumerate(NAMES)}


def prefill(store: str | None, order: str) -> dict[str, Any]:
    ours = {
        "kv_connector": "SfaRemoteD2HConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "transfer_backend": "host",
            "advertise_host": "127.0.0.1",
            "require_registered_decode": False,
            "peer_timeout_s": 4,
        },
    }
    members = [ours] if store is None else [ours, {"kv_connector": store, "kv_role": "kv_producer"}]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": members if order == "ours first" else members[::-1]},
    }


class Harness:
    """A worker-level composite of either kind."""

    def __init__(self, composite: Any, ours: SfaRemoteD2HConnector, store: RecordingConnector) -> None:
        self.composite, self.ours, self.store = composite, ours, store

    def begin(self, decode: ScriptedDecode) -> None:
        """A step that publishes blocks 1 and 2 of every layer to ``decode``."""
        child = parse_remote_decodes(
            {
                "request_id": "cmpl-x-0",
                "remote_engine_id": "d",
                "remote_host": "127.0.0.1",
                "remote_port": decode.port,
                "remote_tp_size": 1,
                "token": "0" * 31 + "1",
                "generation": GENERATION,
            }
        ).children[0]
        published = Publication(child, "e", 0, [1, 2], [], True, prompt_blocks=[1, 2])
        step = PrefillStep(Writes(frozenset(), frozenset()), [published])
        self.ours.bind_connector_metadata(StepMetadata(step))
        self.store.bind_connector_metadata(self.store.build_connector_meta(None))

    def layer(self, name: str) -> None:
        self.composite.wait_for_layer_load(name)
        self.composite.on_kv_cache_written(name)
        self.composite.save_kv_layer(name, None, None)


Made = Callable[..., Harness]


@pytest.fixture
def make(
    registry: dict[str, Any],
    engine_config: Callable[..., Any],
    cache_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Made]:
    monkeypatch.setattr(vllm_compat, "tp_rank", lambda: 0)
    monkeypatch.setattr(vllm_compat, "broadcast_from_rank0", lambda value: value)
    stores = {"LayerStore": LayerStore, "DecliningStore": DecliningStore}
    for name, kind in stores.items():
        registry[name] = lambda kind=kind: kind
    made: list[Any] = []
    RecordingConnector.log.clear()

    def build(kind: str, store: str, order: str) -> Harness:
        config = engine_config(prefill(store, order))
        caches = cache_config(layers=LAYERS, blocks=BLOCKS)
        ours_made: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
        made.append(ours_made)
        members = ours_made.sub_connectors
        ours = next(m for m in members if isinstance(m, SfaRemoteD2HConnector))
        beside = next(m for m in members if isinstance(m, RecordingConnector))
        if kind == "platform":
            ours._beside_loaders = False  # only our composite says so
        ours_made.register_kv_caches(shared_caches())
        composite = ours_made if kind == "ours" else PlatformComposite(members, worker=True)
        return Harness(composite, ours, beside)

    yield build
    for one in made:
        one.shutdown()


KINDS = pytest.mark.parametrize("kind", ["ours", "platform"])
ORDERS = pytest.mark.parametrize("order", ["ours first", "store first"])


@KINDS
@ORDERS
@pytest.mark.parametrize("store", ["LayerStore", "DecliningStore"])
def test_layer_waits_for_the_readers_of_its_buffer(kind: str, order: str, store: str, make: Made) -> None:
    """Layer 2 lies where layer 0 lay: nothing of it is loaded or computed before Decode has read layer 0."""
    harness = make(kind, store, order)
    with ScriptedDecode() as decode:
        harness.begin(decode)
        reached: list[str] = []

        def forward() -> None:
            for name in NAMES:
                harness.layer(name)
                reached.append(name)

        thread = threading.Thread(target=forward, daemon=True)
        thread.start()
        wait_until(lambda: decode.held == [0, 1], "layers 0 and 1 are told")
        assert not thread.join(0.3)
        assert reached == NAMES[:2]
        writes = [value for name, what, value in RecordingConnector.log if what == "writes"]
        assert writes == ([0, 1] if store == "LayerStore" else [])
        decode.release(1)  # the other buffer: opens nothing here
        assert not thread.join(0.3)
        assert reached == NAMES[:2]
        decode.release(0)
        wait_until(lambda: len(reached) == 4, "layers 2 and 3 follow")
        if kind == "ours":
            assert harness.composite.get_block_ids_with_load_errors() == set()
        wait_until(lambda: decode.seen == [0, 1, 2, 3], "every layer is told once, in order")
        decode.release_all()
        thread.join(10)
        harness.ours.wait_for_save()
        assert harness.ours.build_connector_worker_meta() is None


@KINDS
@ORDERS
def test_gate_is_closed_when_the_store_learns_of_the_layer(
    kind: str, order: str, make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may reuse the buffer from the moment of its own hook: its view then must already be "not yet"."""
    harness = make(kind, "LayerStore", order)
    worker = harness.ours._prefill_worker
    assert worker is not None
    seen: list[int] = []
    monkeypatch.setattr(
        harness.store, "save_kv_layer", lambda *a, **k: seen.append(worker.publisher.outstanding()), raising=True
    )
    with ScriptedDecode() as decode:
        harness.begin(decode)
        composite = harness.composite
        if kind == "ours":
            # Our composite has bound the store's method already; bind again.
            composite._after_layer = [
                harness.ours.save_kv_layer,
                harness.store.save_kv_layer,
            ]
        composite.save_kv_layer(NAMES[0], None, None)
        assert seen == [1]
        wait_until(lambda: decode.held == [0], "layer 0 is told")
        decode.release_all()


@ORDERS
def test_decode_is_told_of_a_failed_load_before_the_end_of_the_prompt(order: str, make: Made) -> None:
    """The blocks have all been published by then; what must not happen is that Decode takes them for complete."""
    harness = make("ours", "DecliningStore", order)
    with ScriptedDecode() as decode:
        harness.begin(decode)
        for name in (NAMES[0], NAMES[1]):
            harness.layer(name)
        wait_until(lambda: decode.held == [0, 1], "layers 0 and 1 are told")
        decode.release_all()
        for name in (NAMES[2], NAMES[3]):
            harness.layer(name)
        harness.composite.wait_for_save()
        wait_until(lambda: decode.seen == [0, 1, 2], "all layers but the last are told")
        decode.release_all()
        harness.store.load_errors = {2, 77}
        assert harness.composite.get_block_ids_with_load_errors() == {2, 77}
        wait_until(lambda: decode.seen == [0, 1, 2, 3], "the last layer is told")
        assert decode.failed == [(3, LOAD_FAILED)]
        decode.release_all()
        worker = harness.ours._prefill_worker
        assert worker is not None
        wait_until(lambda: not worker.publisher.outstanding(), "every gate opens")


@ORDERS
def test_store_thread_may_wait_while_the_forward_goes_on(order: str, make: Made) -> None:
    """The waiter is called from the store's receiving thread."""
    harness = make("ours", "LayerStore", order)
    store: Any = harness.store
    with ScriptedDecode() as decode:
        harness.begin(decode)
        harness.ours.on_kv_cache_written(NAMES[0])
        done = threading.Event()

        def prefetch() -> None:
            store.waiter(2)
            done.set()

        threading.Thread(target=prefetch, daemon=True).start()
        harness.ours.on_kv_cache_written(NAMES[1])
        wait_until(lambda: decode.held == [0, 1], "both layers are told")
        assert not done.wait(0.3)
        decode.release(0)
        assert done.wait(10)
        decode.release_all()


def test_a_decode_that_dies_opens_the_gate(make: Made) -> None:
    """P7: the forward goes on, only that Decode's child fails."""
    harness = make("ours", "LayerStore", "store first")
    with ScriptedDecode() as decode:
        harness.begin(decode)
        harness.ours.on_kv_cache_written(NAMES[0])
        wait_until(lambda: decode.held == [0], "layer 0 is told")
    waited = threading.Event()

    def wait() -> None:
        harness.ours.wait_for_layer_reuse(0)
        waited.set()

    threading.Thread(target=wait, daemon=True).start()
    assert waited.wait(45)
    reports: list[Any] = []

    def reported() -> bool:
        report = harness.ours.build_connector_worker_meta()
        if report is not None:
            reports.append(report)
        return bool(reports)

    wait_until(reported, "the child's failure")
    assert [failure.child.request_id for failure in reports[0].failures] == ["cmpl-x-0"]


@KINDS
@ORDERS
@pytest.mark.parametrize("chosen", [None, "store"])
def test_scheduler_half_sees_all_blocks_whoever_loads(
    kind: str,
    order: str,
    chosen: str | None,
    registry: dict[str, Any],
    engine_config: Callable[..., Any],
    cache_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry["LayerStore"] = lambda: LayerStore
    made: Any = KVConnectorFactory.create_connector(
        engine_config(prefill("LayerStore", order)), KVConnectorRole.SCHEDULER, cache_config()
    )
    members = made.sub_connectors
    seen: list[tuple[Any, int]] = []
    ours = next(m for m in members if isinstance(m, SfaRemoteD2HConnector))
    monkeypatch.setattr(ours, "update_state_after_alloc", lambda r, b, n: seen.append((b.get_block_ids(), n)))
    monkeypatch.setattr(ours, "get_num_new_matched_tokens", lambda r, n: (0, False))
    store = next(m for m in members if isinstance(m, LayerStore))
    request = SimpleNamespace(request_id="r", kv_transfer_params=None)
    tokens = 0
    if chosen:
        store.matched = (32, False)
        tokens = made.get_num_new_matched_tokens(request, 0)[0]
    blocks = Blocks([1, 2, 3])
    if kind == "ours":
        made.update_state_after_alloc(request, blocks, tokens)
    else:
        index = members.index(store) if chosen else None
        PlatformComposite(members, worker=False).update_state_after_alloc(request, blocks, tokens, index)
    assert seen == [(([1, 2, 3],), tokens)]


@ORDERS
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_waits_for_readers_of_the_blocks_that_a_store_loads_into(
    order: str,
    asynchronous: bool,
    make: Made,
    engine_config: Callable[..., Any],
    cache_config: Callable[..., Any],
) -> None:
    """vLLM gives blocks that a Decode still reads to a request whose KV a store beside us loads."""
    harness = make("ours", "DecliningStore", order)
    half: Any = KVConnectorFactory.create_connector(
        engine_config(prefill("DecliningStore", order)), KVConnectorRole.SCHEDULER, cache_config(layers=LAYERS)
    )
    half.set_xfer_handshake_metadata({0: harness.composite.get_handshake_metadata()})
    store = next(m for m in half.sub_connectors if isinstance(m, DecliningStore))
    with ScriptedDecode() as decode:
        harness.begin(decode)
        harness.ours.on_kv_cache_written(NAMES[0])
        wait_until(lambda: decode.held == [0], "layer 0 is told")
        store.matched = (16, asynchronous)
        request = SimpleNamespace(request_id="r", kv_transfer_params=None, num_prompt_tokens=40)
        half.get_num_new_matched_tokens(request, 16)
        half.update_state_after_alloc(request, Blocks([7, 2, 5]), 16)
        new = SimpleNamespace(
            req_id="r", num_computed_tokens=32, block_ids=([7, 2, 5],), prompt_token_ids=[0] * 40, prompt_embeds=None
        )
        step = SimpleNamespace(
            scheduled_new_reqs=[] if asynchronous else [new],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], resumed_req_ids=set()),
            num_scheduled_tokens={} if asynchronous else {"r": 8},
            finished_req_ids=set(),
        )
        metadata, begun = half.build_connector_meta(step), threading.Event()

        def begin() -> None:
            harness.composite.bind_connector_metadata(metadata)
            begun.set()

        threading.Thread(target=begin, daemon=True).start()
        assert not begun.wait(0.3)
        decode.release_all()
        assert begun.wait(10)
    half.shutdown()


def test_what_a_composite_reads_of_each_role(
    engine_config: Callable[..., Any], cache_config: Callable[..., Any]
) -> None:
    for role, half, provider, full in [
        ("kv_producer", KVConnectorRole.WORKER, True, False),
        ("kv_producer", KVConnectorRole.SCHEDULER, False, True),
        ("kv_consumer", KVConnectorRole.WORKER, False, False),
        ("kv_consumer", KVConnectorRole.SCHEDULER, False, False),
    ]:
        transfer = {**prefill(None, "ours first")["kv_connector_extra_config"]["connectors"][0], "kv_role": role}
        made: Any = KVConnectorFactory.create_connector(engine_config(transfer), half, cache_config())
        assert made.supports_layerwise_buffer_reuse is provider
        assert made.requires_full_blocks_on_update_after_alloc is full
        for name in ("wait_for_layer_send", "wait_for_layer_reuse", "on_kv_cache_written"):
            assert callable(getattr(made, name))
        made.wait_for_layer_reuse(0)  # before registration there is nothing to wait for
        assert not hasattr(made, "set_external_slot_release_waiter")
