"""A real Prefill engine with nothing else to do tells the meta service of children that it cannot serve, at once."""

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rd2h_client import MetaClient
from rd2h_client.kv_params import child_to_params
from rd2h_client.v1 import engine_registry_pb2 as registry
from rd2h_client.v1 import rendezvous_pb2 as rendezvous

from rd2h.demo.chain import Chain, ConnectedEngine, MetaProcess
from rd2h.demo.completions import post
from rd2h.demo.launcher import Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.pd, pytest.mark.timeout(300)]

CONNECT_S = 1.0
REGISTRATION_WAIT_S = 3.0
AT_ONCE_S = 2.0


@pytest.fixture(scope="module")
def prefill(launcher: Launcher, tiny_model: Path, meta: MetaProcess) -> ConnectedEngine:
    """One Prefill engine alone: no other request makes it step."""
    times = {"connect_timeout_s": CONNECT_S, "registration_wait_s": REGISTRATION_WAIT_S}
    engine = Chain(launcher, tiny_model, kv_extra=times).start_prefill(meta, name="prefill-alone")
    launcher.wait_engines([engine.process])
    return engine


@pytest.fixture
def silent() -> Iterator[int]:
    """Port of somebody who accepts connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


class Rendezvous:
    """One child of a Decode that this test plays, from its advert to what is reported of it."""

    def __init__(self, client: MetaClient, engine: registry.Engine) -> None:
        self._client, self.engine = client, engine
        self.rendezvous_id = secrets.token_hex(8)
        self.child = rendezvous.Child(
            request_id=f"cmpl-{self.rendezvous_id}-0",
            token=secrets.token_bytes(16),
            engine_id=engine.engine_id,
            generation=engine.generation,
            host=engine.host,
            base_port=engine.base_port,
            tp_size=1,
            wire_version=1,
        )

    async def prefilled(self, url: str, **changes: Any) -> asyncio.Task[tuple[float, str]]:
        """Let Prefill compute it; the task gives the time from its answer to the report, and the reason."""
        events = self._client.await_children(self.rendezvous_id, 1, 60.0)
        await self._client.advertise(self.rendezvous_id, self.child)
        params = {**child_to_params(self.child), "rendezvous_id": self.rendezvous_id, "x_request_id": "x", **changes}
        body = {"model": "tiny-mla", "prompt": list(range(5, 45)), "max_tokens": 1, "kv_transfer_params": params}
        await asyncio.to_thread(post, url, "/v1/completions", body)
        answered = time.monotonic()

        async def reported() -> tuple[float, str]:
            async for event in events:
                if event.WhichOneof("event") == "child_ended":
                    return time.monotonic() - answered, event.child_ended.reason
            raise AssertionError("the rendezvous ended without a word of its child")

        return asyncio.create_task(reported())


@asynccontextmanager
async def played_decode(
    prefill: ConnectedEngine, meta: MetaProcess, port: int, *, registered: bool = True
) -> AsyncIterator[tuple[MetaClient, Rendezvous]]:
    """A client and the rendezvous of a Decode at ``port`` that is registered, or not yet."""
    async with MetaClient(meta.address) as client:
        # Engines of other tests may be registered here as well, with other layouts.
        engines = await client.list_engines(registry.ENGINE_ROLE_PREFILL)
        (facts,) = [engine for engine in engines if prefill.url.endswith(engine.http_address)]
        engine = registry.Engine()
        engine.CopyFrom(facts)
        engine.engine_id, engine.generation = f"played-{secrets.token_hex(4)}", secrets.randbits(62) | 1
        engine.role, engine.host, engine.base_port = registry.ENGINE_ROLE_DECODE, "127.0.0.1", port
        registration = await client.register(engine) if registered else None
        yield client, Rendezvous(client, engine)
        if registration is not None:
            await registration.close()


async def test_a_decode_that_does_not_answer(prefill: ConnectedEngine, meta: MetaProcess, silent: int) -> None:
    """The failure comes after the engine's last step; no other request ever makes another one."""
    async with played_decode(prefill, meta, silent) as (_, played):
        after_s, reason = await asyncio.wait_for(await played.prefilled(prefill.url), 30)
    assert "no answer while connecting" in reason
    assert after_s < CONNECT_S + AT_ONCE_S


@pytest.mark.parametrize("changes", [{"remote_cached_tokens": -1}, {"token": "?"}, {"remote_port": "x"}])
async def test_parameters_that_cannot_be_used(
    changes: dict[str, Any], prefill: ConnectedEngine, meta: MetaProcess, silent: int
) -> None:
    async with played_decode(prefill, meta, silent) as (_, played):
        after_s, reason = await asyncio.wait_for(await played.prefilled(prefill.url, **changes), 30)
    assert next(iter(changes)) in reason
    assert after_s < AT_ONCE_S


async def test_a_prompt_that_no_child_wants(prefill: ConnectedEngine, meta: MetaProcess, silent: int) -> None:
    async with played_decode(prefill, meta, silent) as (_, played):
        entry = child_to_params(played.child)
        batch = {"a": {**entry, "prompt_index": 3}, "b": {**entry, "request_id": "b", "prompt_index": 4}}
        after_s, reason = await asyncio.wait_for(
            await played.prefilled(prefill.url, batch_kv_transfer_params=batch), 30
        )
    assert "Prefill cannot place its request" in reason
    assert after_s < AT_ONCE_S


async def test_a_decode_that_is_not_registered(prefill: ConnectedEngine, meta: MetaProcess, silent: int) -> None:
    begin = time.monotonic()
    async with played_decode(prefill, meta, silent, registered=False) as (_, played):
        _, reason = await asyncio.wait_for(await played.prefilled(prefill.url), 30)
    assert "is registered at 127.0.0.1" in reason
    assert REGISTRATION_WAIT_S <= time.monotonic() - begin < REGISTRATION_WAIT_S + 5


async def test_a_decode_that_is_registered_a_moment_later(
    prefill: ConnectedEngine, meta: MetaProcess, silent: int
) -> None:
    """Its address is then connected to: this one does not answer, which is another reason than not being known."""
    async with played_decode(prefill, meta, silent, registered=False) as (client, played):
        prefilling = asyncio.create_task(played.prefilled(prefill.url))
        ordinary = {"model": "tiny-mla", "prompt": list(range(5, 45)), "max_tokens": 4}
        # The engine serves others meanwhile.
        await asyncio.to_thread(post, prefill.url, "/v1/completions", ordinary)
        assert not prefilling.done()
        registration = await client.register(played.engine)
        _, reason = await asyncio.wait_for(await prefilling, 30)
        await registration.close()
    assert "no answer while connecting" in reason
