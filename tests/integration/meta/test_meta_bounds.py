"""The service at its bounds: messages as large as the limits allow, and faults of its own."""

import asyncio
import time

import pytest
from meta_harness import child, engine, take, until
from rd2h_client import MetaClient, MetaRefusedError
from rd2h_client.v1.engine_registry_pb2 import LayerLayout
from rd2h_client.v1.rendezvous_pb2 import OUTCOME_DONE
from rd2h_meta.config import MetaConfig
from rd2h_meta.limits import ServerLimits
from rd2h_meta.server import MetaServer

ENGINES = 1_700
"""With layouts of 61 layers more than gRPC's usual 4 MiB."""


async def test_the_list_of_many_engines_arrives() -> None:
    server = MetaServer(MetaConfig(listen="127.0.0.1:0"))
    await server.start()
    many_layers = [
        LayerLayout(name=f"model.layers.{number}.self_attn.attn", main_block_bytes=[131_072, 16_384])
        for number in range(61)
    ]
    for number in range(ENGINES):
        entry = engine(f"d{number}")
        del entry.layout.layers[:]
        entry.layout.layers.extend(many_layers)
        server.registry.register(entry, 0.0, time.monotonic())
    try:
        async with MetaClient(server.address) as client:
            engines = await client.list_engines()
            assert len(engines) == ENGINES
            assert sum(entry.ByteSize() for entry in engines) > 4 << 20
            async for batch in client.watch_engines():
                assert len(batch.events) == ENGINES
                break
    finally:
        await server.drain()


async def test_a_tick_that_breaks_is_seen_and_the_next_one_comes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = MetaServer(MetaConfig(listen="127.0.0.1:0"))
    await server.start()
    try:
        real, calls = server.registry.expire, 0

        def expire(now_s: float) -> int:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise LookupError("nobody expected this")
            return real(now_s)

        monkeypatch.setattr(server.registry, "expire", expire)
        server.registry.register(engine("short"), 1.0, time.monotonic())
        await until(lambda: server.registry.expired_total == 1)
        assert "nobody expected this" in caplog.text
    finally:
        await server.drain()


async def test_a_client_that_awaits_at_once_more_than_its_queue_holds_hears_it_all() -> None:
    limits = ServerLimits(outbox_entries=1_000)
    server = MetaServer(MetaConfig(listen="127.0.0.1:0"), limits=limits)
    await server.start()
    table, now_s = server.rendezvous_service.table, time.monotonic()
    for number in range(12):
        for name in range(400):
            table.advertise(f"r{number}", child(f"c{name}"), 600.0, 0, now_s)
    try:
        async with MetaClient(server.address) as client:
            # One message: what it brings up would end the stream, whose successor would end in the same way.
            awaits = [client.await_children(f"r{number}", 400, 600.0) for number in range(12)]
            for told in await asyncio.gather(*(take(events, 401) for events in awaits)):
                assert told[-1] == "complete 400"
        assert server.rendezvous_service.overflowed_streams_total == 0
    finally:
        await server.drain()


async def test_an_operation_larger_than_a_message_fails_and_the_others_are_served() -> None:
    server = MetaServer(MetaConfig(listen="127.0.0.1:0"))
    await server.start()
    try:
        async with MetaClient(server.address) as client:
            events = client.await_children("r", 1, 60.0)
            huge = asyncio.create_task(client.cancel("x" * (5 << 20), "left"))
            await client.advertise("r", child("a"))
            with pytest.raises(MetaRefusedError, match="cannot be sent"):
                await huge
            await client.withdraw("r", "a", OUTCOME_DONE)
            assert await take(events, 4) == ["advertised a", "complete 1", "ended a DONE", "closed DONE"]
    finally:
        await server.drain()
