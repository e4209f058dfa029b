"""Engines that join, drain, fall ill and leave at run time (X8, R9, R11), with the real registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
from proxy_harness import make_config, post, until
from proxy_standins import DecodeStandIn, PrefillStandIn
from rd2h_client.client import MetaClient
from rd2h_client.v1.engine_registry_pb2 import DataPathHealth, EngineState, Load
from rd2h_proxy.service import RunningProxy, running


@dataclass
class World:
    """A proxy without engines, and the means to add some."""

    proxy: RunningProxy
    client: MetaClient
    session: aiohttp.ClientSession
    stack: AsyncExitStack
    name: str

    async def prefill(self, kv_dtype: str = "bfloat16") -> PrefillStandIn:
        engine = PrefillStandIn()
        await engine.start()
        self.stack.push_async_callback(engine.stop)
        await engine.register(self.client, f"{self.name}-p{engine.port}", kv_dtype)
        return engine

    async def decode(self, kv_dtype: str = "bfloat16", http_address: str | None = None) -> DecodeStandIn:
        engine = DecodeStandIn(meta=self.client)
        await engine.start()
        self.stack.push_async_callback(engine.stop)
        engine.engine_id = f"{self.name}-d{engine.port}"
        await engine.register(self.client, engine.engine_id, kv_dtype)
        return engine

    async def ask(self, prompt: str = "x") -> int:
        reply = await post(self.session, f"http://{self.proxy.address}/v1/completions", {"prompt": prompt})
        return reply.status

    async def health(self) -> int:
        """Status of /health; the two other pages must agree with it."""
        statuses = []
        for path in ("/health", "/healthcheck"):
            async with self.session.get(f"http://{self.proxy.address}{path}") as response:
                statuses.append(response.status)
        async with self.session.get(f"http://{self.proxy.address}/") as response:
            statuses.append(503 if ">not serving<" in await response.text() else 200)
        assert len(set(statuses)) == 1, statuses
        return statuses[0]

    def usable(self) -> tuple[int, int]:
        router = self.proxy.router
        return len(router.prefill.usable()), len(router.decode.usable())

    async def usable_is(self, prefills: int, decodes: int) -> None:
        await until(lambda: self.usable() == (prefills, decodes), f"{prefills} Prefill and {decodes} Decode usable")


@asynccontextmanager
async def world(meta: str, *flags: str) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(MetaClient(meta))
        # Other tests may have engines in the same registry for a moment.
        while await client.list_engines():
            await asyncio.sleep(0.05)
        watcher = await stack.enter_async_context(MetaClient(meta))
        proxy = await stack.enter_async_context(running(make_config(meta, [], [], *flags), watcher))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield World(proxy, client, session, stack, f"t{time.monotonic_ns()}")


async def test_x8_traffic_follows_engines_that_join_drain_and_leave(meta: str) -> None:
    async with world(meta) as w:
        waiting = asyncio.create_task(w.ask())
        await w.prefill()
        first = await w.decode()
        assert await waiting == 200
        second = await w.decode()
        await w.usable_is(1, 2)
        assert {await w.ask() for _ in range(4)} == {200}
        assert second.counts["requests"] == 2

        assert first.registration is not None
        first.registration.update(state=EngineState.ENGINE_STATE_DRAINING)
        await w.usable_is(1, 1)
        before = first.counts["requests"]
        assert {await w.ask() for _ in range(3)} == {200}
        assert first.counts["requests"] == before

        await first.stop()
        router = w.proxy.router
        await until(lambda: router.decode.get(first.address) is None, "the drained engine is forgotten")
        assert await w.ask() == 200
        await second.stop()
        await w.usable_is(1, 0)


async def test_r11_an_ill_data_path_keeps_requests_away(meta: str) -> None:
    async with world(meta) as w:
        await w.prefill()
        ill, well = await w.decode(), await w.decode()
        await w.usable_is(1, 2)
        assert ill.registration is not None
        ill.registration.update(health=DataPathHealth(ok=False, reason="reader thread is dead"))
        await w.usable_is(1, 1)
        assert "reader thread is dead" in w.proxy.router.decode.describe_unusable()
        assert {await w.ask() for _ in range(3)} == {200}
        assert (ill.counts["requests"], well.counts["requests"]) == (0, 3)
        ill.registration.update(health=DataPathHealth(ok=True))
        await w.usable_is(1, 2)


async def test_r9_engines_that_do_not_fit_are_never_paired(meta: str) -> None:
    async with world(meta, "--meta-outage-s", "0.5") as w:
        prefill = await w.prefill("float16")
        decode = await w.decode("bfloat16")
        await w.usable_is(1, 1)
        reply = await post(w.session, f"http://{w.proxy.address}/v1/completions", {"prompt": "x"})
        assert reply.status == 503
        message = reply.json()["error"]["message"]
        assert "kv_dtype" in message
        assert "float16" in message
        assert "bfloat16" in message
        assert prefill.counts["requests"] == decode.counts["requests"] == 0
        assert await w.health() == 503
        fitting = await w.prefill("bfloat16")
        await w.usable_is(2, 1)
        assert {await w.ask() for _ in range(3)} == {200}
        assert (prefill.counts["requests"], fitting.counts["requests"]) == (0, 3)
        assert await w.health() == 200


async def test_requests_on_a_restarted_engine_end_at_once(meta: str) -> None:
    async with world(meta, "--retries", "0") as w:
        prefill = await w.prefill()
        prefill.gate = asyncio.Event()
        decode = await w.decode()
        await w.usable_is(1, 1)
        request = asyncio.create_task(w.ask())
        await until(lambda: prefill.active == 1, "Prefill works")
        # The same engine id with a new generation, while the old connection looks fine.
        await decode.register(w.client, decode.engine_id)
        assert await asyncio.wait_for(request, 10) == 502
        await until(lambda: decode.active == prefill.active == 0, "both engines were aborted")


async def test_an_engine_that_vanished_under_load_is_forgotten_with_its_last_request(meta: str) -> None:
    async with world(meta, "--retries", "0") as w:
        prefill = await w.prefill()
        prefill.gate = asyncio.Event()
        decode = await w.decode()
        await w.usable_is(1, 1)
        request = asyncio.create_task(w.ask())
        await until(lambda: prefill.active == 1, "Prefill works")
        pool = w.proxy.router.decode
        assert decode.registration is not None
        await decode.registration.close()
        await w.usable_is(1, 0)
        assert pool.get(decode.address) is not None, "it has a request, and is watched"
        prefill.gate.set()
        assert await request == 200
        await until(lambda: pool.get(decode.address) is None, "it is forgotten", 2)
        decode.registration = None


async def test_decode_without_kv_room_is_avoided(meta: str) -> None:
    async with world(meta) as w:
        await w.prefill()
        full, roomy = await w.decode(), await w.decode()
        await w.usable_is(1, 2)
        assert full.registration is not None
        full.registration.update(load=Load(free_kv_tokens=10, total_kv_tokens=1000))
        target = w.proxy.router.decode.get(full.address)
        assert target is not None
        await until(lambda: target.lacks_kv_room(11), "the load report has come")
        assert {await w.ask() for _ in range(4)} == {200}
        assert (full.counts["requests"], roomy.counts["requests"]) == (0, 4)
