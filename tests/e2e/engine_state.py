"""Waiting for real engines to come to rest."""

import json
import time
import urllib.request
from collections.abc import Callable

from rd2h_client.sync_client import SyncMetaClient

from rd2h.demo.chain import ConnectedEngine, MetaProcess
from rd2h.demo.counters import Counters
from rd2h.demo.process import ManagedProcess

SETTLE_S = 30.0
_IN_USE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = SETTLE_S) -> None:
    """Waits for the condition; fails the test when it does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def idle(*engines: ConnectedEngine) -> bool:
    """No engine has a request or a block in use."""
    pages = [Counters.read(engine.url) for engine in engines]
    return all(page.total(name) == 0 for page in pages for name in _IN_USE)


def wait_idle(*engines: ConnectedEngine) -> None:
    """Waits until no engine has a request or a block in use."""
    wait_for(lambda: idle(*engines), "engines idle, all blocks free")


def wait_nothing_left(meta: MetaProcess, proxy: ManagedProcess, *engines: ConnectedEngine) -> None:
    """Waits until no engine, proxy or meta service knows of a request any more."""
    wait_idle(*engines)

    def proxy_idle() -> bool:
        with urllib.request.urlopen(f"{proxy.url}/healthcheck", timeout=20) as answer:
            roles = json.load(answer)["engines"]
        return all(engine["in_flight"] == engine["work_tokens"] == 0 for role in roles.values() for engine in role)

    wait_for(proxy_idle, "no place on an engine taken")
    with SyncMetaClient(meta.address) as client:
        stats = client.stats
        wait_for(lambda: (now := stats()).open == now.live_children == now.waiters == 0, "no rendezvous open")


def reset_prefix_cache(engine: ConnectedEngine) -> None:
    """Empties an idle engine's prefix cache."""
    request = urllib.request.Request(f"{engine.url}/reset_prefix_cache", b"", method="POST")
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status == 200
