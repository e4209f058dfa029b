"""Ways to run vLLM under which layer hooks would lie."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rd2h.demo.vllm_cpu import answer_metadata_lookup

if "vllm" not in sys.modules:
    answer_metadata_lookup()

from rd2h.assembly import EngineFacts
from rd2h.errors import ConfigError


def config(role: str, **parallel: Any) -> Any:
    sizes = {
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "data_parallel_index": 0,
        "pipeline_parallel_size": 1,
        "use_ubatching": False,
    }
    transfer = SimpleNamespace(
        kv_connector_extra_config={"transfer_backend": "host"}, kv_role=role, engine_id="e", kv_port=20050
    )
    model = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=2), served_model_name="m", model="m")
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(**{**sizes, **parallel}),
        model_config=model,
        additional_config={},
    )


CACHE = SimpleNamespace(
    kv_cache_groups=[SimpleNamespace(layer_names=["layers.0"], kv_cache_spec=SimpleNamespace(block_size=16))],
    num_blocks=4,
)


def test_microbatches_are_refused_on_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook of a layer then comes once a microbatch, and the first would publish blocks of the second unwritten."""
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    with pytest.raises(ConfigError, match="microbatch"):
        EngineFacts.of(config("kv_producer", use_ubatching=True), CACHE)
    assert EngineFacts.of(config("kv_producer"), CACHE).producer
    assert not EngineFacts.of(config("kv_consumer", use_ubatching=True), CACHE).producer
