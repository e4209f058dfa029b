"""A meta service that keeps no further rendezvous: the client hears so at once, and no engine is blamed."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator

import pytest
from proxy_harness import META_COMMAND, Process, chain, meta_address
from rd2h_client.client import MetaClient
from rd2h_proxy.breaker import BreakerState

SOON_S = 5.0


@pytest.fixture
async def small_meta() -> AsyncIterator[str]:
    """host:port of a service that keeps one rendezvous."""
    command = (sys.executable, *META_COMMAND, "--listen", "127.0.0.1:0", "--max-open", "1")
    service = await Process.start(*command, marker="rd2h meta: serving on")
    yield meta_address(service)
    await service.kill()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_meta_service_is_503_at_once_and_no_engines_fault(small_meta: str, stream: bool) -> None:
    async with chain(small_meta) as c, MetaClient(small_meta) as other:
        events = other.await_children("somebody-elses", 1, 60)
        while (await other.stats()).open < 1:
            await asyncio.sleep(0.01)
        for _ in range(3):
            began = time.monotonic()
            reply = await c.post({"prompt": "x", "stream": stream})
            assert time.monotonic() - began < SOON_S
            assert reply.status == 503, reply.body
            assert int(reply.headers["Retry-After"]) >= 1
            assert "1 rendezvous are open" in reply.json()["error"]["message"]
        for target in [*c.proxy.router.prefill.targets, *c.proxy.router.decode.targets]:
            assert target.breaker.state is BreakerState.CLOSED
            assert target.breaker.failures == 0
        await events.aclose()
        await other.cancel("somebody-elses", "enough")
        assert (await c.post({"prompt": "x", "stream": stream})).status == 200
        await c.settled()


async def test_one_place_serves_one_request_after_the_other(small_meta: str) -> None:
    async with chain(small_meta) as c, MetaClient(small_meta) as other:
        for _ in range(5):
            assert (await c.post({"prompt": "x"})).status == 200
        await c.settled()
        assert (await other.stats()).open == 0


async def test_a_decode_that_is_slow_to_advertise_is_not_taken_for_a_full_service(meta: str) -> None:
    async with chain(meta, "--rendezvous-s", "2.5", "--retries", "0") as c:
        c.decode.script.silent = True
        reply = await c.post({"prompt": "x"})
        assert reply.status == 504
        assert c.decode.address in reply.json()["error"]["message"]
        await c.settled()
