"""What operators read in the log when the service goes away and comes back."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from meta_harness import MetaProcess, engine, in_background, serving, until
from rd2h_client import MetaClient
from rd2h_client.v1 import rendezvous_pb2 as rv
from rd2h_client.v1.engine_registry_pb2_grpc import EngineRegistryServicer
from rd2h_client.v1.rendezvous_pb2_grpc import RendezvousServicer


class Refusing(EngineRegistryServicer, RendezvousServicer):  # type: ignore[misc]
    """Ends streams: the first ones as busy, the next ones as refused, and serves the others."""

    def __init__(self) -> None:
        self.streams = 0

    async def Exchange(self, request_iterator: Any, context: Any) -> AsyncIterator[rv.ExchangeResponse]:  # noqa: N802
        self.streams += 1
        if self.streams <= 3:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "still loading")
        if self.streams <= 6:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")
        yield rv.ExchangeResponse(service_id="refusing")
        await asyncio.Event().wait()


def story(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Level and text of what the default level shows, without durations."""
    return [
        (record.levelname, record.getMessage().partition(" after ")[0])
        for record in caplog.records
        if record.name == "rd2h.client" and record.levelno >= logging.INFO
    ]


async def test_each_outage_is_told_once_with_address_and_reason(
    make_service: Callable[..., MetaProcess], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rd2h.client")
    service = make_service()
    async with MetaClient(service.target) as client:
        assert client.outage == ""
        assert story(caplog) == []
        for outage in range(2):
            service.kill()
            await until(lambda: not client.connected)
            assert client.outage
            lost = story(caplog)[-1]
            assert lost == ("WARNING", f"meta service {service.target} is lost: {client.outage}")
            await asyncio.to_thread(service.start)
            await until(lambda: client.connected)
            assert client.outage == ""
            assert len(story(caplog)) == 2 * (outage + 1)
            assert story(caplog)[-1] == ("INFO", f"meta service {service.target} is back")


async def test_a_service_that_is_not_there_yet_is_told_with_the_reason(
    make_service: Callable[..., MetaProcess], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rd2h.client")
    service = make_service()
    service.kill()
    async with in_background(service.target, engine("d0")) as client:
        await until(lambda: story(caplog))
        level, text = story(caplog)[0]
        assert level == "WARNING"
        assert text.startswith(f"meta service {service.target} is lost: UNAVAILABLE: ")
        assert "refused" in text.lower()
        await asyncio.to_thread(service.start)
        await until(lambda: client.connected)
        assert story(caplog)[1:] == [("INFO", f"meta service {service.target} is back")]


async def test_a_service_that_ends_in_order_is_told_too(
    make_service: Callable[..., MetaProcess], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rd2h.client")
    service = make_service()
    async with MetaClient(service.target) as client:
        await asyncio.to_thread(service.close)
        await until(lambda: story(caplog))
        assert not client.connected
        assert [level for level, _ in story(caplog)] == ["WARNING"]


async def test_a_client_that_is_closed_has_lost_nothing(
    shared_service: MetaProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rd2h.client")
    async with MetaClient(shared_service.target):
        pass
    assert story(caplog) == []


async def test_within_an_outage_only_another_kind_of_failure_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rd2h.client")
    async with serving(Refusing()) as address:
        client = MetaClient(address)
        client.start_connecting()
        try:
            await until(lambda: client.connected)
        finally:
            await client.close()
        assert story(caplog) == [
            ("WARNING", f"meta service grpc://{address} is lost: UNAVAILABLE: still loading"),
            ("WARNING", f"meta service grpc://{address} is lost: UNAUTHENTICATED: wrong token"),
            ("INFO", f"meta service grpc://{address} is back"),
        ]
