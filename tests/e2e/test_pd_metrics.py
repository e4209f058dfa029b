"""The metrics pages of real engines have every documented name, and count what a request does."""

import time

import pytest
from engine_state import wait_for, wait_idle
from rd2h_client.sync_client import SyncMetaClient

from rd2h.demo.cases import Case
from rd2h.demo.chain import ConnectedEngine, MetaProcess
from rd2h.demo.completions import complete
from rd2h.demo.counters import Counters
from rd2h.demo.engine_spec import SERVED_NAME
from rd2h.demo.model import ModelShape
from rd2h.demo.process import ManagedProcess
from rd2h.metrics import GAUGES, metric_name
from rd2h.stats import FIELDS

pytestmark = [pytest.mark.e2e, pytest.mark.pd, pytest.mark.timeout(300)]
PROMPT = "Metrics are numbers that somebody looks at."


def counted(url: str, name: str) -> float:
    return Counters.read(url).total(f"{metric_name(name)}_total")


def test_names_and_counts(proxy: ManagedProcess, prefill: ConnectedEngine, decode: ConnectedEngine) -> None:
    for engine in (prefill, decode):
        page = Counters.read(engine.url)
        for name in FIELDS:
            page.total(f"{metric_name(name)}_total", model_name=SERVED_NAME)
        for name in GAUGES:
            page.total(metric_name(name), model_name=SERVED_NAME)
    published, done = counted(prefill.url, "layers_published"), counted(decode.url, "children_done")
    # What ends after a step of an idle engine shows with its next step: so more than one request.
    deadline = time.monotonic() + 60
    while (
        counted(decode.url, "children_done") <= done
        or counted(prefill.url, "layers_published") < published + ModelShape().layers
    ):
        assert time.monotonic() < deadline, "the pulled children were not counted"
        complete(proxy.url, Case("metrics", (PROMPT,), max_tokens=4).body())
    assert Counters.read(decode.url).total("rd2h_children_failed_total", reason="read_error") == 0


def test_the_registry_knows_how_much_room_engines_have(
    meta: MetaProcess, proxy: ManagedProcess, prefill: ConnectedEngine, decode: ConnectedEngine
) -> None:
    complete(proxy.url, Case("load", (PROMPT,), max_tokens=4).body())
    wait_idle(prefill, decode)
    with SyncMetaClient(meta.address) as client:

        def at_rest() -> bool:
            loads = [engine.load for engine in client.list_engines()]
            return len(loads) >= 2 and all(
                load.total_kv_tokens == load.free_kv_tokens > 0 == load.running_requests == load.pulling_requests
                for load in loads
            )

        wait_for(at_rest, "every idle engine reports all of its KV room as free, and no request")
