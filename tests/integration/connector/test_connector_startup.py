"""What vLLM says when our settings are wrong, and that the guide's two blocks build unchanged."""

import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from standin_connectors import LayerStore
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from rd2h import assembly, early, vllm_compat
from rd2h.composition.multi_connector import MultiConnector
from rd2h.connector import SfaRemoteD2HConnector
from rd2h.engines import EngineOptions, MemfabricOptions, create_engine
from rd2h.errors import ConfigError

ROLES = [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER]

GUIDE_PREFILL = """
{
    "kv_connector": "MultiConnector",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {
        "connectors": [
            {
                "kv_connector": "SfaRemoteD2HConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {
                    "transfer_backend": "memfabric"
                }
            },
            {
                "kv_connector": "AscendStoreConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {
                    "backend": "memcache",
                    "use_layerwise": true,
                    "layerwise_num_shared_buffers": 3,
                    "layerwise_independent_layers": [0]
                }
            }
        ]
    }
}
"""

GUIDE_DECODE = """
{
    "kv_connector": "SfaRemoteD2HConnector",
    "kv_role": "kv_consumer",
    "kv_port": 20050,
    "kv_connector_extra_config": {
        "transfer_backend": "memfabric",
        "use_layerwise": true
    }
}
"""

GUIDE_DECODE_ADDITIONAL = """
{
    "sparse_kv_offload_config": {
        "enabled": true,
        "topk_buffer_size": 4096,
        "dram_size_per_dp_GB": 128
    }
}
"""


class AscendStoreConnector(LayerStore):
    """Stands for the store, which is not installed here."""


@pytest.fixture
def memfabric(monkeypatch: pytest.MonkeyPatch) -> list[EngineOptions | None]:
    """The ``host`` engine in place of MemFabric, which needs a driver; returns the options it was asked for."""
    asked: list[EngineOptions | None] = []

    def create(backend: str, options: EngineOptions | None = None) -> Any:
        assert backend == "memfabric"
        asked.append(options)
        return create_engine("host")

    monkeypatch.setattr(assembly, "create_engine", create)
    monkeypatch.setattr(vllm_compat, "tp_rank", lambda: 0)
    monkeypatch.setattr(vllm_compat, "broadcast_from_rank0", lambda value: value)
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    return asked


def caches(layers: int = 3, blocks: int = 8) -> dict[str, torch.Tensor]:
    return {f"model.layers.{i}.self_attn.attn": torch.zeros(blocks, 16, 576) for i in range(layers)}


def test_guides_prefill_block_builds_unchanged(
    registry: dict[str, Any],
    engine_config: Callable[..., Any],
    cache_config: Callable[..., Any],
    memfabric: list[EngineOptions | None],
) -> None:
    registry["AscendStoreConnector"] = lambda: AscendStoreConnector
    config = engine_config(json.loads(GUIDE_PREFILL))
    scheduler = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache_config())
    worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache_config())
    try:
        worker.register_kv_caches(caches())
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
        for half in (scheduler, worker):
            assert type(half) is MultiConnector
            assert [type(m) for m in half.sub_connectors] == [SfaRemoteD2HConnector, AscendStoreConnector]
        ours, store = worker.sub_connectors
        assert ours.supports_layerwise_buffer_reuse
        assert store.waiter is not None
        assert scheduler.sub_connectors[0].requires_full_blocks_on_update_after_alloc
        (options,) = memfabric
        assert isinstance(options, MemfabricOptions)
        assert (options.protocol.value, options.hostname) == ("sdma", "127.0.0.1")
    finally:
        worker.shutdown()
        scheduler.shutdown()


class PoolManager:
    """What vllm-ascend's manager shows to a connector, over ordinary memory."""

    def __init__(self, layers: int, blocks: int) -> None:
        self.offload_layer_names = [f"model.layers.{i}.self_attn.attn" for i in range(layers)]
        self.k = [torch.zeros(blocks, 16, 1, 512, dtype=torch.bfloat16) for _ in range(layers)]
        self.v = [torch.zeros(blocks, 16, 1, 64, dtype=torch.bfloat16) for _ in range(layers)]
        self.gvas_k_bases = [tensor.data_ptr() for tensor in self.k]
        self.gvas_v_bases = [tensor.data_ptr() for tensor in self.v]
        self.cpu_block_lens = [(16 * 512 * 2, 16 * 64 * 2)] * layers

    def _get_offload_layer_id(self, layer_name: str) -> int:
        return self.offload_layer_names.index(layer_name)

    def registered(self, blocks: int) -> dict[str, Any]:
        """Caches as the platform registers them: device K and V absent, pool K and V, hot buffers; indexers apart."""
        caches: dict[str, Any] = {}
        for name, k, v in zip(self.offload_layer_names, self.k, self.v, strict=True):
            hot = torch.zeros(2, 4096, 1, 512, dtype=torch.bfloat16), torch.zeros(2, 4096, 1, 64, dtype=torch.bfloat16)
            caches[name] = (None, None, k, v, *hot)
            caches[name.replace(".attn", ".indexer.k_cache")] = torch.zeros(blocks, 16, 128, dtype=torch.bfloat16)
        return caches


def test_guides_decode_block_builds_unchanged(
    engine_config: Callable[..., Any],
    cache_config: Callable[..., Any],
    memfabric: list[EngineOptions | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rd2h.demo.ports import free_port

    manager = PoolManager(3, 8)
    platform = ModuleType("vllm_ascend.offload_stand_in")
    monkeypatch.setattr(platform, "get_sparse_kv_offload_manager", lambda: manager, raising=False)
    monkeypatch.setitem(sys.modules, platform.__name__, platform)
    transfer, additional = json.loads(GUIDE_DECODE), json.loads(GUIDE_DECODE_ADDITIONAL)
    blocks = cache_config(indexers=True)
    config = engine_config(transfer, additional_config=additional)
    assert type(KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, blocks)) is SfaRemoteD2HConnector
    # Another run on this machine may hold the guide's port; that is the only thing the test changes.
    config = engine_config({**transfer, "kv_port": free_port()}, additional_config=additional)
    half = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, blocks)
    worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, blocks)
    try:
        worker.register_kv_caches(manager.registered(8))
        half.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
        (options,) = memfabric
        assert isinstance(options, MemfabricOptions)
        contract = worker.get_handshake_metadata().handshake.contract
        assert contract.layers[0][1:] == ((16 * 512 * 2, 16 * 64 * 2), 16 * 128 * 2, 0)
    finally:
        worker.shutdown()
        half.shutdown()


def ours(role: str = "kv_producer", **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "SfaRemoteD2HConnector",
        "kv_connector_module_path": "rd2h.connector",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


HOST = {"transfer_backend": "host", "advertise_host": "127.0.0.1"}
OFFLOAD = {"sparse_kv_offload_config": {"enabled": True}}

WRONG: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    ("missing backend", ours(), {}, ["transfer_backend=None", "'memfabric', 'host'"]),
    ("unknown backend", ours(transfer_backend="nixl"), {}, ["transfer_backend='nixl'", "'memfabric', 'host'"]),
    (
        "unknown key",
        ours(**HOST, meta_servic="grpc://a:1"),
        {},
        ["kv_connector_extra_config.meta_servic", "known keys"],
    ),
    ("wrong type", ours(**HOST, peer_timeout_s="20"), {}, ["peer_timeout_s='20'", "a positive number of seconds"]),
    (
        "bad protocol",
        ours(transfer_backend="memfabric", memfabric_transfer_protocol="tcp"),
        {},
        ["memfabric_transfer_protocol='tcp'", "'sdma', 'device_rdma', 'device_urma'"],
    ),
    (
        "wildcard",
        ours(transfer_backend="host", advertise_host="0.0.0.0"),
        {},
        ["advertise_host='0.0.0.0'", "not a wildcard"],
    ),
    ("kv_both", ours("kv_both", **HOST), {}, ["kv_role='kv_both'", "'kv_producer', 'kv_consumer'"]),
    ("port", {**ours("kv_consumer", **HOST), "kv_port": 65536}, {}, ["kv_port=65536", "1..65535"]),
    ("port 0", {**ours("kv_consumer", **HOST), "kv_port": 0}, {}, ["kv_port=0", "1..65535"]),
    (
        "port of a rank",
        {**ours("kv_consumer", **HOST), "kv_port": 65535},
        {"tensor_parallel_size": 2},
        ["kv_port=65535", "1..65534", "tensor-parallel size 2"],
    ),
    (
        "tp of the pair",
        ours(**HOST, decode_tp_size=3),
        {"tensor_parallel_size": 4},
        ["decode_tp_size=3", "a divisor of 4"],
    ),
    ("offload on Prefill", ours(**HOST), {"additional_config": OFFLOAD}, ["sparse_kv_offload_config.enabled=True"]),
    (
        "offload key",
        ours("kv_consumer", **HOST),
        {"additional_config": {"sparse_kv_offload_config": {"enable": True}}},
        ["sparse_kv_offload_config.enable=True", "known keys"],
    ),
]


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name.lower())
@pytest.mark.parametrize(("transfer", "arguments", "parts"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_configuration_is_one_line(
    transfer: dict[str, Any],
    arguments: dict[str, Any],
    parts: list[str],
    role: KVConnectorRole,
    engine_config: Callable[..., Any],
    cache_config: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused by either half, before anything is allocated: in the exception and as one line of the log."""
    monkeypatch.setattr(early, "check_transfer_config", lambda transfer: None)
    config = engine_config(transfer, **arguments)
    with pytest.raises(ConfigError) as error:
        KVConnectorFactory.create_connector(config, role, cache_config())
    assert "\n" not in str(error.value)
    logged = [r.getMessage() for r in caplog.records if r.name == "rd2h.connector" and r.levelname == "ERROR"]
    assert logged == [f"rd2h: the engine cannot start: {error.value}"]
    for part in parts:
        assert part in str(error.value)


EARLY = [w for w in WRONG if w[0] not in {"port of a rank", "tp of the pair", "offload on Prefill", "offload key"}]


@pytest.mark.parametrize(("transfer", "arguments", "parts"), [w[1:] for w in EARLY], ids=[w[0] for w in EARLY])
@pytest.mark.parametrize("by_path", [True, False])
def test_wrong_settings_stop_the_server_before_it_loads_a_model(
    transfer: dict[str, Any],
    arguments: dict[str, Any],
    parts: list[str],
    by_path: bool,
    engine_config: Callable[..., Any],
) -> None:
    """While vLLM builds its configuration, in the user's own process."""
    if not by_path:
        transfer = {key: value for key, value in transfer.items() if key != "kv_connector_module_path"}
    with pytest.raises(ConfigError) as error:
        engine_config(transfer, **arguments)
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_other_connectors_are_not_looked_at(registry: dict[str, Any], engine_config: Callable[..., Any]) -> None:
    registry["Store"] = lambda: AscendStoreConnector
    other = {"kv_connector": "Store", "kv_role": "kv_both", "kv_connector_extra_config": {"transfer_backend": "x"}}
    engine_config(other)
    composite = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    engine_config({**composite, "kv_connector_extra_config": {"connectors": [other]}})
    registry["SfaRemoteD2HConnector"] = lambda: AscendStoreConnector
    engine_config({**ours(transfer_backend="theirs"), "kv_connector_module_path": None})


def test_wrong_member_of_a_composite_is_one_line(
    registry: dict[str, Any],
    engine_config: Callable[..., Any],
    cache_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry["AscendStoreConnector"] = lambda: AscendStoreConnector
    transfer = json.loads(GUIDE_PREFILL)
    transfer["kv_connector_extra_config"]["connectors"][0]["kv_connector_extra_config"] = {
        "transfer_backend": "mooncake"
    }
    text = "transfer_backend='mooncake' is not allowed; expected one of 'memfabric'"
    with pytest.raises(ConfigError, match=text):
        engine_config(transfer)
    monkeypatch.setattr(early, "check_transfer_config", lambda transfer: None)
    with pytest.raises(ConfigError, match=text):
        KVConnectorFactory.create_connector(engine_config(transfer), KVConnectorRole.WORKER, cache_config())


OURS = {"kv_connector": "SfaRemoteD2HConnector", "kv_connector_extra_config": {"transfer_backend": "host"}}
STORE = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": "/nonexistent"}}


def composite(kv_role: str, *members: dict[str, Any], policy: str = "recompute") -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": kv_role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connectors": [{**member, "kv_role": kv_role} for member in members]},
    }


@pytest.mark.parametrize(("outer", "inner"), [("kv_producer", "kv_consumer"), ("kv_consumer", "kv_producer")])
def test_composite_and_member_have_one_role(
    outer: str,
    inner: str,
    registry: dict[str, Any],
    engine_config: Callable[..., Any],
    cache_config: Callable[..., Any],
) -> None:
    """vLLM goes by the composite's: on Decode it then frees blocks that a running step still writes."""
    expected = f"kv_role='{outer}' is not allowed; expected '{inner}', as of the member SfaRemoteD2HConnector"
    transfer = composite(inner, OURS, policy="fail")
    with pytest.raises(ConfigError, match=expected):
        engine_config({**transfer, "kv_role": outer})
    config = engine_config({**transfer, "kv_role": "kv_both"})
    config.kv_transfer_config.kv_role = outer
    with pytest.raises(ConfigError, match=expected):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache_config())


@pytest.mark.parametrize("members", [(OURS, STORE), (STORE, OURS)])
def test_prefill_does_not_compute_anew_what_decode_has_read(
    members: tuple[dict[str, Any], ...],
    registry: dict[str, Any],
    engine_config: Callable[..., Any],
    cache_config: Callable[..., Any],
) -> None:
    """vLLM learns of a failed load of the store after the step that has published its blocks."""
    expected = "kv_load_failure_policy='recompute' is not allowed; expected 'fail' on Prefill beside another connector"
    with pytest.raises(ConfigError, match=expected):
        engine_config(composite("kv_producer", *members))
    # Where vLLM does not ask early, the composite looks itself.
    config = engine_config(composite("kv_producer", *members, policy="fail"))
    config.kv_transfer_config.kv_load_failure_policy = "recompute"
    with pytest.raises(ConfigError, match=expected):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache_config())


def test_who_may_compute_anew(registry: dict[str, Any], engine_config: Callable[..., Any]) -> None:
    engine_config(composite("kv_producer", OURS, STORE, policy="fail"))
    engine_config(composite("kv_producer", OURS))
    engine_config(composite("kv_producer", STORE, STORE))
    engine_config(composite("kv_consumer", OURS, STORE))


def test_the_policy_of_a_composite_counts_for_sparse_offload(
    registry: dict[str, Any], engine_config: Callable[..., Any], cache_config: Callable[..., Any]
) -> None:
    """The entry of a member does not carry it."""
    offload = {"sparse_kv_offload_config": {"enabled": True, "topk_buffer_size": 4096}}
    config = engine_config(composite("kv_consumer", OURS, STORE), additional_config=offload)
    with pytest.raises(ConfigError, match="kv_load_failure_policy='recompute' is not allowed; expected 'fail' with sp"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache_config())


def test_global_rank_counts(engine_config: Callable[..., Any], cache_config: Callable[..., Any]) -> None:
    """Two Decode engines of one deployment on two hosts bind distinct ports by their global data-parallel rank."""
    bases = []
    for rank in range(2):
        config = engine_config({**ours("kv_consumer", **HOST), "kv_port": 20050}, tensor_parallel_size=2)
        config.parallel_config.data_parallel_index = rank
        config.parallel_config.data_parallel_rank_local = 0
        bases.append(assembly.EngineFacts.of(config, cache_config()).base_port)
    assert bases == [20050, 20052]
    config.parallel_config.data_parallel_index = 22743
    with pytest.raises(ConfigError, match="kv_port=20050 is not allowed"):
        assembly.EngineFacts.of(config, cache_config())


def test_sparse_model_over_memfabric_needs_offload_on_decode(
    engine_config: Callable[..., Any], cache_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    config = engine_config(json.loads(GUIDE_DECODE))
    monkeypatch.setattr(config.model_config.hf_text_config, "index_topk", 2048, raising=False)
    with pytest.raises(ConfigError, match=r"sparse_kv_offload_config\.enabled=False is not allowed; expected true"):
        assembly.EngineFacts.of(config, cache_config())


def test_vllm_refuses_early_where_it_asks_for_graph_modes() -> None:
    """With graphs on, vLLM asks in the server's own process: the error is the last line that the user sees."""
    with pytest.raises(ConfigError, match="transfer_backend='x' is not allowed"):
        SfaRemoteD2HConnector.requires_piecewise_for_cudagraph({"transfer_backend": "x"})
