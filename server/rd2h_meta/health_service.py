"""grpc.health.v1 with one service name per engine, computed from the registry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from rd2h_meta.errors import MetaServiceError, UnknownError
from rd2h_meta.registry import EngineHealth, EngineRegistry
from rd2h_meta.status import abort

ENGINE_PREFIX = "rd2h.engine."
"""Service name of an engine's health: this and the engine id."""

SERVICE_NAMES = ("", "rd2h.meta.v1.EngineRegistry", "rd2h.meta.v1.Rendezvous")
"""Names of the service itself."""

LIVENESS = "liveness"
"""Always serving while the process answers: a service that drains is not ready, but must not be killed for it."""

_STATUS = {
    EngineHealth.SERVING: health_pb2.HealthCheckResponse.SERVING,
    EngineHealth.NOT_SERVING: health_pb2.HealthCheckResponse.NOT_SERVING,
    EngineHealth.UNKNOWN: health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
}


class HealthService(health_pb2_grpc.HealthServicer):
    """Health of this service and of every engine. An engine serves while its lease is live, its state is SERVING and
    its data path is healthy."""

    def __init__(self, registry: EngineRegistry) -> None:
        self._registry = registry
        self._draining = asyncio.Event()
        self._stopped = asyncio.Event()

    def start_draining(self) -> None:
        """Tell everybody that this service takes nothing new."""
        self._draining.set()

    def close_streams(self) -> None:
        """End all watches."""
        self._stopped.set()
        self._draining.set()

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """See grpc/health/v1/health.proto: an unknown service is NOT_FOUND."""
        status = self._status_of(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await abort(context, UnknownError(f"service: {request.service[:80]!r} is not known"))
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """See grpc/health/v1/health.proto: the status now, then every change of it."""
        changed = asyncio.Event()
        try:
            observer = self._registry.observe(changed.set)
        except MetaServiceError as error:
            await abort(context, error)
        wakers = [asyncio.create_task(_set_after(event, changed)) for event in (self._draining, self._stopped)]
        told = None
        try:
            while not self._stopped.is_set():
                changed.clear()
                status = self._status_of(request.service)
                if status != told:
                    told = status
                    yield health_pb2.HealthCheckResponse(status=status)
                await changed.wait()
        finally:
            for waker in wakers:
                waker.cancel()
            self._registry.unobserve(observer)

    def _status_of(self, name: str) -> int:
        if name.startswith(ENGINE_PREFIX):
            return int(_STATUS[self._registry.health_of(name.removeprefix(ENGINE_PREFIX))])
        if name == LIVENESS:
            return int(health_pb2.HealthCheckResponse.SERVING)
        if name not in SERVICE_NAMES:
            return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        if self._draining.is_set():
            return int(health_pb2.HealthCheckResponse.NOT_SERVING)
        return int(health_pb2.HealthCheckResponse.SERVING)


async def _set_after(event: asyncio.Event, changed: asyncio.Event) -> None:
    await event.wait()
    changed.set()
