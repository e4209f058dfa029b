"""Fixtures: one shared service for tests that leave it alone, and a maker of services to kill."""

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from meta_harness import MetaProcess
from rd2h_client import MetaClient


@pytest.fixture(scope="session")
def shared_service() -> Iterator[MetaProcess]:
    service = MetaProcess()
    yield service
    service.close()


@pytest.fixture
def make_service() -> Iterator[Callable[..., MetaProcess]]:
    services: list[MetaProcess] = []

    def make(*flags: str, **options: str) -> MetaProcess:
        services.append(MetaProcess(*flags, **options))
        return services[-1]

    yield make
    for service in services:
        service.close()


@pytest.fixture
async def client(shared_service: MetaProcess) -> AsyncIterator[MetaClient]:
    async with MetaClient(shared_service.target) as connected:
        yield connected
