"""The gRPC face of the engine registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from rd2h_client.v1 import engine_registry_pb2 as pb
from rd2h_client.v1.engine_registry_pb2_grpc import EngineRegistryServicer

from rd2h_meta.errors import LimitError, MetaServiceError, NotYetError
from rd2h_meta.registry import EngineRegistry
from rd2h_meta.status import abort

Context = Any
"""grpc.aio.ServicerContext; its published types do not fit the asyncio server."""

MAX_BATCH_BYTES = 1024 * 1024
"""Changes are put into one message up to this size, so that it stays below gRPC's usual 4 MiB: an engine with the
longest layout allowed takes about 0.7 MiB."""

MAX_BATCH_EVENTS = 1_000
"""Changes taken from a watcher's queue at a time."""


class EngineService(EngineRegistryServicer):
    """Serves one registry. All calls run on one event loop, so the registry needs no lock."""

    def __init__(self, registry: EngineRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = registry
        self._clock = clock
        self._draining = asyncio.Event()

    def start_draining(self) -> None:
        """End all watches with UNAVAILABLE; leases stay."""
        self._draining.set()

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:  # noqa: N802
        """See engine_registry.proto."""
        try:
            grant = self.registry.register(request.engine, request.requested_ttl_ms / 1000, self._clock())
        except MetaServiceError as error:
            await abort(context, error)
        return pb.RegisterResponse(
            lease_id=grant.lease_id,
            ttl_ms=round(grant.ttl_s * 1000),
            revision=grant.revision,
            service_id=self.registry.service_id,
        )

    async def KeepAlive(self, request: pb.KeepAliveRequest, context: Context) -> pb.KeepAliveResponse:  # noqa: N802
        """See engine_registry.proto."""
        load = request.load if request.HasField("load") else None
        health = request.health if request.HasField("health") else None
        try:
            ttl_s = self.registry.keep_alive(request.lease_id, request.state, load, health, self._clock())
        except MetaServiceError as error:
            await abort(context, error)
        return pb.KeepAliveResponse(ttl_ms=round(ttl_s * 1000))

    async def Deregister(self, request: pb.DeregisterRequest, context: Context) -> pb.DeregisterResponse:  # noqa: N802
        """See engine_registry.proto."""
        self.registry.deregister(request.lease_id)
        return pb.DeregisterResponse()

    async def ListEngines(  # noqa: N802
        self, request: pb.ListEnginesRequest, context: Context
    ) -> pb.ListEnginesResponse:
        """See engine_registry.proto."""
        now_s = self._clock()
        leases = self.registry.leases(request.role)
        return pb.ListEnginesResponse(
            engines=[lease.engine for lease in leases],
            leases=[
                pb.Lease(
                    ttl_ms=round(lease.ttl_s * 1000),
                    remaining_ms=max(0, round((lease.deadline_s - now_s) * 1000)),
                    age_ms=max(0, round((now_s - lease.since_s) * 1000)),
                )
                for lease in leases
            ],
            revision=self.registry.revision,
            service_id=self.registry.service_id,
            grace_remaining_ms=self._grace_remaining_ms(),
        )

    async def WatchEngines(  # noqa: N802
        self, request: pb.WatchEnginesRequest, context: Context
    ) -> AsyncIterator[pb.WatchEnginesResponse]:
        """See engine_registry.proto."""
        changed = asyncio.Event()
        try:
            watcher = self.registry.watch(request.role, changed.set)
        except MetaServiceError as error:
            await abort(context, error)
        draining = asyncio.create_task(self._wake_when_draining(changed))
        try:
            for response in self._first_messages(request):
                yield response
            while not (watcher.overflowed or self._draining.is_set()):
                changed.clear()
                while events := watcher.take(MAX_BATCH_EVENTS):
                    for batch in _split(events):
                        yield self._message(batch)
                if not (watcher.overflowed or self._draining.is_set()):
                    await changed.wait()
            if watcher.overflowed:
                await abort(context, LimitError("this watch is read too slowly; list again", 0.1))
            await abort(context, NotYetError("the service drains"))
        except MetaServiceError as error:
            await abort(context, error)
        finally:
            draining.cancel()
            self.registry.unwatch(watcher)

    async def CheckCompatibility(  # noqa: N802
        self, request: pb.CheckCompatibilityRequest, context: Context
    ) -> pb.CheckCompatibilityResponse:
        """See engine_registry.proto."""
        try:
            self.registry.check_compatibility(request.prefill_engine_id, request.decode_engine_id, self._clock())
        except MetaServiceError as error:
            await abort(context, error)
        return pb.CheckCompatibilityResponse()

    async def _wake_when_draining(self, changed: asyncio.Event) -> None:
        await self._draining.wait()
        changed.set()

    def _first_messages(self, request: pb.WatchEnginesRequest) -> list[pb.WatchEnginesResponse]:
        """Return the snapshot, or what a resuming watcher missed; made without a pause, so no change falls between."""
        registry = self.registry
        if request.after_revision or request.service_id:
            return [
                self._message(batch)
                for batch in _split(registry.changes_after(request.after_revision, request.service_id, request.role))
            ]
        snapshot = [
            pb.EngineEvent(kind=pb.EngineEvent.KIND_ADDED, engine=lease.engine, revision=registry.revision)
            for lease in registry.leases(request.role)
        ]
        messages = [self._message(batch) for batch in _split(snapshot)]
        for message in messages:
            message.snapshot = True
            message.snapshot_continues = message is not messages[-1]
            message.revision = registry.revision
        return messages

    def _message(self, events: list[pb.EngineEvent]) -> pb.WatchEnginesResponse:
        return pb.WatchEnginesResponse(
            events=events,
            revision=events[-1].revision if events else self.registry.revision,
            service_id=self.registry.service_id,
            grace_remaining_ms=self._grace_remaining_ms(),
        )

    def _grace_remaining_ms(self) -> int:
        return round(self.registry.grace_remaining_s(self._clock()) * 1000)


def _split(events: list[pb.EngineEvent]) -> list[list[pb.EngineEvent]]:
    """Split events into batches that fit into a message; no events make one empty batch."""
    batches: list[list[pb.EngineEvent]] = [[]]
    room_bytes = MAX_BATCH_BYTES
    for event in events:
        size_bytes = event.ByteSize()
        if size_bytes > room_bytes and batches[-1]:
            batches.append([])
            room_bytes = MAX_BATCH_BYTES
        batches[-1].append(event)
        room_bytes -= size_bytes
    return batches
