"""Killing a part of the chain under load: every client gets a definite answer soon, and the rest goes on."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from engine_state import wait_idle
from streaming_load import Attempt, StreamingLoad

from rd2h.demo.cases import Case
from rd2h.demo.chain import Chain, ConnectedEngine, MetaProcess, wait_listening
from rd2h.demo.completions import CompletionError, complete
from rd2h.demo.process import ManagedProcess

pytestmark = [pytest.mark.e2e, pytest.mark.pd, pytest.mark.timeout(300)]
# What the client may wait after a kill.
ANSWER_S = 10.0
# After the killed part is back.
RECOVERY_S = 40.0
WORKERS = 4


@dataclass
class Deployment:
    """One chain of its own, so that killing parts of it disturbs no other test."""

    chain: Chain
    meta: MetaProcess
    prefill: ConnectedEngine
    decode: ConnectedEngine
    proxy: ManagedProcess
    single: ManagedProcess
    probes: int = 0

    def probe(self) -> None:
        """One fresh prompt through the chain; its tokens must be those of the single engine."""
        self.probes += 1
        case = Case("probe", (f"Fresh prompt number {self.probes} for a repaired chain",))
        assert complete(self.proxy.url, case.body(), timeout_s=ANSWER_S) == complete(self.single.url, case.body())

    def probe_until_served(self, timeout_s: float = RECOVERY_S) -> None:
        """Retries refused probes; each refusal itself must come soon."""
        deadline = time.monotonic() + timeout_s
        while (refusal := self._refusal()) is not None:
            assert time.monotonic() < deadline, f"not served {timeout_s} s after the repair: {refusal}"
            time.sleep(0.2)

    def _refusal(self) -> CompletionError | None:
        started = time.monotonic()
        try:
            self.probe()
        except CompletionError as error:
            waited_s = time.monotonic() - started
            if waited_s > ANSWER_S:
                raise
            return error
        return None


@pytest.fixture
def deployment(chain: Chain, single: ManagedProcess) -> Iterator[Deployment]:
    meta = chain.start_meta()
    prefill, decode = chain.start_prefill(meta, "kill-prefill"), chain.start_decode(meta, "kill-decode")
    chain.launcher.wait_engines([prefill.process, decode.process])
    proxy = chain.start_proxy(meta, prefill.process, decode.process, "kill-proxy")
    deployment = Deployment(chain, meta, prefill, decode, proxy, single)
    deployment.probe()
    yield deployment
    for process in (deployment.proxy, deployment.decode.process, deployment.prefill.process, deployment.meta.process):
        process.stop()


def assert_answered(attempts: list[Attempt], killed_s: float) -> None:
    """Every request ended within ANSWER_S of the kill, or of its own start when it came later."""
    for attempt in attempts:
        assert attempt.ended_s is not None
        waited_s = attempt.ended_s - max(killed_s, attempt.started_s)
        assert waited_s < ANSWER_S, f"{waited_s:.1f} s for {attempt.prompt[:30]!r}: {attempt.error}"


def run_on(seconds: float) -> None:
    """Lets the load meet the outage for a while; nothing is expected to change in between."""
    time.sleep(seconds)


def test_kill_prefill(deployment: Deployment) -> None:
    with StreamingLoad(deployment.proxy.url, WORKERS) as load:
        streaming = load.wait_streaming(2)
        killed_s = time.monotonic()
        deployment.prefill.process.kill()
        with StreamingLoad(deployment.proxy.url, 2, max_tokens=4) as late_load:
            attempts = late_load.finish(ANSWER_S + 20)
        attempts += load.finish(ANSWER_S + 20)
    # Streams that had their first token do not need Prefill any more.
    assert all(attempt.finished and len(attempt.tokens) == 300 for attempt in streaming)
    later = [a for a in attempts if a.started_s > killed_s]
    assert len(later) >= 2
    assert all(a.error is not None for a in later)
    assert_answered([a for a in attempts if a.first_token_s is None or a.first_token_s > killed_s], killed_s)
    port = int(deployment.prefill.url.rpartition(":")[2])
    deployment.prefill = deployment.chain.start_prefill(deployment.meta, "kill-prefill", port=port)
    deployment.chain.launcher.wait_engines([deployment.prefill.process])
    deployment.probe_until_served()


def test_kill_decode(deployment: Deployment) -> None:
    with StreamingLoad(deployment.proxy.url, WORKERS) as load:
        streaming = load.wait_streaming(2)
        killed_s = time.monotonic()
        deployment.decode.process.kill()
        run_on(3.0)
        attempts = load.finish(ANSWER_S + 20)
    assert all(attempt.error is not None for attempt in streaming)
    assert_answered([a for a in attempts if (a.ended_s or 0) > killed_s], killed_s)
    assert deployment.prefill.process.alive
    port = int(deployment.decode.url.rpartition(":")[2])
    deployment.decode = deployment.chain.start_decode(
        deployment.meta, "kill-decode", port=port, kv_port=deployment.decode.kv_port
    )
    deployment.chain.launcher.wait_engines([deployment.decode.process])
    deployment.probe_until_served()


def test_kill_proxy(deployment: Deployment) -> None:
    with StreamingLoad(deployment.proxy.url, WORKERS) as load:
        streaming = load.wait_streaming(2)
        killed_s = time.monotonic()
        deployment.proxy.kill()
        attempts = load.finish(ANSWER_S + 20)
    assert all(attempt.error is not None for attempt in streaming)
    assert_answered([a for a in attempts if (a.ended_s or 0) > killed_s], killed_s)
    # They must not go on working for the dead proxy.
    wait_idle(deployment.prefill, deployment.decode)
    deployment.proxy = deployment.chain.start_proxy(
        deployment.meta, deployment.prefill.process, deployment.decode.process, "kill-proxy-2"
    )
    deployment.probe_until_served()


def test_kill_meta_service(deployment: Deployment) -> None:
    with StreamingLoad(deployment.proxy.url, WORKERS) as load:
        streaming = load.wait_streaming(2)
        killed_s = time.monotonic()
        deployment.meta.process.kill()
        with StreamingLoad(deployment.proxy.url, 2, max_tokens=4) as late_load:
            attempts = late_load.finish(ANSWER_S + 20)
        attempts += load.finish(ANSWER_S + 20)
    assert all(attempt.finished and len(attempt.tokens) == 300 for attempt in streaming)
    later = [a for a in attempts if a.started_s > killed_s]
    assert len(later) >= 2
    assert_answered(later, killed_s)
    assert all(a.error is not None and a.error.status == 503 for a in later)
    deployment.meta = deployment.chain.start_meta(deployment.meta.port)
    wait_listening(deployment.meta.process, deployment.meta.port)
    deployment.probe_until_served()


def test_request_waits_for_the_return_of_the_meta_service(deployment: Deployment) -> None:
    deployment.meta.process.kill()
    with StreamingLoad(deployment.proxy.url, 1, max_tokens=8) as load:
        run_on(1.0)
        deployment.meta = deployment.chain.start_meta(deployment.meta.port)
        attempts = load.finish(ANSWER_S + 20)
    assert attempts[0].finished or (attempts[0].error is not None and attempts[0].error.status == 503)
    assert_answered(attempts, attempts[0].started_s)
    deployment.probe_until_served()
