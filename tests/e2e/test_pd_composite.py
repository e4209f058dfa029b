"""Real engines whose connector is a member of ``MultiConnector``, on Prefill beside vLLM's own example store."""

from pathlib import Path

import pytest

from rd2h.demo.cases import Case
from rd2h.demo.chain import Chain, MetaProcess
from rd2h.demo.completions import complete
from rd2h.demo.counters import Counters
from rd2h.demo.engine_spec import EngineSpec, KvRole
from rd2h.demo.ports import LOOPBACK, free_port
from rd2h.demo.process import ManagedProcess

pytestmark = [pytest.mark.e2e, pytest.mark.pd, pytest.mark.timeout(400)]
PROMPTS = ("Two stores and one wire.", "A composite is as good as its members are polite to each other. " * 9)


def start(chain: Chain, meta: MetaProcess, name: str, role: KvRole, beside: list[dict[str, object]]) -> ManagedProcess:
    port, kv_port = free_port(), free_port()
    ours = {
        "kv_connector": "SfaRemoteD2HConnector",
        "kv_role": role,
        "kv_port": kv_port,
        "kv_connector_extra_config": {
            "transfer_backend": "host",
            "meta_service": f"grpc://{meta.address}",
            "advertise_host": LOOPBACK,
            "http_address": f"{LOOPBACK}:{port}",
        },
    }
    spec = EngineSpec(
        name,
        chain.model_dir,
        role,
        kv_connector="MultiConnector",
        kv_connector_module=None,
        kv_extra={"connectors": [*beside, ours]},
        max_batched_tokens=chain.chunk_tokens,
    )
    return chain.launcher.start_engine(spec, port)


def test_tokens_through_composites(chain: Chain, meta: MetaProcess, single: ManagedProcess, tmp_path: Path) -> None:
    store = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "store")},
    }
    prefill = start(chain, meta, "prefill-composite", "kv_producer", [store])
    decode = start(chain, meta, "decode-composite", "kv_consumer", [])
    chain.launcher.wait_engines([prefill, decode])
    proxy = chain.start_proxy(meta, prefill, decode, "proxy-composite")
    for prompt in PROMPTS:
        body = Case("composite", (prompt,), max_tokens=12).body()
        assert complete(proxy.url, body) == complete(single.url, body)
    page = Counters.read(decode.url)
    assert page.total("rd2h_children_done_total") == len(PROMPTS)
    assert page.total("rd2h_prompt_tokens_computed_total") == len(PROMPTS)
    # The store beside us has done its work too.
    assert list((tmp_path / "store").rglob("*.safetensors"))
    for engine in (prefill, decode, proxy):
        engine.stop()
