"""A client's Exchange stream comes back whatever broke it, and not in a rush."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from meta_harness import MetaProcess, engine, serving, until
from rd2h_client import MetaClient, MetaRefusedError
from rd2h_client.v1 import rendezvous_pb2 as rv
from rd2h_client.v1.engine_registry_pb2_grpc import EngineRegistryServicer
from rd2h_client.v1.rendezvous_pb2_grpc import RendezvousServicer


class Stage(EngineRegistryServicer, RendezvousServicer):  # type: ignore[misc]
    """A service whose streams end at once while ``abrupt``."""

    def __init__(self, abrupt: bool) -> None:
        self.abrupt = abrupt
        self.began_s: list[float] = []
        self.operations: list[rv.Operation] = []

    async def Exchange(self, request_iterator: Any, context: Any) -> AsyncIterator[rv.ExchangeResponse]:  # noqa: N802
        self.began_s.append(time.monotonic())
        yield rv.ExchangeResponse(service_id="stage")
        if self.abrupt:
            return
        done = 0
        async for request in request_iterator:
            self.operations += request.operations
            done += len(request.operations)
            yield rv.ExchangeResponse(operations_done=done)

    async def GetRendezvousStats(  # noqa: N802
        self, request: rv.GetRendezvousStatsRequest, context: Any
    ) -> rv.GetRendezvousStatsResponse:
        return rv.GetRendezvousStatsResponse(service_id="stage")


@asynccontextmanager
async def stage(abrupt: bool = False) -> AsyncIterator[tuple[Stage, str]]:
    service = Stage(abrupt)
    async with serving(service) as target:
        yield service, target


async def test_a_service_that_ends_streams_at_once_is_met_ever_more_slowly() -> None:
    async with stage(abrupt=True) as (service, target), MetaClient(target):
        await until(lambda: len(service.began_s) >= 2)
        began = len(service.began_s)
        await asyncio.sleep(3.0)
        # Pauses grow to a second within five streams; each is shortened by half at most.
        assert len(service.began_s) - began <= 12


@pytest.mark.parametrize("defect", ["the reader", "the writer"])
async def test_a_stream_that_broke_in_the_client_is_followed_by_another(
    defect: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage() as (service, target), MetaClient(target) as client:
        streams = len(service.began_s)
        state = client.exchange
        broken = "receive" if defect == "the reader" else "take_batch"

        def breaks(*arguments: object) -> Any:
            monkeypatch.undo()
            raise LookupError("a defect")

        monkeypatch.setattr(state, broken, breaks)
        events = client.await_children("r", 1, 60.0)
        await until(lambda: len(service.began_s) > streams)
        await until(lambda: any(op.await_children.rendezvous_id == "r" for op in service.operations))
        await until(lambda: client.connected)
        await events.aclose()
    assert "another one follows" in caplog.text


async def test_a_registration_that_its_owner_closes_is_forgotten(shared_service: MetaProcess) -> None:
    async with MetaClient(shared_service.target) as client:
        registration = await client.register(engine())
        await registration.close()
        assert client._registrations == set()


async def test_a_cancelled_close_still_closes_the_stream(
    shared_service: MetaProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = MetaClient(shared_service.target)
    await client.start()
    registration = await client.register(engine())
    hangs = asyncio.Event()
    monkeypatch.setattr(registration, "close", hangs.wait)
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert client._channel is None
    assert not client.connected


async def test_the_count_of_a_new_stream_says_nothing_of_the_one_before() -> None:
    service = Stage(abrupt=False)
    streams = 0

    async def exchange(request_iterator: Any, context: Any) -> AsyncIterator[rv.ExchangeResponse]:
        nonlocal streams
        streams += 1
        # An odd service: its first message counts already.
        yield rv.ExchangeResponse(service_id="stage", operations_done=1 if streams > 1 else 0)
        async for request in request_iterator:
            service.operations += request.operations
            if streams == 1:
                return
            refusals = [rv.OperationResult(op_id=op.op_id, code=3, message="bad") for op in request.operations]
            yield rv.ExchangeResponse(results=refusals, operations_done=len(refusals))

    service.Exchange = exchange  # type: ignore[method-assign]
    async with serving(service) as target, MetaClient(target) as client:
        with pytest.raises(MetaRefusedError):
            await client.cancel("r", "left")
    assert len(service.operations) == 2
