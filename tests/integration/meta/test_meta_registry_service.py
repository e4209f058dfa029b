"""Registry over a socket: leases, watches, health, compatibility. Cases R2, R6, R8, R9, R11."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from meta_harness import MetaProcess, engine, engine_ids, until
from rd2h_client import (
    ClientOptions,
    EngineBatch,
    EngineStatus,
    MetaClient,
    MetaExhaustedError,
    MetaRefusedError,
)
from rd2h_client.v1 import engine_registry_pb2 as er
from rd2h_client.v1.engine_registry_pb2_grpc import EngineRegistryStub

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
EVENTS = 12_000
"""More than a watcher's queue, the message under way and gRPC's own buffers hold."""
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.fixture
def name() -> str:
    return f"d-{secrets.token_hex(6)}"


class Follower:
    """A watch in a task, with all that it was told."""

    def __init__(self, client: MetaClient) -> None:
        self.lines: list[str] = []
        self.batches: list[EngineBatch] = []
        self._task = asyncio.create_task(self._run(client.watch_engines()))

    async def _run(self, batches: AsyncIterator[EngineBatch]) -> None:
        async for batch in batches:
            self.batches.append(batch)
            for event in batch.events:
                kind = er.EngineEvent.Kind.Name(event.kind).removeprefix("KIND_")
                reason = er.EngineEvent.Reason.Name(event.reason).removeprefix("REASON_") if event.reason else ""
                self.lines.append(f"{kind} {event.engine.engine_id} {event.engine.generation} {reason}".strip())

    def about(self, name: str) -> list[str]:
        return [line.replace(f" {name} ", " ") for line in self.lines if f" {name} " in line]

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.fixture
async def follower(client: MetaClient) -> AsyncIterator[Follower]:
    watching = Follower(client)
    await until(lambda: watching.batches)
    yield watching
    await watching.stop()


async def test_register_update_and_leave(client: MetaClient, follower: Follower, name: str) -> None:
    registration = await client.register(engine(name))
    registration.update(state=er.ENGINE_STATE_DRAINING)
    await until(lambda: len(follower.about(name)) == 2)
    await registration.close()
    await until(lambda: len(follower.about(name)) == 3)
    assert follower.about(name) == ["ADDED 1", "UPDATED 1", "REMOVED 1 DEREGISTERED"]
    assert name not in await engine_ids(client)


async def test_a_new_generation_replaces_and_fences_the_old(client: MetaClient, follower: Follower, name: str) -> None:
    old = await client.register(engine(name, 1))
    new = await client.register(engine(name, 2))
    old.renew()
    await until(lambda: old.lost is not None)
    assert "replaced by generation 2" in str(old.lost)
    await until(lambda: len(follower.about(name)) == 3)
    assert follower.about(name) == ["ADDED 1", "REMOVED 1 REPLACED", "ADDED 2"]
    assert new.lost is None
    await new.close()


async def test_a_lapsed_lease_is_one_event_and_its_return_another(
    client: MetaClient, follower: Follower, name: str
) -> None:
    registry = EngineRegistryStub(client._channel)
    for _ in range(2):  # R6: the engine was stopped for longer than its lease, then it goes on
        await registry.Register(er.RegisterRequest(engine=engine(name), requested_ttl_ms=1_000))
        await until(lambda: follower.about(name)[-1:] == ["REMOVED 1 EXPIRED"])
        follower.lines.append(f"pause {name} over")
    assert follower.about(name) == ["ADDED 1", "REMOVED 1 EXPIRED", "pause over"] * 2


async def test_a_kept_lease_outlives_its_time(client: MetaClient, follower: Follower, name: str) -> None:
    polls: list[int] = []

    def status() -> EngineStatus:
        polls.append(1)
        return EngineStatus(load=er.Load(running_requests=5))

    started_s = time.monotonic()
    registration = await client.register(engine(name), status, ttl_s=2.0)
    await until(lambda: time.monotonic() - started_s > 4.5)  # more than twice the lease
    assert len(polls) >= 3
    assert follower.about(name) == ["ADDED 1", "UPDATED 1"]
    await registration.close()


async def test_engines_with_unusable_facts_are_refused(client: MetaClient, name: str) -> None:
    for changes, field in (
        ({"host": "0.0.0.0"}, "engine.host"),
        ({"host": "::"}, "engine.host"),
        ({"base_port": 65_535, "tp_size": 2}, "engine.base_port"),
        ({"tp_size": 0}, "engine.tp_size"),
        ({"dp_size": 2, "dp_rank": 2}, "engine.dp_rank"),
        ({"generation": 0}, "engine.generation"),
    ):
        with pytest.raises(MetaRefusedError, match=field):
            await client.register(engine(name, **changes))


async def test_an_ipv6_engine_is_listed_as_it_registered(client: MetaClient, name: str) -> None:
    registration = await client.register(engine(name, host="fd00::7", http_address="[fd00::7]:8000"))
    (found,) = [entry for entry in await client.list_engines() if entry.engine_id == name]
    assert (found.host, found.http_address) == ("fd00::7", "[fd00::7]:8000")
    await registration.close()


def layout(**changes: object) -> er.Layout:
    fields: dict[str, object] = {
        "wire_version": 1,
        "transfer_backend": "host",
        "model": "tiny",
        "kv_dtype": "bfloat16",
        "block_size_tokens": 16,
        "layers": [er.LayerLayout(name="layer.0", main_block_bytes=[4096])],
        "fingerprint": secrets.token_bytes(32),
    }
    return er.Layout(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"wire_version": 2}, "layout.wire_version: prefill has 2, decode has 1"),
        (
            {"layers": [er.LayerLayout(name="layer.0", main_block_bytes=[8192])]},
            "prefill has [8192], decode has [4096]",
        ),
        ({"layers": [er.LayerLayout(name="layer.0", main_block_bytes=[4096, 1])]}, "prefill has [4096, 1]"),
        (
            {"layers": [er.LayerLayout(name="layer.0", main_block_bytes=[4096], scale_block_bytes=64)]},
            "layout.layers[0].scale_block_bytes: prefill has 64, decode has 0",
        ),
    ],
)
async def test_engines_that_do_not_fit_are_refused_before_any_work(
    client: MetaClient, name: str, changes: dict[str, object], text: str
) -> None:
    prefill = await client.register(
        engine(f"p-{name}", role=er.ENGINE_ROLE_PREFILL, host="", base_port=0, layout=layout(**changes))
    )
    decode = await client.register(engine(name, layout=layout()))
    with pytest.raises(MetaRefusedError) as refused:
        await client.check_compatibility(f"p-{name}", name)
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert text in refused.value.message
    prefill.replace(engine(f"p-{name}", role=er.ENGINE_ROLE_PREFILL, host="", base_port=0, layout=layout()))

    async def fits() -> bool:
        try:
            await client.check_compatibility(f"p-{name}", name)
        except MetaRefusedError as error:
            return "fingerprint" in error.message  # equal but for the random fingerprints
        return True

    await until(fits)
    await prefill.close()
    await decode.close()


async def test_health_follows_lease_state_and_data_path_within_one_ttl(client: MetaClient, name: str) -> None:
    service = f"rd2h.engine.{name}"
    async with grpc.aio.insecure_channel(client.target.authority) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        call = health.Watch(health_pb2.HealthCheckRequest(service=service))

        async def next_status() -> int:
            return int((await asyncio.wait_for(call.read(), 10.0)).status)

        async def check() -> int:
            return int((await health.Check(health_pb2.HealthCheckRequest(service=service))).status)

        assert await next_status() == SERVICE_UNKNOWN
        reader_alive = True

        def status() -> EngineStatus:
            return EngineStatus(health=er.DataPathHealth(ok=reader_alive, reason="" if reader_alive else "reader died"))

        registration = await client.register(engine(name), status, ttl_s=1.0)
        assert await next_status() == SERVING
        reader_alive = False  # R11: seen at the next renewal, a third of the lease away
        assert await asyncio.wait_for(next_status(), 1.0) == NOT_SERVING
        assert await check() == NOT_SERVING
        reader_alive = True
        assert await asyncio.wait_for(next_status(), 1.0) == SERVING
        registration._task.cancel()  # type: ignore[union-attr]  # the engine stops without a word: its lease lapses
        assert await asyncio.wait_for(next_status(), 1.5) == NOT_SERVING
        assert await check() == NOT_SERVING
        call.cancel()


async def test_the_service_itself_is_serving_and_describes_itself(client: MetaClient) -> None:
    async with grpc.aio.insecure_channel(client.target.authority) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "rd2h.meta.v1.Rendezvous", "rd2h.meta.v1.EngineRegistry"):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=service))).status == SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        response = await call.read()
        names = {entry.name for entry in response.list_services_response.service}
        assert {"rd2h.meta.v1.Rendezvous", "rd2h.meta.v1.EngineRegistry", "grpc.health.v1.Health"} <= names


async def test_ten_thousand_events_beside_a_stalled_watcher(make_service: Callable[..., MetaProcess]) -> None:
    service = make_service()
    async with (
        MetaClient(service.target) as client,
        grpc.aio.insecure_channel(service.address, options=[("grpc.http2.lookahead_bytes", 0)]) as channel,
    ):
        stalled = EngineRegistryStub(channel).WatchEngines(er.WatchEnginesRequest())
        await stalled.read()
        quick = Follower(client)
        await until(lambda: quick.batches)
        registry = EngineRegistryStub(client._channel)
        big = er.Layout(model="m" * 200, layers=[er.LayerLayout(name=f"l{i}" * 20) for i in range(20)])
        lease = (await registry.Register(er.RegisterRequest(engine=engine("d0", layout=big)))).lease_id

        async def report(number: int) -> None:
            load = er.Load(running_requests=number + 1)
            await registry.KeepAlive(er.KeepAliveRequest(lease_id=lease, load=load))

        for start in range(0, EVENTS, 500):
            await asyncio.gather(*(report(start + offset) for offset in range(500)))
        await until(lambda: len(quick.lines) >= EVENTS + 1, timeout_s=30.0, what="every event at the quick watcher")
        assert quick.lines == ["ADDED d0 1"] + ["UPDATED d0 1"] * EVENTS
        revisions = [event.revision for batch in quick.batches for event in batch.events]
        assert revisions == list(range(1, EVENTS + 2))

        async def read_on() -> None:
            while await asyncio.wait_for(stalled.read(), 10.0) is not grpc.aio.EOF:
                pass

        with pytest.raises(grpc.aio.AioRpcError) as told:
            await read_on()
        assert told.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await quick.stop()


async def test_a_watch_resumes_from_a_revision_or_is_told_to_list_again(client: MetaClient, name: str) -> None:
    registry = EngineRegistryStub(client._channel)
    listed = await registry.ListEngines(er.ListEnginesRequest())
    registration = await client.register(engine(name))
    request = er.WatchEnginesRequest(after_revision=listed.revision, service_id=listed.service_id)
    call = registry.WatchEngines(request)
    message = await call.read()
    while name not in [event.engine.engine_id for event in message.events]:
        message = await call.read()
    assert not message.snapshot
    call.cancel()
    for revision, service_id in ((10**9, listed.service_id), (1, "another run")):
        call = registry.WatchEngines(er.WatchEnginesRequest(after_revision=revision, service_id=service_id))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
    await registration.close()


async def test_a_full_registry(make_service: Callable[..., MetaProcess]) -> None:
    service = make_service("--max-engines", "1")
    async with MetaClient(service.target, ClientOptions(deadline_s=0.5)) as client:
        first = await client.register(engine("d0"))
        with pytest.raises(MetaExhaustedError, match="1 engines are registered") as refused:
            await client.register(engine("d1"))
        assert refused.value.retry_after_s == 1.0
        await first.close()
        await client.register(engine("d1"))


async def test_an_expiry_storm(make_service: Callable[..., MetaProcess]) -> None:
    service = make_service()
    async with MetaClient(service.target) as client:
        quick = Follower(client)
        registry = EngineRegistryStub(client._channel)
        for start in range(0, 2_000, 250):
            await asyncio.gather(
                *(
                    registry.Register(er.RegisterRequest(engine=engine(f"d{number}"), requested_ttl_ms=3_000))
                    for number in range(start, start + 250)
                )
            )
        await until(lambda: sum("EXPIRED" in line for line in quick.lines) == 2_000, timeout_s=20.0)
        assert await engine_ids(client) == []
        await quick.stop()
