"""Clients of a service, or of something between, that answers with errors it takes back later."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from meta_harness import background, engine, serving, until
from rd2h_client import EngineStatus, MetaClient
from rd2h_client.v1 import engine_registry_pb2 as er
from rd2h_client.v1 import rendezvous_pb2 as rv
from rd2h_client.v1.engine_registry_pb2_grpc import EngineRegistryServicer
from rd2h_client.v1.rendezvous_pb2_grpc import RendezvousServicer

TAKEN_BACK = [
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNAUTHENTICATED,
]


class Flaky(EngineRegistryServicer, RendezvousServicer):  # type: ignore[misc]
    """Each call takes the next scripted error of its method; without one it succeeds."""

    def __init__(self) -> None:
        self.errors: dict[str, deque[grpc.StatusCode]] = {}
        self.calls: dict[str, int] = {}
        self.ttl_ms = 300

    async def _enter(self, method: str, context: Any) -> None:
        self.calls[method] = self.calls.get(method, 0) + 1
        if errors := self.errors.get(method):
            await context.abort(errors.popleft(), "scripted")

    async def Register(self, request: er.RegisterRequest, context: Any) -> er.RegisterResponse:  # noqa: N802
        await self._enter("Register", context)
        return er.RegisterResponse(lease_id="lease", ttl_ms=self.ttl_ms, service_id="flaky")

    async def KeepAlive(self, request: er.KeepAliveRequest, context: Any) -> er.KeepAliveResponse:  # noqa: N802
        await self._enter("KeepAlive", context)
        return er.KeepAliveResponse(ttl_ms=self.ttl_ms)

    async def Deregister(self, request: er.DeregisterRequest, context: Any) -> er.DeregisterResponse:  # noqa: N802
        await self._enter("Deregister", context)
        return er.DeregisterResponse()

    async def WatchEngines(  # noqa: N802
        self, request: er.WatchEnginesRequest, context: Any
    ) -> AsyncIterator[er.WatchEnginesResponse]:
        await self._enter("WatchEngines", context)
        event = er.EngineEvent(kind=er.EngineEvent.KIND_ADDED, engine=engine("p0", 7), revision=1)
        yield er.WatchEnginesResponse(events=[event], snapshot=True, revision=1, service_id="flaky")
        await asyncio.Event().wait()

    async def Exchange(self, request_iterator: Any, context: Any) -> AsyncIterator[rv.ExchangeResponse]:  # noqa: N802
        yield rv.ExchangeResponse(service_id="flaky")
        await asyncio.Event().wait()

    async def GetRendezvousStats(  # noqa: N802
        self, request: rv.GetRendezvousStatsRequest, context: Any
    ) -> rv.GetRendezvousStatsResponse:
        return rv.GetRendezvousStatsResponse(service_id="flaky")


@asynccontextmanager
async def flaky_service(**errors: list[grpc.StatusCode]) -> AsyncIterator[tuple[Flaky, str]]:
    service = Flaky()
    service.errors = {method: deque(codes) for method, codes in errors.items()}
    async with serving(service) as target:
        yield service, target


@pytest.mark.parametrize("code", TAKEN_BACK)
async def test_a_lease_is_kept_through_an_error_that_says_nothing_about_the_engine(code: grpc.StatusCode) -> None:
    async with flaky_service(KeepAlive=[code]) as (service, target), MetaClient(target) as client:
        registration = await client.register(engine())
        await until(lambda: service.calls.get("KeepAlive", 0) + service.calls["Register"] >= 5)
        assert registration.lost is None


async def test_a_refusal_of_the_engine_itself_is_final() -> None:
    refused = [grpc.StatusCode.FAILED_PRECONDITION]
    async with flaky_service(KeepAlive=refused) as (_, target), MetaClient(target) as client:
        registration = await client.register(engine())
        await until(lambda: registration.lost is not None)


async def test_a_status_that_cannot_be_told_for_a_moment_is_logged_and_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = 0

    def poll() -> EngineStatus:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise LookupError("the engine is being reconfigured")
        return EngineStatus()

    async with flaky_service() as (service, target), MetaClient(target) as client:
        caplog.set_level(logging.ERROR, "rd2h.client")
        await client.register(engine(), poll)
        await until(lambda: service.calls.get("KeepAlive", 0) >= 3)
    assert "the engine is being reconfigured" in caplog.text


@pytest.mark.parametrize("code", [*TAKEN_BACK, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_a_client_closes_though_the_service_refuses_to_end_a_lease(code: grpc.StatusCode) -> None:
    async with flaky_service(Deregister=[code]) as (_, target):
        client = MetaClient(target)
        await client.start()
        await client.register(engine())
        await client.close()
        assert client._channel is None
        assert not client.connected


@pytest.mark.parametrize("code", TAKEN_BACK)
async def test_a_background_client_follows_the_registry_again(code: grpc.StatusCode) -> None:
    async with flaky_service(WatchEngines=[code]) as (_, target):
        client = background(target, engine())
        try:
            await until(lambda: client.generation_of("p0") == 7)
        finally:
            assert await asyncio.to_thread(client.stop, 5.0)


async def test_a_lease_without_a_time_is_not_renewed_without_a_pause() -> None:
    async with flaky_service() as (service, target), MetaClient(target) as client:
        service.ttl_ms = 0
        await client.register(engine())
        await asyncio.sleep(0.5)
        assert service.calls.get("KeepAlive", 0) <= 6
