"""Real vLLM configurations of a tiny model, and a connector registry of the test's own."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny_model_dir() -> Path:
    from rd2h.demo.model import model_dir

    return model_dir()


@pytest.fixture(scope="session", autouse=True)
def _vllm_in_this_process() -> Iterator[None]:
    """The adaptations of the demo's engines, so that a configuration takes no process of its own."""
    from rd2h.demo.cpu_tuning import tune
    from rd2h.demo.model import default_cache_dir

    values = {"VLLM_CACHE_ROOT": str(default_cache_dir() / "vllm"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    tune()
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], type[Any]]]:
    """vLLM's connector registry as it comes, with our plugin loaded; changes end with the test."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from rd2h.composition.choice import MultiConnectorLoader
    from rd2h.plugin import register

    plain = dict(KVConnectorFactory._registry)
    plain.pop("SfaRemoteD2HConnector", None)
    if isinstance(plain["MultiConnector"], MultiConnectorLoader):
        plain["MultiConnector"] = plain["MultiConnector"].load_owner
    monkeypatch.setattr(KVConnectorFactory, "_registry", plain)
    # Put back what the plugin wraps, too.
    monkeypatch.setattr(KVConnectorFactory, "supports_hma_config", vars(KVConnectorFactory)["supports_hma_config"])
    register()
    return plain


EngineConfig = Callable[..., Any]


@pytest.fixture
def engine_config(tiny_model_dir: Path, registry: dict[str, Any]) -> EngineConfig:
    """Makes a VllmConfig as ``vllm serve`` would, from ``kv_transfer_config`` as a dict and engine arguments."""

    def make(transfer: dict[str, Any] | None, **arguments: Any) -> Any:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs

        return EngineArgs(
            model=str(tiny_model_dir),
            served_model_name=["tiny-mla"],
            dtype="float32",
            enforce_eager=True,
            attention_backend="CPU_MLA",
            kv_transfer_config=KVTransferConfig(**transfer) if transfer is not None else None,
            **arguments,
        ).create_engine_config()

    return make


@pytest.fixture
def cache_config() -> Callable[..., Any]:
    """Makes a KVCacheConfig of one group of MLA layers with 16-token blocks; with an indexer each if asked for."""

    def make(layers: int = 3, blocks: int = 8, indexers: bool = False) -> Any:
        import torch
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

        spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
        names = [f"model.layers.{index}.self_attn.attn" for index in range(layers)]
        if indexers:
            names += [f"model.layers.{index}.self_attn.indexer.k_cache" for index in range(layers)]
        return KVCacheConfig(blocks, [], [KVCacheGroupSpec(names, spec)])

    return make
